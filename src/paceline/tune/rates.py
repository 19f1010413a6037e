"""Computes the rate at which a job trains in one turn, from the recordings of its ranks. Pure.

The work of a rank is counted from one batch to a later one, so that only whole steps count. All ranks make
the same steps, so the rate of the job is the sum over its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.trace.records import Event, Record
from paceline.trace.ring_file import RankRecording

LEAST_STEPS = 2


@dataclass(frozen=True)
class Turn:
    """What all ranks of a job have done in one turn.

    Attributes:
        samples_per_s: First dimensions of all batches, per second.
        elements_per_s: Elements of all batches, per second.
        samples_per_step: Samples in one step of all ranks.
        elements_per_step: Elements in one step of all ranks.
        steps: Steps of the rank that made the fewest.
    """

    samples_per_s: float
    elements_per_s: float
    samples_per_step: float
    elements_per_step: float
    steps: int


def batches_of(recording: RankRecording, begin_ns: int = 0, end_ns: int = 1 << 62) -> list[Record]:
    """The batches that wrapped models of one rank were given from `begin_ns` to `end_ns`."""
    return [
        record
        for record in recording.records
        if record.event == Event.BATCH and begin_ns <= record.time_ns <= end_ns
    ]


def steps_so_far(recordings: Sequence[RankRecording], num_ranks: int) -> int:
    """The fewest batches that a rank of the job was given, as far as its ring still holds them."""
    if len(recordings) < num_ranks:
        return 0
    return min(len(batches_of(recording)) for recording in recordings)


def turn_of(
    recordings: Sequence[RankRecording], num_ranks: int, begin_ns: int = 0, end_ns: int = 1 << 62
) -> Turn | None:
    """What a job has done in a turn; None if a rank made fewer than `LEAST_STEPS` whole steps.

    The first step is left out, because it began before the turn, or with cold caches; of many steps, the
    first eighth is left out, too.
    """
    if len(recordings) < num_ranks:
        return None
    per_rank: list[tuple[float, float, float, float]] = []
    fewest = 1 << 62
    for recording in recordings:
        batches = batches_of(recording, begin_ns, end_ns)
        batches = batches[1 + len(batches) // 8 :] if len(batches) > LEAST_STEPS + 1 else batches
        steps = len(batches) - 1
        seconds = (batches[-1].time_ns - batches[0].time_ns) / 1e9 if batches else 0.0
        if steps < LEAST_STEPS or seconds <= 0:
            return None
        samples = sum(batch.first for batch in batches[:-1])
        elements = sum(batch.second for batch in batches[:-1])
        per_rank.append((samples / seconds, elements / seconds, samples / steps, elements / steps))
        fewest = min(fewest, steps)
    samples_per_s, elements_per_s, samples_per_step, elements_per_step = map(sum, zip(*per_rank))
    return Turn(samples_per_s, elements_per_s, samples_per_step, elements_per_step, fewest)


def counts_elements(turns: Sequence[tuple[int, Turn]]) -> bool:
    """Whether the first dimension of a batch does not show its size, so that elements must be counted.

    An example is sequences of shape (time, batch, features) in a script that divides its batch among ranks.

    Args:
        turns: A turn of each layout, with its number of ranks.

    Example:
        One rank: (35, 64) per batch. Two ranks: (35, 32) each. The first dimension stays 35, but the
        elements are halved: True.
    """
    if len(turns) < 2:
        return False
    per_batch = [
        (turn.samples_per_step / ranks, turn.elements_per_step / ranks) for ranks, turn in turns if ranks
    ]
    firsts, elements = zip(*per_batch)
    is_same = bool(max(firsts) <= 1.02 * min(firsts))
    return is_same and bool(max(elements) >= 1.5 * min(elements))
