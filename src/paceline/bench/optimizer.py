"""`paceline bench optimizer`: a step of which each rank makes a part, against the whole step on each rank.

One idea: the models of all contenders would not fit into memory together. So some of Paceline's take turns
with those that they are compared with, round after round, and then the next ones with the same.
"""

from __future__ import annotations

from typing import Any

from paceline.bench.contest import Contest, Entry, Plan, Timing, bound, changes, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import Interval, ratio, slowest_median
from paceline.bench.units import format_ratio, format_time

SAMPLE_S = 0.1
LAYER_PARAMETERS = 1_025_000
VARIANTS = {
    "AdamW": {"fused": False},
    "AdamW, fused": {"fused": True},
    "backward, AdamW, fused": {"fused": True, "with_backward": True},
}


def _entry(key: str, label: str, **options: Any) -> Entry:
    return Entry(key, label, "paceline.torch.bench.optimizer:OptimizerStep", options, no_torch, bound)


ENTRIES = (
    _entry("whole", "the whole step on each rank", way="whole"),
    _entry("zero", "ZeroRedundancyOptimizer on Gloo", way="zero"),
    _entry(
        "zero_view",
        "ZeroRedundancyOptimizer, bucket view",
        way="zero",
        parameters_as_bucket_view=True,
    ),
    _entry("paceline", "Paceline ShardedOptimizer", way="paceline"),
    _entry("paceline_shared", "Paceline, with share_parameters", way="one_model"),
    _entry("paceline_scatter", 'Paceline, shared, reduce="scatter"', way="scatter"),
    _entry("paceline_group", "Paceline, over Gloo", way="paceline", reduce_through="group"),
)

COMPARED = ("whole", "zero", "zero_view")
TOGETHER = (("paceline", "paceline_group"), ("paceline_shared", "paceline_scatter"))
"""Paceline's contenders whose models exist at the same time, beside those of `COMPARED`."""


def run(plan: Plan, parameters: int) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    layers = max(1, round(parameters / LAYER_PARAMETERS))
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    changed: list[str] = []
    with plan.contest(ENTRIES) as contest:
        for variant, options in VARIANTS.items():
            measured: dict[str, _Measured] = {}
            for keys in _turns(contest):
                among = contest.among([*COMPARED, *keys])
                plan.say(f"{variant}: checking steps")
                facts = among.prepare(variant, layers=layers, **options)
                _check_ranks(among, facts)
                timings = among.measure(variant, plan.rounds, SAMPLE_S)
                changed += changes(among, variant, timings)
                data += [
                    {"variant": variant, "way": key, "beside": keys, "samples_s": timing.samples}
                    for key, timing in timings.items()
                ]
                for key in timings:
                    measured.setdefault(key, _Measured(key, timings))
                among.on_all("prepare", variant, layers=1, **options)  # the large models' memory is free
            rows += [*_rows(contest, variant, measured), []]
    count = layers * LAYER_PARAMETERS
    return Report(
        theme="optimizer",
        title=f"one step of AdamW, {count / 1e6:.1f} M parameters in float32, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=[
            "optimizer",
            "way",
            "step",
            "whole / this",
            "95 % interval",
            "ZeRO / this",
            "95 % interval",
        ],
        rows=rows,
        notes=[
            f"step: median of {plan.rounds} rounds on each rank, then the slowest rank; until every rank has "
            "all updated parameters. whole / this: the time of the whole step on each rank, at once, divided "
            "round by round, median over rounds. ZeRO / this: the same of ZeroRedundancyOptimizer, of the "
            "faster one of its ways.",
            "Some of Paceline's ways take turns with the first three, and then the others too, because "
            "not all models fit into memory together. Ratios are those of the rounds of each way.",
            f"{layers} layers of {LAYER_PARAMETERS:,} parameters in two tensors. The gradients are there. "
            "The last part clears them, and makes and averages them in a backward that only fills memory "
            "(torch's DDP with ZeroRedundancyOptimizer, Paceline's with all others).",
            "Before timing, three steps of a small model were compared with torch.optim.AdamW's, bit for "
            "bit, and the large model between the ranks.",
            *changed,
            *plan.notes(contest),
        ],
        data={"ranks": plan.ranks, "rounds": plan.rounds, "parameters": count, "rows": data},
        is_complete=not contest.ours_failed,
        text_columns=2,
    )


def _check_ranks(contest: Contest, facts: dict[str, list[dict[str, Any]]]) -> None:
    for contender in contest.contenders:
        if len({fact["digest"] for fact in facts.get(contender.entry.key, [])}) > 1:
            contender.take_out("parameters differ between ranks")


def _turns(contest: Contest) -> list[list[str]]:
    """Paceline's contenders in this run, by the turn in which they are measured; at least one turn."""
    here = {contender.entry.key for contender in contest.contenders}
    turns = [[key for key in keys if key in here] for keys in TOGETHER]
    return [keys for keys in turns if keys] or [[]]


class _Measured:
    """One way in one part of the bench, beside those that it has taken turns with."""

    def __init__(self, key: str, timings: dict[str, Timing]) -> None:
        self.key, self._timings = key, timings
        self.samples = timings[key].samples

    def faster_than(self, other: str) -> Interval | None:
        """What the other took, divided by what this takes."""
        if other not in self._timings or other == self.key:
            return None
        return ratio(self._timings[other].samples, self.samples)

    def faster_than_zero(self) -> Interval | None:
        """The same, of the faster one of ZeroRedundancyOptimizer's ways."""
        zeros = [key for key in COMPARED if key != "whole" and key in self._timings]
        if self.key in COMPARED or not zeros:
            return None
        return self.faster_than(min(zeros, key=lambda key: slowest_median(self._timings[key].samples)))


def _rows(contest: Contest, variant: str, measured: dict[str, _Measured]) -> list[list[str]]:
    rows: list[list[str]] = []
    for contender in contest.contenders:
        way = measured.get(contender.entry.key)
        cells = [variant if not rows else "", contender.entry.label]
        if way is None:
            rows.append([*cells, "failed", *["-"] * 4])
            continue
        cells.append(format_time(slowest_median(way.samples)))
        for times in (way.faster_than("whole"), way.faster_than_zero()):
            cells += ["-", "-"] if times is None else [format_ratio(times.median), _spelled(times)]
        rows.append(cells)
    return rows


def _spelled(times: Interval) -> str:
    return f"{times.low:.2f} .. {times.high:.2f}"
