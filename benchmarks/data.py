"""How fast Paceline's sampler and torch's return indices, on one core."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.job import Launch
from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Runner, Settings, Timing, no_torch
from benchmarks.samples import slowest_median
from paceline import units
from paceline.units import format_ratio, format_time

LENGTH = 10**8
SAMPLE_S = 0.1


class _Task(NamedTuple):
    """One use of a sampler; its data set is `fraction` times smaller than the largest one."""

    key: str
    label: str
    fraction: int


TASKS = (
    _Task("start", "until an epoch's first index", 1),
    _Task("bulk", "a rank's indices, in bulk", 10),
    _Task("iterate", "a rank's indices, one by one", 50),
    _Task("loader", "an epoch through a DataLoader", 500),
)


def _one_core(ranks: int) -> Launch:
    return Launch(cores=(frozenset({max(os.sched_getaffinity(0))}),) * ranks)


def _case(key: str, label: str) -> Case:
    target = "benchmarks.workers.torch_samplers:Samplers"
    return Case(key, label, target, {"variant": key}, no_torch, _one_core)


CASES = (_case("paceline", "Paceline"), _case("torch", "torch"))


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for task in TASKS:
            samples = max(2, given.length // task.fraction)
            counts = runner.prepare(task.label, task=task.key, length=samples)
            timings = runner.measure(task.label, SAMPLE_S)
            rows.append(_row(runner.cases, task, samples, counts, timings))
            data += [
                {
                    "task": task.key,
                    "samples": samples,
                    "case": key,
                    "indices": counts[key][0],
                    "median_s": slowest_median(timing.samples),
                    "samples_s": timing.samples,
                }
                for key, timing in timings.items()
            ]
    return settings.report(
        "data",
        "DistributedSampler, one of two ranks, one core",
        ["what", "samples", *(case.label for case in runner.cases), "torch / Paceline"],
        rows,
        notes=[
            f"Median of {settings.rounds} rounds. Each call is an epoch of its own, begun with set_epoch.",
            "In bulk: Paceline's as arrays, torch's as the list that it makes.",
            "The DataLoader reads from a range, without workers and without making tensors.",
            *runner.notes(),
        ],
        data={"rows": data},
        is_complete=runner.is_complete,
    )


def _row(
    cases: list[Case],
    task: _Task,
    samples: int,
    counts: Mapping[str, list[int]],
    timings: Mapping[str, Timing],
) -> list[str]:
    times = {key: slowest_median(timing.samples) for key, timing in timings.items()}
    cells = [
        _speed(times[case.key], counts[case.key][0]) if case.key in times else "failed" for case in cases
    ]
    ratio = format_ratio(times["torch"] / times["paceline"]) if {"torch", "paceline"} <= set(times) else "-"
    return [task.label, f"{samples:,}", *cells, ratio]


def _speed(seconds: float, count: int) -> str:
    return format_time(seconds) if count == 1 else f"{count / seconds / 1e6:.1f} million/s"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--length",
        type=units.at_least(1000),
        default=LENGTH,
        metavar="N",
        help="samples of the largest data set (default 10^8, for which torch's sampler takes 5 GB)",
    )


BENCHMARK = Benchmark(
    "how fast a sampler returns indices, compared with torch's DistributedSampler",
    5,
    run,
    lambda given: CASES,
    _add_arguments,
    has_ranks=False,
)
