"""`paceline bench memory`: what gradients and their buckets take, at the peak of a training step.

One idea: memory that ranks share must be counted once. PSS (proportional set size) charges each page to its
users in equal parts, so its sum over the ranks counts every page once; RSS would count shared pages N times.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.conductor import ContenderFailed, Job, Launch
from paceline.bench.contest import Entry, Plan, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.units import format_size

_SAMPLE_EVERY_S = 0.002
_STEPS_PER_ROUND = 4
# Freed memory goes back at once, so that what is measured is what is in use and not what malloc keeps.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _entry(key: str, label: str, **options: Any) -> Entry:
    target = "paceline.torch.bench.memory:Memory"
    return Entry(key, label, target, options, no_torch, lambda ranks: Launch(environment=_MALLOC))


ENTRIES = (
    _entry("alone", "alone, no synchronisation", way="alone"),
    _entry("torch", "torch DDP on Gloo", way="torch"),
    _entry("torch_view", "torch DDP on Gloo, bucket view", way="torch", gradient_as_bucket_view=True),
    _entry("paceline", "Paceline DDP", way="paceline"),
    _entry("paceline_view", "Paceline DDP, bucket view", way="paceline", gradient_as_bucket_view=True),
)


def run(plan: Plan) -> Report:
    """Train a wide model with each contender, one after the other, and report the peaks."""
    machine = Machine.here()
    measured: dict[str, dict[str, Any]] = {}
    entries, absent = plan.able(ENTRIES)
    for entry in entries:
        plan.say(entry.label)
        try:
            measured[entry.key] = _measure(entry, plan)
        except ContenderFailed as error:
            measured[entry.key] = {"failure": str(error)}
    failed = [entry for entry in entries if "failure" in measured[entry.key]]
    return Report(
        theme="memory",
        title=f"memory of a training step, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["way", "gradients", "peak above the bare model", "after a step", "peak / gradients"],
        rows=[_row(entry, measured[entry.key]) for entry in entries],
        notes=[
            "Sum of PSS over ranks, divided by the number of ranks: every page is counted once. "
            f"Sampled every {_SAMPLE_EVERY_S * 1000:.0f} ms over {plan.rounds * _STEPS_PER_ROUND} steps.",
            "The bare model: its weights, before wrapping, with torch loaded and the group formed.",
            *absent,
            *(f"{e.label} failed: {measured[e.key]['failure']}" for e in failed),
        ],
        data={"ranks": plan.ranks, "rows": measured},
        is_complete=not any(entry.is_ours for entry in failed),
    )


def _measure(entry: Entry, plan: Plan) -> dict[str, Any]:
    with Job(entry.label, entry.target, plan.ranks, entry.launch(plan.ranks), entry.options) as job:
        job.start()
        gradient_bytes: int = job.call("build")[0]
        bare = pss_bytes(job.pids)
        with _Peak(job.pids) as peak:
            job.call("train", limit_s=300.0, steps=plan.rounds * _STEPS_PER_ROUND)
            after = pss_bytes(job.pids)
    return {
        "gradient_bytes": gradient_bytes,
        "peak_bytes": (peak.bytes - bare) // plan.ranks,
        "after_bytes": (after - bare) // plan.ranks,
        "samples": peak.samples,
    }


def _row(entry: Entry, measured: dict[str, Any]) -> list[str]:
    if "failure" in measured:
        return [entry.label, "failed", "-", "-", "-"]
    sizes = [format_size(measured[name]) for name in ("gradient_bytes", "peak_bytes", "after_bytes")]
    return [entry.label, *sizes, f"{measured['peak_bytes'] / measured['gradient_bytes']:.2f}"]


def pss_bytes(pids: Sequence[int]) -> int:
    """Proportional set sizes of some processes, summed: each of their pages once."""
    return sum(parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids)


def parse_pss(rollup: str) -> int:
    """Bytes of the `Pss:` line of a smaps_rollup file."""
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


class _Peak:
    """Samples the sum of PSS in a thread while the `with` block runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self.samples = 0
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_EVERY_S):
            try:
                self.bytes = max(self.bytes, pss_bytes(self._pids))
            except (OSError, StopIteration):  # a rank has died; the job's own call tells why
                return
            self.samples += 1
