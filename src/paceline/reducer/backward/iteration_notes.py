"""What ranks do between two backward passes, told at the end of each, so that a difference is known at once.

The one idea: a few bits travel with a status that is exchanged anyway: how often this rank's parameters were
written to since the backward before (an optimizer's step writes), a hash of a few of their bytes, and how
many batches it took from iterate() without a forward. Each may differ for a good reason, so none is an error
by itself: the first two are reasons to compare the replicas there and then, the third one to say so.

The core counts and packs them (`_core.IterationNotes`), because each step does so; here is what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline import _core
from paceline.errors import format_ranks

NOTHING = 0
"""The note of a rank that has nothing to tell: it was in no backward, or in one that others shadowed."""

_SAMPLED_TENSORS = 4
_SAMPLED_BYTES = 128


class Note(NamedTuple):
    """What one rank tells.

    Attributes:
        writes: To its parameters, since its previous backward; of large numbers only the last bits.
        sample: A hash of some bytes of its parameters; 0: they can't be read.
        dropped: Batches that it took without running forward.
        accumulated: Whether it ran a backward of its own, in no_sync(), since its previous backward.
    """

    writes: int = 0
    sample: int = 0
    dropped: int = 0
    accumulated: bool = False

    def pack(self) -> int:
        """In 32 bits; of large numbers the last ones, but of `dropped` no more than 255."""
        return _core.pack_note(*self)

    @classmethod
    def unpack(cls, note: int) -> Note | None:
        """None: it is NOTHING.

        Example:
            >>> Note.unpack(Note(writes=2, dropped=1).pack())
            Note(writes=2, sample=0, dropped=1, accumulated=False)
        """
        if note == NOTHING:
            return None
        return cls(note >> 10 & 0x3FF, note >> 20, note >> 2 & 0xFF, bool(note >> 1 & 1))


def places_to_sample(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Index, first byte and number of bytes of what is looked at in tensors of these sizes: little.

    Example:
        >>> places_to_sample([4, 1000])
        [(0, 0, 4), (1, 448, 128)]
    """
    filled = [index for index, size in enumerate(sizes) if size]
    count = min(_SAMPLED_TENSORS, len(filled))
    chosen = [filled[place * (len(filled) - 1) // max(1, count - 1)] for place in range(count)]
    places = []
    for index in chosen:
        begin = max(0, sizes[index] - _SAMPLED_BYTES) // 2 // 64 * 64  # in the middle
        places.append((index, begin, min(_SAMPLED_BYTES, sizes[index] - begin)))
    return places


def describe_writes(notes: Sequence[Note]) -> str:
    """Ranks by how often their parameters were written to; "" if equally often.

    Example:
        >>> describe_writes([Note(1), Note(0), Note(1)])
        'writes to parameters since the last backward, as an optimizer makes: ranks 0, 2: 1; rank 1: 0'
    """
    told = _by_count([note.writes for note in notes])
    return f"writes to parameters since the last backward, as an optimizer makes: {told}" if told else ""


def dropped_warning(notes: Sequence[Note]) -> str:
    """What to say of batches that some ranks dropped; "" if all dropped equally many."""
    told = _by_count([note.dropped for note in notes])
    if not told:
        return ""
    return (
        f"Ranks took batches from iterate() and ran no forward for them: {told}.\n"
        "  likely   a `continue` at the beginning of the loop, on some ranks only\n"
        "  hint     nothing is wrong if these batches were meant to be left out; else decide alike on all "
        "ranks\n  (reported once)"
    )


def _by_count(counts: Sequence[int]) -> str:
    ranks: dict[int, list[int]] = {}
    for rank, count in enumerate(counts):
        ranks.setdefault(count, []).append(rank)
    if len(ranks) == 1:
        return ""
    return "; ".join(f"{format_ranks(who)}: {count}" for count, who in ranks.items())
