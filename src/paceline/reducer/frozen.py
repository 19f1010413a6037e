"""Parameters that are frozen for a while: they may be unused in a backward if all ranks have frozen the same.

The one idea: with its counts of forwards a rank tells a digest of the frozen parameters that got no
gradient. Where the digests differ the backward is void, as it is where the numbers do; and where a digest is
not that of all that a rank left unused, more is unused than what is frozen. So all ranks judge alike.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from paceline.reducer.protocol import BackwardStatus, Reducer

_DIGEST_BITS = 20  # as many as BackwardStatus has room for


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
