"""Writes a snapshot of a job in the text format of Prometheus (0.0.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from paceline.monitor.snapshot import JobSnapshot, RankSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(now: JobSnapshot, job: str) -> str:
    """All figures of a snapshot, with the labels `job_id`, `rank` and `host`."""
    lines: list[str] = []
    for name, kind, about, find in _FAMILIES:
        samples = [
            f"paceline_{name}{_labels({**_who(job, rank), **labels})} {_number(value)}"
            for rank in now.ranks
            for labels, value in find(now, rank)
            if value is not None
        ]
        if samples:
            lines += [f"# HELP paceline_{name} {about}", f"# TYPE paceline_{name} {kind}", *samples]
    return "".join(f"{line}\n" for line in lines)


def _who(job: str, rank: RankSnapshot) -> Mapping[str, str]:
    return {"job_id": job, "rank": str(rank.rank), "host": rank.host}


_Found = Iterable[tuple[Mapping[str, str], float | None]]


def _values(now: JobSnapshot, rank: RankSnapshot) -> _Found:
    return [({"name": name}, value) for name, value in rank.values.items()]


_FAMILIES: tuple[tuple[str, str, str, Callable[[JobSnapshot, RankSnapshot], _Found]], ...] = (
    ("up", "gauge", "Whether the process of the rank runs.", lambda _, r: [({}, r.is_alive)]),
    ("steps_total", "counter", "Backward passes that were averaged.", lambda _, r: [({}, r.step)]),
    ("steps_per_second", "gauge", "Over the last seconds.", lambda _, r: [({}, r.steps_per_s)]),
    ("samples_per_second", "gauge", "Over the last seconds.", lambda _, r: [({}, r.samples_per_s)]),
    (
        "worked_seconds",
        "gauge",
        "Median own time for a step, without waiting.",
        lambda _, r: [({}, r.worked_s)],
    ),
    ("waiting_ratio", "gauge", "Part of the time that the rank waits.", lambda _, r: [({}, r.waiting)]),
    (
        "waited_for_ratio",
        "gauge",
        "Part of all ranks' time that is lost by waiting for the rank.",
        lambda now, r: [({}, now.waited_for.get(r.rank, 0.0))],
    ),
    ("silent_seconds", "gauge", "How long ago the rank recorded anything.", lambda _, r: [({}, r.silent_s)]),
    ("memory_bytes", "gauge", "Memory of the process.", lambda _, r: [({}, r.memory_bytes)]),
    ("gradient_norm", "gauge", "2-norm of the mean gradient.", lambda _, r: [({}, r.norm)]),
    (
        "nonfinite_gradients",
        "gauge",
        "Gradients of the last seconds with an infinity or a NaN.",
        lambda _, r: [({}, r.nonfinite)],
    ),
    (
        "failed_passes",
        "gauge",
        "Backward passes of the last seconds that raised.",
        lambda _, r: [({}, r.failed)],
    ),
    ("logged_value", "gauge", "What the program has logged last.", _values),
)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
