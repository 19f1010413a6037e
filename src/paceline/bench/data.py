"""`paceline bench data`: how fast indices come, from Paceline's sampler and from torch's, on one core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.bench.conductor import Launch
from paceline.bench.contest import Contest, Entry, Plan, Timing, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import slowest_median
from paceline.bench.units import format_ratio, format_time

LENGTH = 10**8
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Task:
    """One thing to time.

    Attributes:
        key: Name in JSON.
        label: Name in the table.
        share: The data set of this task is so many times smaller than the largest.
    """

    key: str
    label: str
    share: int


TASKS = (
    Task("start", "until an epoch's first index", 1),
    Task("bulk", "a rank's indices, in bulk", 10),
    Task("iterate", "a rank's indices, one by one", 50),
    Task("loader", "an epoch through a DataLoader", 500),
)


def _one_core(ranks: int) -> Launch:
    return Launch(cores=(frozenset({max(os.sched_getaffinity(0))}),) * ranks)


def _entry(key: str, label: str) -> Entry:
    target = "paceline.torch.bench.samplers:Samplers"
    return Entry(key, label, target, {"way": key}, no_torch, _one_core)


ENTRIES = (_entry("paceline", "Paceline"), _entry("torch", "torch"))


def run(plan: Plan, length: int = LENGTH) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with plan.contest(ENTRIES) as contest:
        for task in TASKS:
            samples = max(2, length // task.share)
            plan.say(f"{task.label}: checking")
            counts = contest.prepare(task.label, task=task.key, length=samples)
            timings = contest.measure(task.label, plan.rounds, SAMPLE_S)
            rows.append(_row(contest, task, samples, counts, timings))
            data += _as_data(task, samples, counts, timings)
    return Report(
        theme="data",
        title="DistributedSampler, one of two ranks, one core",
        command=plan.command,
        machine=machine,
        columns=["what", "samples", *(c.entry.label for c in contest.contenders), "torch / Paceline"],
        rows=rows,
        notes=[
            f"Median of {plan.rounds} rounds. Each call is an epoch of its own, begun with set_epoch.",
            "In bulk: Paceline's as arrays, torch's as the list that it makes.",
            "The DataLoader reads from a range, without workers and without making tensors.",
            *plan.notes(contest),
        ],
        data={"rows": data},
        is_complete=not contest.ours_failed,
    )


def _row(
    contest: Contest, task: Task, samples: int, counts: Mapping[str, list[int]], timings: Mapping[str, Timing]
) -> list[str]:
    times = {key: slowest_median(timing.samples) for key, timing in timings.items()}
    cells = [
        _figure(times[c.entry.key], counts[c.entry.key][0]) if c.entry.key in times else "failed"
        for c in contest.contenders
    ]
    ratio = format_ratio(times["torch"] / times["paceline"]) if {"torch", "paceline"} <= set(times) else "-"
    return [task.label, f"{samples:,}", *cells, ratio]


def _figure(seconds: float, count: int) -> str:
    return format_time(seconds) if count == 1 else f"{count / seconds / 1e6:.1f} million/s"


def _as_data(
    task: Task, samples: int, counts: Mapping[str, list[int]], timings: Mapping[str, Timing]
) -> list[dict[str, Any]]:
    return [
        {
            "task": task.key,
            "samples": samples,
            "contender": key,
            "indices": counts[key][0],
            "median_s": slowest_median(timing.samples),
            "samples_s": timing.samples,
        }
        for key, timing in timings.items()
    ]
