"""Checks that the ranks of a new group have the same weights.

Replicas with equal numbers of good backward passes hold the same weights. If the numbers differ, the weights
themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import ModelMismatchError, format_ranks
from paceline.rendezvous.exchange import Exchange

_UNKNOWN = -1


def agree_on_backwards(
    good_backwards: int | None, digest: Callable[[], bytes], exchange: Exchange, timeout_s: float
) -> tuple[int, bool]:
    """Raise on every rank unless all have the same weights. Collective.

    Returns:
        The number of good backward passes to continue from, and whether all ranks had it.
    """
    own = _UNKNOWN if good_backwards is None else good_backwards
    payloads = exchange.all_gather(own.to_bytes(8, "big", signed=True), timeout_s)
    numbers = [int.from_bytes(payload, "big", signed=True) for payload in payloads]
    if _UNKNOWN not in numbers and len(set(numbers)) == 1:
        return numbers[0], True
    digests = exchange.all_gather(digest(), timeout_s)
    if len(set(digests)) > 1:
        raise _differ(numbers, digests)
    return max(0, *numbers), False


def _differ(numbers: Sequence[int], digests: Sequence[bytes]) -> ModelMismatchError:
    ranks_of: dict[tuple[int, bytes], list[int]] = {}
    for rank, key in enumerate(zip(numbers, digests)):
        ranks_of.setdefault(key, []).append(rank)
    letters: dict[bytes, str] = {}
    for digest in digests:
        letters.setdefault(digest, f"#{len(letters) + 1}")
    return ModelMismatchError(
        "The ranks of the new group hold different weights, after different numbers of good backward passes.",
        seen="\n".join(
            f"{format_ranks(ranks)}: weights {letters[digest]}, "
            + ("trained alone" if number == _UNKNOWN else f"good backward passes: {number}")
            for (number, digest), ranks in ranks_of.items()
        ),
        likely="a rank that comes anew; or an error that ended a step on some ranks only",
        hint="give every rank the weights of one, and its optimizer's state, by broadcast or from a "
        "checkpoint; then make this call again",
        good_backwards=tuple(None if number == _UNKNOWN else number for number in numbers),
    )
