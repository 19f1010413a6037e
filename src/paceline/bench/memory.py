"""`paceline bench memory`: what gradients and their buckets take, at the peak of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.conductor import ContenderFailed, Job, Launch
from paceline.bench.contest import Entry, Plan, no_torch
from paceline.bench.machine import Machine
from paceline.bench.pss import SAMPLE_EVERY_S, Peak, pss_bytes
from paceline.bench.report import Report
from paceline.bench.units import format_size

STEPS_PER_ROUND = 4
# Freed memory goes back at once, so that what is measured is what is in use and not what malloc keeps.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _entry(key: str, label: str, **options: Any) -> Entry:
    target = "paceline.torch.bench.memory:Memory"
    return Entry(key, label, target, options, no_torch, lambda ranks: Launch(environment=MALLOC))


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
    measured = Measured(plan, ENTRIES)
    return Report(
        theme="memory",
        title=f"memory of a training step, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["way", "gradients", "peak above the bare model", "after a step", "peak / gradients"],
        rows=[_row(entry, measured.sizes.get(entry.key), plan.ranks) for entry in measured.entries],
        notes=[
            "Sum of PSS over ranks, without files, divided by their number: every page is counted once. "
            f"Sampled every {SAMPLE_EVERY_S * 1000:.0f} ms over {plan.rounds * STEPS_PER_ROUND} steps.",
            "The bare model: its weights, before wrapping, with torch loaded and the group formed.",
            *measured.notes,
        ],
        data={"ranks": plan.ranks, "rows": measured.as_data(lambda sizes: _as_data(sizes, plan.ranks))},
        is_complete=not measured.ours_failed,
    )


@dataclass(frozen=True)
class Sizes:
    """What a job takes beyond what its ranks took before.

    Attributes:
        build_bytes: What `build` said of one rank.
        peak_bytes: All ranks' at the worst moment.
        after_bytes: All ranks' after a step.
        samples: How often it was looked at.
    """

    build_bytes: int
    peak_bytes: int
    after_bytes: int
    samples: int


class Measured:
    """The memory of each contender, which train one after the other: `build` on each rank, then `train`.

    Args:
        plan: What the user asked for.
        entries: The contenders.

    Attributes:
        entries: Those that can run here.
        sizes: By key, of those that did not fail.
        failures: Why the others failed, by key.
        notes: Who is absent, and who failed and why.
    """

    def __init__(self, plan: Plan, entries: Sequence[Entry]) -> None:
        self.entries, absent = plan.able(entries)
        self.sizes: dict[str, Sizes] = {}
        self.failures: dict[str, str] = {}
        for entry in self.entries:
            plan.say(entry.label)
            try:
                self.sizes[entry.key] = _measure(entry, plan)
            except ContenderFailed as error:
                self.failures[entry.key] = str(error)
        labels = {entry.key: entry.label for entry in self.entries}
        self.notes = [*absent, *(f"{labels[key]} failed: {why}" for key, why in self.failures.items())]

    @property
    def ours_failed(self) -> bool:
        """Whether something of Paceline failed."""
        return any(entry.is_ours and entry.key in self.failures for entry in self.entries)

    def as_data(self, of: Callable[[Sizes], dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Plain values for JSON, by key."""
        failed = {key: {"failure": why} for key, why in self.failures.items()}
        return {**{key: of(sizes) for key, sizes in self.sizes.items()}, **failed}


def _measure(entry: Entry, plan: Plan) -> Sizes:
    with Job(entry.label, entry.target, plan.ranks, entry.launch(plan.ranks), entry.options) as job:
        job.start()
        build_bytes: int = job.call("build")[0]
        before = pss_bytes(job.pids)
        with Peak(job.pids) as peak:
            job.call("train", limit_s=300.0, steps=plan.rounds * STEPS_PER_ROUND)
            after = pss_bytes(job.pids)
    return Sizes(build_bytes, peak.bytes - before, after - before, peak.samples)


def _as_data(sizes: Sizes, ranks: int) -> dict[str, Any]:
    """What one rank takes."""
    return {
        "gradient_bytes": sizes.build_bytes,
        "peak_bytes": sizes.peak_bytes // ranks,
        "after_bytes": sizes.after_bytes // ranks,
        "samples": sizes.samples,
    }


def _row(entry: Entry, sizes: Sizes | None, ranks: int) -> list[str]:
    if sizes is None:
        return [entry.label, "failed", "-", "-", "-"]
    each = _as_data(sizes, ranks)
    cells = [format_size(each[name]) for name in ("gradient_bytes", "peak_bytes", "after_bytes")]
    return [entry.label, *cells, f"{each['peak_bytes'] / each['gradient_bytes']:.2f}"]
