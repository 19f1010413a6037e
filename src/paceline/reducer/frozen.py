"""Parameters that are frozen for a while: they may be unused in a pass if all ranks have frozen the same.

The one idea: with its number of forwards a rank tells a digest of the frozen parameters that got no
gradient. Where the digests differ the pass is void, as it is where the numbers do; and where a digest is not
that of all that a rank left unused, more is unused than what is frozen. So all ranks judge alike.

Imports only the standard library and `protocol`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from paceline.reducer.protocol import FINISHED, FROZEN, STATIC, Reducer

_DIGEST_BITS = 14
_COUNT_BITS = 14


def frozen_status(forwards: int, frozen: Sequence[int]) -> int:
    """What a rank tells that made so many forwards and left these frozen parameters without a gradient.

    Example:
        >>> without_frozen([frozen_status(2, [0, 3]), 2])
        [2, 2]
    """
    return FROZEN + (_digest(frozen) << _COUNT_BITS) + forwards % (1 << _COUNT_BITS)


def tells_frozen(status: int) -> bool:
    """Whether a rank with this status has left frozen parameters without a gradient."""
    return FROZEN <= status < STATIC


def without_frozen(statuses: Sequence[int]) -> list[int]:
    """The numbers of forwards alone, where a rank has told a digest besides."""
    return [status % (1 << _COUNT_BITS) if tells_frozen(status) else status for status in statuses]


def differ_in_frozen_only(statuses: Sequence[int]) -> bool:
    """Whether all ranks with data made as many forwards, and have not frozen the same parameters."""
    return any(map(tells_frozen, statuses)) and len(set(without_frozen(statuses)) - {FINISHED}) == 1


def is_all_unused_frozen(reducer: Reducer) -> bool:
    """Whether no rank left more unused in the last pass than what all ranks have frozen."""
    return all(
        tells_frozen(status) and status >> _COUNT_BITS == (FROZEN >> _COUNT_BITS) + _digest(unused)
        for status, unused in ((s, reducer.unused(r)) for r, s in enumerate(reducer.forwards_by_rank()))
        if status != FINISHED
    )


def _digest(indices: Sequence[int]) -> int:
    return zlib.crc32(array("i", indices).tobytes()) % (1 << _DIGEST_BITS)
