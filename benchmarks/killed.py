"""How soon the survivors raise when a rank is killed during training."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from benchmarks.job import CaseFailed, Job
from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Settings, bound, no_torch, unbound
from paceline import units
from paceline.units import format_size, format_time

_LIMIT_S = 90.0
_TARGET = "benchmarks.workers.torch_step:UntilError"
CASES = (
    Case("paceline", "Paceline DDP", _TARGET, {"variant": "paceline"}, no_torch, bound),
    Case("torch", "torch DDP on Gloo", _TARGET, {"variant": "torch"}, no_torch, unbound),
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Kill the last rank once in each round, in each case, and report."""
    cases, absent = settings.able()
    tries: dict[str, list[dict[str, Any]]] = {case.key: [] for case in cases}
    for number in range(settings.rounds):
        for case in cases:
            settings.show(f"{case.label}: try {number + 1} of {settings.rounds}")
            tries[case.key].append(_kill_once(case, settings.ranks, given.resident))
    ballast = format_size(given.resident << 20) if given.resident else "nothing more"
    return settings.report(
        "killed",
        f"SIGKILL of rank {settings.ranks - 1} of {settings.ranks}, until every survivor has raised",
        ["case", "tries", "median", "slowest", "killed rank named", "a survivor's error"],
        [_row(case, tries[case.key]) for case in cases],
        notes=[
            f"In the middle of training steps; the killed rank held {ballast} besides the model. "
            "Time of the slowest survivor.",
            *absent,
            *(f"{case.label}: {why}" for case in cases for why in _failures(tries[case.key])),
        ],
        data={"resident_mib": given.resident, "rows": tries},
        is_complete=not any(_failures(tries[case.key]) for case in cases if case.is_ours),
    )


def _kill_once(case: Case, ranks: int, resident_mib: int) -> dict[str, Any]:
    """Make one try; return the survivors' seconds and whether all named the killed rank, or why it failed."""
    victim = ranks - 1
    options = {**case.options, "victim": victim, "resident_mib": resident_mib}
    with Job(case.label, case.target, ranks, case.launch(ranks), options) as job:
        try:
            job.start()
        except CaseFailed as error:
            return {"failure": f"start: {error}"}
        job.send("train", limit_s=_LIMIT_S)
        time.sleep(random.uniform(0.5, 1.0))  # somewhere in a step, at another moment each time
        killed_s = job.kill(victim)
        answers = job.collect(_LIMIT_S, patience_s=_LIMIT_S)[:victim]
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        return {"failure": failed[0]}
    results = [answer["result"] for answer in answers]
    if any(result["moment_s"] < killed_s for result in results):
        return {"failure": f"raised before the kill: {results[0]['error']}"}
    return {
        "seconds": [result["moment_s"] - killed_s for result in results],
        "named": all(result["is_named"] for result in results),
        "error": results[0]["error"],
    }


def _failures(tries: list[dict[str, Any]]) -> list[str]:
    return [one["failure"] for one in tries if "failure" in one]


def _row(case: Case, tries: list[dict[str, Any]]) -> list[str]:
    good = [one for one in tries if "failure" not in one]
    if not good:
        return [case.label, str(len(tries)), "failed", "-", "-", "-"]
    slowest = sorted(max(one["seconds"]) for one in good)
    named = sum(one["named"] for one in good)
    count = f"{len(good)} of {len(tries)}" if len(good) < len(tries) else str(len(tries))
    error = str(good[0]["error"]).splitlines()[0][:60]
    times = [format_time(statistics.median(slowest)), format_time(slowest[-1])]
    return [case.label, count, *times, f"{named} of {len(good)}", error]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "memory that the killed rank holds (default 1024)"
    parser.add_argument("--resident", type=units.at_least(0), default=1024, metavar="MIB", help=what)


BENCHMARK = Benchmark(
    "time from SIGKILL of a rank until all survivors have raised",
    5,
    run,
    lambda given: CASES,
    _add_arguments,
    has_starts=False,
)
