"""Evaluates the reports of all ranks at the end of a backward, with the same result on every rank.

Parameters that are frozen for a while may be unused in a backward if all ranks have frozen the same ones.
With its counts of forwards a rank reports a digest of the frozen parameters that got no gradient. If the
digests differ, the backward is void, as it is if the counts differ. If a rank's digest is not that of all its
unused parameters, it left more unused than its frozen parameters.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from paceline import _core
from paceline.reducer.reducer_interface import BackwardResult, BackwardStatus

REPORT_BYTES = _core.BackwardReports.NBYTES
"""The size of one report, packed."""


def pack_bits(indices: Sequence[int], count: int) -> bytes:
    """A set of indices below `count`, one bit each."""
    bits = bytearray(-(-count // 8))
    for index in indices:
        bits[index // 8] |= 1 << (index % 8)
    return bytes(bits)


def unpack_bits(bits: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def digest_of(frozen: Sequence[int]) -> int:
    """A digest of the frozen parameters that got no gradient, for `BackwardStatus.frozen`."""
    return zlib.crc32(array("i", frozen).tobytes()) % (1 << BackwardStatus.DIGEST_BITS)


def differ_in_frozen_only(statuses: Sequence[BackwardStatus]) -> bool:
    """Whether the ranks with data agree on their forwards, but have not all frozen the same parameters."""
    active = [status for status in statuses if not status.finished]
    counts = [
        status if status.frozen is None else BackwardStatus(status.forwards, reached=status.reached)
        for status in active
    ]
    has_frozen = any(status.frozen is not None for status in active)
    return has_frozen and BackwardStatus.agree([status.pack() for status in counts])


def is_all_unused_frozen(result: BackwardResult) -> bool:
    """Whether every rank's unused parameters are exactly those that all ranks have frozen."""
    return all(
        status.finished or (status.frozen is not None and status.frozen == digest_of(unused))
        for status, unused in zip(result.statuses, result.unused)
    )
