"""`paceline bench optimizer`: a step of which each rank makes a part, against the whole step on each rank."""

from __future__ import annotations

from typing import Any

from paceline.bench.contest import Contest, Entry, Plan, Timing, bound, changes, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import ratio, slowest_median
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


def run(plan: Plan, parameters: int) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    layers = max(1, round(parameters / LAYER_PARAMETERS))
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    changed: list[str] = []
    with plan.contest(ENTRIES) as contest:
        for variant, options in VARIANTS.items():
            plan.say(f"{variant}: checking steps")
            facts = contest.prepare(variant, layers=layers, **options)
            _check_ranks(contest, facts)
            timings = contest.measure(variant, plan.rounds, SAMPLE_S)
            rows += [*_rows(contest, variant, timings), []]
            changed += changes(contest, variant, timings)
            data += [
                {"variant": variant, "way": key, "samples_s": timing.samples}
                for key, timing in timings.items()
            ]
    count = layers * LAYER_PARAMETERS
    return Report(
        theme="optimizer",
        title=f"one step of AdamW, {count / 1e6:.1f} M parameters in float32, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["optimizer", "way", "step", "whole / this", "95 % interval"],
        rows=rows,
        notes=[
            f"step: median of {plan.rounds} rounds on each rank, then the slowest rank; until every rank has "
            "all updated parameters. whole / this: the time of the whole step on each rank, at once, divided "
            "round by round, median over rounds.",
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


def _rows(contest: Contest, variant: str, timings: dict[str, Timing]) -> list[list[str]]:
    rows: list[list[str]] = []
    for contender in contest.contenders:
        key = contender.entry.key
        cells = [variant if not rows else "", contender.entry.label]
        if key not in timings:
            rows.append([*cells, "failed", "-", "-"])
            continue
        cells.append(format_time(slowest_median(timings[key].samples)))
        if key == "whole" or "whole" not in timings:
            rows.append([*cells, "-", "-"])
            continue
        times = ratio(timings["whole"].samples, timings[key].samples)
        rows.append([*cells, format_ratio(times.median), f"{times.low:.2f} .. {times.high:.2f}"])
    return rows
