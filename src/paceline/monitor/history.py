"""The history of a job while it is watched: a point for each second, and incidents.

The number of points is bounded. When there are too many, neighbouring points are merged in pairs, so a job of
a week has as many points as one of ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.monitor.snapshot import JobSnapshot, RankSnapshot

MOST_POINTS = 600
_MOST_INCIDENTS = 200


@dataclass(frozen=True)
class Point:
    """What the job did in an interval of time.

    Attributes:
        time_s: End of the interval, in seconds since 1970.
        steps_per_s: As in `JobSnapshot`, like the next fields.
        samples_per_s: None: unknown.
        waiting: The part of the time that each rank has waited, from 0 to 1.
        waited_for: The part of all ranks' time that was lost by waiting for each rank.
        norm: The 2-norm of the mean gradient; None: unknown.
        loss: The mean of the values that ranks have logged as "loss"; None: no rank has logged one.
        nonfinite: Number of gradients that were not finite; the largest number of any rank.
    """

    time_s: float
    steps_per_s: float
    samples_per_s: float | None
    waiting: Mapping[int, float]
    waited_for: Mapping[int, float]
    norm: float | None
    loss: float | None
    nonfinite: int


@dataclass(frozen=True)
class Incident:
    time_s: float
    rank: int
    kind: str
    text: str


@dataclass
class History:
    """The points and incidents of a job.

    Attributes:
        points: Oldest first.
        incidents: Oldest first.
        num_per_point: How many snapshots a point stands for. A point that is left over when pairs are merged
            stands for fewer.
    """

    points: list[Point] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    num_per_point: int = 1
    _pending: list[Point] = field(default_factory=list)
    _before: dict[int, RankSnapshot] = field(default_factory=dict)

    def add(self, now: JobSnapshot, time_s: float) -> bool:
        """Add a snapshot; returns whether points were merged."""
        self._note_incidents(now, time_s)
        self._pending.append(_point(now, time_s))
        if len(self._pending) < self.num_per_point:
            return False
        self.points.append(merged(self._pending))
        self._pending.clear()
        if len(self.points) <= MOST_POINTS:
            return False
        pairs = (self.points[index : index + 2] for index in range(0, len(self.points) - 1, 2))
        rest = self.points[len(self.points) // 2 * 2 :]
        self.points = [*map(merged, pairs), *rest]
        self.num_per_point *= 2
        return True

    def _note_incidents(self, now: JobSnapshot, time_s: float) -> None:
        for rank in now.ranks:
            before = self._before.get(rank.rank)
            self._before[rank.rank] = rank
            self.incidents += [
                Incident(time_s, rank.rank, kind, text) for kind, text in _changes(before, rank)
            ]
        del self.incidents[:-_MOST_INCIDENTS]


def _changes(before: RankSnapshot | None, rank: RankSnapshot) -> Iterable[tuple[str, str]]:
    if before is not None and before.pid != rank.pid:
        yield "restart", f"began again as process {rank.pid}"
        before = None
    if rank.failure and (before is None or before.failure != rank.failure):
        yield "fault", rank.failure.splitlines()[0]
    if rank.is_recovered and (before is None or not before.is_recovered or before.failure != rank.failure):
        yield "recovery", f"went on with step {rank.step}"
    if not rank.is_alive and (before is None or before.is_alive):
        yield "end", f"process {rank.pid} has ended"
    if rank.nonfinite and (before is None or not before.nonfinite):
        yield "nonfinite", f"{rank.nonfinite} gradients were not finite, first on rank {rank.nonfinite_rank}"


def _point(now: JobSnapshot, time_s: float) -> Point:
    losses = [each.values["loss"] for each in now.ranks if "loss" in each.values]
    return Point(
        time_s=time_s,
        steps_per_s=now.steps_per_s,
        samples_per_s=now.samples_per_s,
        waiting={each.rank: each.waiting for each in now.ranks},
        waited_for=now.waited_for,
        norm=next((each.norm for each in now.ranks if each.norm is not None), None),
        loss=sum(losses) / len(losses) if losses else None,
        nonfinite=max((each.nonfinite for each in now.ranks), default=0),
    )


def merged(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    return Point(
        time_s=points[-1].time_s,
        steps_per_s=sum(each.steps_per_s for each in points) / len(points),
        samples_per_s=_mean([each.samples_per_s for each in points]),
        waiting=_means([each.waiting for each in points]),
        waited_for=_means([each.waited_for for each in points]),
        norm=_mean([each.norm for each in points]),
        loss=_mean([each.loss for each in points]),
        nonfinite=max(each.nonfinite for each in points),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _means(rows: list[Mapping[int, float]]) -> dict[int, float]:
    ranks = sorted({rank for row in rows for rank in row})
    return {rank: sum(row.get(rank, 0.0) for row in rows) / len(rows) for rank in ranks}
