"""An optimizer's step that is sharded over the ranks, compared with the whole step on each rank.

The models of all cases do not fit into memory together. So some of Paceline's cases take turns, round after
round, with those that they are compared with; then the other cases take turns with the same ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Runner, Settings, Timing, bound, no_torch, rows_of
from benchmarks.samples import Interval, ratio, slowest_median
from paceline import units
from paceline.units import format_ratio, format_time

SAMPLE_S = 0.1
LAYER_PARAMETERS = 1_025_000
OPTIMIZERS = {
    "AdamW": {"fused": False},
    "AdamW, fused": {"fused": True},
    "backward, AdamW, fused": {"fused": True, "with_backward": True},
}


def _case(key: str, label: str, **options: Any) -> Case:
    return Case(key, label, "benchmarks.workers.torch_optimizer:OptimizerStep", options, no_torch, bound)


CASES = (
    _case("whole", "the whole step on each rank", variant="whole"),
    _case("zero", "ZeroRedundancyOptimizer on Gloo", variant="zero"),
    _case(
        "zero_view",
        "ZeroRedundancyOptimizer, bucket view",
        variant="zero",
        parameters_as_bucket_view=True,
    ),
    _case("paceline", "Paceline ShardedOptimizer", variant="paceline"),
    _case("paceline_shared", "Paceline, with share_parameters", variant="one_model"),
    _case("paceline_scatter", 'Paceline, shared, reduce="scatter"', variant="scatter"),
    _case("paceline_group", "Paceline, over Gloo", variant="paceline", reduce_through="group"),
)

COMPARED = ("whole", "zero", "zero_view")
TOGETHER = (("paceline", "paceline_group"), ("paceline_shared", "paceline_scatter"))
"""Paceline's cases whose models exist at the same time, beside those of `COMPARED`."""


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    layers = max(1, round(given.parameters * 1_000_000 / LAYER_PARAMETERS))
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for optimizer, options in OPTIMIZERS.items():
            measured: dict[str, Measured] = {}
            for keys in turns(runner.cases):
                among = runner.among([*COMPARED, *keys])
                facts = among.prepare(optimizer, layers=layers, **options)
                among.take_out_unequal(facts, "parameters")
                timings = among.measure(optimizer, SAMPLE_S)
                data += [
                    {"optimizer": optimizer, "case": key, "beside": keys, "samples_s": timing.samples}
                    for key, timing in timings.items()
                ]
                for key in timings:
                    measured.setdefault(key, Measured(key, timings))
                among.on_all("prepare", optimizer, layers=1, **options)  # frees the large models
            rows += [*table(runner.cases, optimizer, measured), []]
    count = layers * LAYER_PARAMETERS
    return settings.report(
        "optimizer",
        f"one step of AdamW, {count / 1e6:.1f} M parameters in float32, {settings.ranks} ranks on one host",
        ["optimizer", "case", "step", "whole / this", "95 % interval", "ZeRO / this", "95 % interval"],
        rows,
        notes=[
            f"step: median of {settings.rounds} rounds on each rank, then the slowest rank; until every rank "
            "has all updated parameters. whole / this: the time of the whole step on each rank, at once, "
            "divided round by round, median over rounds. ZeRO / this: the same of ZeroRedundancyOptimizer, "
            "of the faster one of its cases.",
            "Some of Paceline's cases take turns with the first three, and then the others too, because "
            "not all models fit into memory together. Ratios are those of the rounds of each case.",
            f"{layers} layers of {LAYER_PARAMETERS:,} parameters in two tensors. The gradients exist before. "
            "The last part clears them, and computes and averages them in a backward that only fills memory "
            "(torch's DDP with ZeroRedundancyOptimizer, Paceline's with all others).",
            "Before timing, three steps of a small model were compared with torch.optim.AdamW's, bit for "
            "bit, and the large model between the ranks.",
            *runner.notes(),
        ],
        data={"parameters": count, "rows": data},
        is_complete=runner.is_complete,
        text_columns=2,
    )


def turns(cases: list[Case]) -> list[list[str]]:
    """Return the keys of Paceline's cases in groups that are measured together; at least one group."""
    here = {case.key for case in cases}
    chosen = [[key for key in keys if key in here] for keys in TOGETHER]
    return [keys for keys in chosen if keys] or [[]]


class Measured:
    """One case with one optimizer, and the cases that it took turns with."""

    def __init__(self, key: str, timings: Mapping[str, Timing]) -> None:
        self.key, self._timings = key, timings
        self.samples = timings[key].samples

    def faster_than(self, other: str) -> Interval | None:
        """Return the other case's time, divided by this one's."""
        if other not in self._timings or other == self.key:
            return None
        return ratio(self._timings[other].samples, self.samples)

    def faster_than_zero(self) -> Interval | None:
        """Return the same for the faster of ZeroRedundancyOptimizer's cases."""
        zeros = [key for key in COMPARED if key != "whole" and key in self._timings]
        if self.key in COMPARED or not zeros:
            return None
        return self.faster_than(min(zeros, key=lambda key: slowest_median(self._timings[key].samples)))


def table(cases: list[Case], optimizer: str, measured: Mapping[str, Measured]) -> list[list[str]]:
    """Return the rows of one optimizer."""

    def cells(key: str) -> list[str]:
        found = [format_time(slowest_median(measured[key].samples))]
        for times in (measured[key].faster_than("whole"), measured[key].faster_than_zero()):
            interval = "-" if times is None else f"{times.low:.2f} .. {times.high:.2f}"
            found += ["-" if times is None else format_ratio(times.median), interval]
        return found

    return rows_of(cases, measured, 5, cells, optimizer)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parameters",
        type=units.at_least(1),
        default=50,
        metavar="M",
        help="millions of parameters (default 50); each takes some 200 bytes of memory in all",
    )


BENCHMARK = Benchmark(
    "an optimizer's step that is sharded over the ranks, compared with the whole step on each rank",
    15,
    run,
    lambda given: CASES,
    _add_arguments,
)
