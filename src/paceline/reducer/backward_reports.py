"""What follows from the reports of all ranks at the end of a backward: the same on every rank.

A rank's report is a few bytes. The core packs, reads and judges them (`_core.BackwardReports`). Here is
what needs to know which parameters they count.

Parameters that are frozen for a while may be unused in a backward if all ranks have frozen the same. With its
counts of forwards a rank reports a digest of the frozen parameters that got no gradient. Where the digests
differ the backward is void, as it is where the numbers do; and where a digest is not that of all that a rank
left unused, more is unused than what is frozen. So all ranks judge alike.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from paceline import _core
from paceline.reducer.protocol import BackwardStatus, Outcome, Reducer

REPORT_BYTES = _core.BackwardReports.NBYTES
"""The size of one report, packed."""
_DIGEST_BITS = 20  # as many as BackwardStatus has room for

# As members of an enumeration they would cost every backward more than the question.
_NONFINITE, _OVERFLOWED, _SKIPPED = int(Outcome.NONFINITE), int(Outcome.OVERFLOWED), int(Outcome.SKIPPED)
_UNUSED, _GLOBALLY_UNUSED = int(Outcome.UNUSED), int(Outcome.GLOBALLY_UNUSED)


def judge(
    reports: _core.BackwardReports,
    unused: Sequence[Sequence[int]],
    *,
    allow_globally_unused: bool,
    nonfinite: bool,
    overflowed: bool,
) -> tuple[int, bool]:
    """The outcome of a backward, and whether it is void.

    Args:
        reports: What the ranks say.
        unused: Parameters that each rank left without a gradient.
        allow_globally_unused: See `Reducer.finish`.
        nonfinite: Whether some rank's gradient was not finite.
        overflowed: Whether a sum of finite ones was not.
    """
    outcome, is_refused = reports.outcome, reports.refuses_unused
    if nonfinite:
        outcome |= _NONFINITE
    if overflowed:
        outcome |= _OVERFLOWED
    if is_refused and allow_globally_unused and _is_unused_alike(reports, unused):
        outcome ^= _UNUSED | _GLOBALLY_UNUSED
        is_refused = False
    return outcome, is_refused or bool(outcome & _SKIPPED)


def unused_by_all(reports: _core.BackwardReports, unused: Sequence[Sequence[int]], count: int) -> list[int]:
    """The parameters, of so many, that no rank with data has marked; none before the first backward."""
    rows = _with_data(reports, unused)
    return sorted(set(range(count if reports.statuses else 0)).intersection(*rows))


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


def _with_data(reports: _core.BackwardReports, unused: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Parameters that are unused, for each rank that has data."""
    return [row for row, status in zip(unused, reports.statuses) if not status.finished]


def _is_unused_alike(reports: _core.BackwardReports, unused: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks with data have left the same parameters unused."""
    return len(set(map(tuple, _with_data(reports, unused)))) <= 1


def digest_of(frozen: Sequence[int]) -> int:
    """What a rank tells that left these frozen parameters without a gradient: `BackwardStatus.frozen`."""
    return zlib.crc32(array("i", frozen).tobytes()) % (1 << _DIGEST_BITS)


def differ_in_frozen_only(statuses: Sequence[BackwardStatus]) -> bool:
    """Whether no rank with data skipped a forward or a backward, and not all have frozen the same."""
    active = [status for status in statuses if not status.finished]
    counts = [
        status if status.frozen is None else BackwardStatus(status.forwards, reached=status.reached)
        for status in active
    ]
    has_frozen = any(status.frozen is not None for status in active)
    return has_frozen and BackwardStatus.agree([status.pack() for status in counts])


def is_all_unused_frozen(reducer: Reducer) -> bool:
    """Whether no rank left more unused in the last backward than what all ranks have frozen."""
    return all(
        status.finished or (status.frozen is not None and status.frozen == digest_of(reducer.unused(rank)))
        for rank, status in enumerate(reducer.statuses())
    )
