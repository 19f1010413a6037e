"""`paceline bench killed`: how soon the survivors know, when a rank is killed in the middle of training."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from paceline.bench.conductor import ContenderFailed, Job
from paceline.bench.contest import Entry, Plan, bound, no_torch, unbound
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.units import format_size, format_time

_LIMIT_S = 90.0


def _entry(key: str, label: str, **options: Any) -> Entry:
    launch = unbound if options["way"] == "torch" else bound
    return Entry(key, label, "paceline.torch.bench.killed:UntilError", options, no_torch, launch)


ENTRIES = (
    _entry("paceline", "Paceline DDP", way="paceline"),
    _entry("torch", "torch DDP on Gloo", way="torch"),
)


def run(plan: Plan, resident_mib: int) -> Report:
    """Kill the last rank `plan.rounds` times for each contender, in turn, and report."""
    machine = Machine.here()
    entries, absent = plan.able(ENTRIES)
    tries: dict[str, list[dict[str, Any]]] = {entry.key: [] for entry in entries}
    for number in range(plan.rounds):
        for entry in entries:
            plan.say(f"{entry.label}: try {number + 1} of {plan.rounds}")
            tries[entry.key].append(_kill_once(entry, plan.ranks, resident_mib))
    ballast = format_size(resident_mib << 20) if resident_mib else "nothing more"
    return Report(
        theme="killed",
        title=f"SIGKILL of rank {plan.ranks - 1} of {plan.ranks}, until every survivor has raised",
        command=plan.command,
        machine=machine,
        columns=["way", "tries", "median", "slowest", "killed rank named", "a survivor's error"],
        rows=[_row(entry, tries[entry.key]) for entry in entries],
        notes=[
            f"In the middle of training steps; the killed rank held {ballast} besides the model. "
            "Time of the slowest survivor.",
            *absent,
            *(f"{entry.label}: {why}" for entry in entries for why in _failures(tries[entry.key])),
        ],
        data={"ranks": plan.ranks, "resident_mib": resident_mib, "rows": tries},
        is_complete=not any(_failures(tries[entry.key]) for entry in entries if entry.is_ours),
    )


def _kill_once(entry: Entry, ranks: int, resident_mib: int) -> dict[str, Any]:
    """One try: seconds by survivor, whether each named the killed rank, or why it could not be done."""
    victim = ranks - 1
    options = {**entry.options, "victim": victim, "resident_mib": resident_mib}
    with Job(entry.label, entry.target, ranks, entry.launch(ranks), options) as job:
        try:
            job.start()
        except ContenderFailed as error:
            return {"failure": f"start: {error}"}
        job.send("train", limit_s=_LIMIT_S)
        time.sleep(random.uniform(0.5, 1.0))  # somewhere in a step, another place each time
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


def _row(entry: Entry, tries: list[dict[str, Any]]) -> list[str]:
    good = [one for one in tries if "failure" not in one]
    if not good:
        return [entry.label, str(len(tries)), "failed", "-", "-", "-"]
    slowest = sorted(max(one["seconds"]) for one in good)
    named = sum(one["named"] for one in good)
    count = f"{len(good)} of {len(tries)}" if len(good) < len(tries) else str(len(tries))
    median = statistics.median(slowest)
    error = str(good[0]["error"]).splitlines()[0][:60]
    times = [format_time(median), format_time(slowest[-1])]
    return [entry.label, count, *times, f"{named} of {len(good)}", error]
