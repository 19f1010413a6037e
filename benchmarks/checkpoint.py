"""How long a checkpoint delays a step, compared with one copy of the state in memory."""

from __future__ import annotations

import argparse

from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Runner, Settings, bound, no_torch
from benchmarks.samples import ratio, slowest_median
from paceline import units
from paceline.units import format_ratio, format_time

CASES = (
    Case(
        "paceline",
        "Paceline Checkpointer",
        "benchmarks.workers.torch_checkpoint:SavedRun",
        {},
        no_torch,
        bound,
    ),
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    samples: dict[str, list[list[float]]] = {"copy_s": [[]], "held_up_s": [[]]}
    with Runner(settings) as runner:
        sizes = runner.prepare("a checkpoint", layers=given.parameters).get("paceline", [0])
        for number in range(settings.rounds):
            settings.show(f"round {number + 1} of {settings.rounds}")
            for taken in runner.on_all("time_both", "a checkpoint").values():
                for key, rounds in samples.items():
                    rounds[0].append(taken[0][key])  # of rank 0, which has the state
    rows = []
    if samples["copy_s"][0]:
        times = ratio(samples["held_up_s"], samples["copy_s"])
        rows = [
            [
                f"{given.parameters} M parameters, {sizes[0] / 1e6:.0f} MB",
                format_time(slowest_median(samples["copy_s"])),
                format_time(slowest_median(samples["held_up_s"])),
                format_ratio(times.median),
                f"{times.low:.2f} .. {times.high:.2f}",
            ]
        ]
    return settings.report(
        "checkpoint",
        f"a step that is saved, Adam in float32, {settings.ranks} ranks on one host",
        ["state", "one copy", "held up", "held up / one copy", "95 % interval"],
        rows,
        notes=[
            f"Medians of {settings.rounds} rounds on rank 0. one copy: of all tensors of the state, to "
            "allocated memory. held up: checkpointer.step() and save(), while nothing is being written.",
            *runner.notes(),
        ],
        data={"bytes": sizes[0], **samples},
        is_complete=runner.is_complete and bool(rows),
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "millions of parameters (default 50); each takes some 50 bytes of memory, and 12 on the disk"
    parser.add_argument("--parameters", type=units.at_least(1), default=50, metavar="M", help=what)


BENCHMARK = Benchmark(
    "how long a checkpoint delays a step, compared with a copy of the state",
    20,
    run,
    lambda given: CASES,
    _add_arguments,
    has_starts=False,
)
