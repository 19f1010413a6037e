"""What each rank tells of its pass at its end, and what follows from all of it: the same on every rank.

The one idea: a rank's report is a few bytes, and the verdict on the pass is a function of everybody's.
Whoever moves the bytes, a process group or the messages between hosts, asks here what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from paceline.reducer.protocol import Outcome, PassStatus

_REPORT = struct.Struct("<dIQIIII?I")
_MOST_WORKED_US = 2**32 - 1
REPORT_BYTES = _REPORT.size
"""The size of one report, packed."""


class RankReport(NamedTuple):
    """What one rank says of its pass. A tuple, because Python makes one for every rank in every pass.

    Attributes:
        weight: What its gradients weigh.
        identity: What the rank has called; ranks with another one have averaged another model's gradients.
        word: PassStatus.pack().
        unused: How many parameters it left without a gradient.
        nonfinite: How many gradients it has found that hold an infinity or a NaN.
        overflowed: How many parameters it has found whose sum does.
        note: See `Reducer.set_note`.
        refuses_unused: Whether it left any and did not allow it.
        worked_us: How long it has worked since the pass before; 0: there was none.
    """

    weight: float
    identity: int
    word: int
    unused: int
    nonfinite: int
    overflowed: int
    note: int
    refuses_unused: bool
    worked_us: int = 0

    def pack(self) -> bytes:
        counts = (self.word, self.unused, self.nonfinite, self.overflowed)
        worked_us = min(self.worked_us, _MOST_WORKED_US)
        return _REPORT.pack(self.weight, self.identity, *counts, self.note, self.refuses_unused, worked_us)

    @classmethod
    def unpack(cls, payload: bytes) -> RankReport:
        return cls._make(_REPORT.unpack_from(payload))

    @property
    def status(self) -> PassStatus:
        return PassStatus.unpack(self.word)


def judge(
    reports: Sequence[RankReport],
    unused: Sequence[Sequence[int]],
    *,
    allow_nobodys: bool,
    nonfinite: bool,
    overflowed: bool,
) -> tuple[Outcome, bool]:
    """The outcome of a pass, and whether it is void.

    Args:
        reports: What the ranks say.
        unused: Parameters that each rank left without a gradient.
        allow_nobodys: See `Reducer.finish`.
        nonfinite: Whether some rank's gradient was not finite.
        overflowed: Whether a sum of finite ones was not.
    """
    words, notes, any_unused, is_refused = set(), {0}, 0, False
    for _, _, word, num_unused, _, _, note, refuses_unused, _ in reports:  # in every pass, so only once
        words.add(word)
        notes.add(note)
        any_unused |= num_unused
        # Not by what this rank allows: one without data has nothing to allow.
        is_refused |= refuses_unused
    outcome = _told_by(frozenset(words))
    if any_unused:
        outcome |= Outcome.UNUSED
    if len(notes) > 2:
        outcome |= Outcome.NOTES_DIFFER
    if nonfinite:
        outcome |= Outcome.NONFINITE
    if overflowed:
        outcome |= Outcome.OVERFLOWED
    if is_refused and allow_nobodys and _is_unused_alike(reports, unused):
        outcome ^= Outcome.UNUSED | Outcome.NOBODYS
        is_refused = False
    return outcome, is_refused or bool(outcome & Outcome.SKIPPED)


def unused_by_all(reports: Sequence[RankReport], unused: Sequence[Sequence[int]], count: int) -> list[int]:
    """The parameters, of so many, that no rank with data has marked; none before the first pass."""
    everything = range(count if reports else 0)
    return sorted(set(everything).intersection(*_with_data(reports, unused)))


def pack_bits(indices: Sequence[int], count: int) -> bytes:
    """A set of numbers below `count`, one bit each.

    Example:
        >>> unpack_bits(pack_bits([0, 9], 10))
        [0, 9]
    """
    bits = bytearray(-(-count // 8))
    for index in indices:
        bits[index // 8] |= 1 << (index % 8)
    return bytes(bits)


def unpack_bits(bits: bytes) -> list[int]:
    """What `pack_bits` has packed."""
    return [8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


@lru_cache(maxsize=8)
def _told_by(words: frozenset[int]) -> Outcome:
    """What follows from the statuses of the ranks, packed; they are the same in nearly every pass."""
    outcome = Outcome.GOOD
    told = [PassStatus.unpack(word) for word in words]
    active = [status for status in told if not status.finished]
    if len(active) < len(told):
        outcome |= Outcome.FINISHED
    is_interrupted = any(status.interrupted for status in active)
    if is_interrupted or not PassStatus.agree([status.pack() for status in active]):
        outcome |= Outcome.SKIPPED
    if not all(status.is_plain for status in active):
        outcome |= Outcome.TOLD
    return outcome


def _with_data(reports: Sequence[RankReport], unused: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Parameters that are unused, for each rank that has data."""
    return [row for row, report in zip(unused, reports) if not report.status.finished]


def _is_unused_alike(reports: Sequence[RankReport], unused: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks with data have left the same parameters unused."""
    return len(set(map(tuple, _with_data(reports, unused)))) <= 1
