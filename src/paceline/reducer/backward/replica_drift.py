"""Checks that the replicas are still equal: periodically, and when the ranks' notes differ.

A note is a few bits that travel with a status that is exchanged anyway: how often this rank's parameters were
written to since its previous backward (an optimizer's step writes), a hash of a few bytes of some of them,
and how many batches it took from iterate() without a forward. Each may differ for a good reason, so none is
an error by itself. A difference in the first two causes a comparison of the replicas at once; one in the
third causes a warning.

A difference of bits that no rank made on purpose may still be harmless, because processors of different kinds
round differently in an optimizer. So by default it is a warning, given once. It is an error if ranks have
also written to their parameters differently often, or if the user asked for checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paceline import _core
from paceline.errors import ReplicasDifferError, format_ranks, warn
from paceline.reducer.framework_ops import FrameworkOps, nbytes
from paceline.reducer.replica_hashes import Entry, Gather, check_replicas

NOTHING = 0
"""The note of a rank without anything to report: it was in no backward, or in one that others shadowed."""

_SAMPLED_TENSORS = 4
_SAMPLED_BYTES = 128
# Ranks may write differently in each backward and still be equal. Then a comparison is made in one of 100.
_BACKWARDS_BETWEEN_SUSPICIONS = 100


class Note(NamedTuple):
    """What one rank reports.

    Attributes:
        writes: How often its parameters were written to since its previous backward; the last bits only.
        sample: A hash of some bytes of the parameters whose turn it is; 0 if they cannot be read.
        dropped: Batches that it took without running forward.
        accumulated: Whether it ran a backward in no_sync() since its previous backward.
    """

    writes: int = 0
    sample: int = 0
    dropped: int = 0
    accumulated: bool = False

    def pack(self) -> int:
        """In 32 bits. `dropped` is capped at 255; large numbers in the other fields keep their last bits."""
        return _core.pack_note(*self)

    @classmethod
    def unpack(cls, note: int) -> Note | None:
        """None for NOTHING.

        Example:
            >>> Note.unpack(Note(writes=2, dropped=1).pack())
            Note(writes=2, sample=0, dropped=1, accumulated=False)
        """
        if note == NOTHING:
            return None
        return cls(note >> 10 & 0x3FF, note >> 20, note >> 2 & 0xFF, bool(note >> 1 & 1))


def sampled(ops: FrameworkOps[Any], parameters: Sequence[Any]) -> list[tuple[Any, int, int]]:
    sizes = [nbytes(each) if ops.is_readable(each) else 0 for each in parameters]
    return [(parameters[index], begin, size) for index, begin, size in places_to_sample(sizes)]


def sampler(ops: FrameworkOps[Any], places: Sequence[tuple[Any, int, int]]) -> Callable[[int], int]:
    turns = turns_of(places)

    def take(turn: int) -> int:
        chosen = places[turn % turns :: turns]
        if not all(ops.is_readable(each) and nbytes(each) >= begin + size for each, begin, size in chosen):
            return 0
        pointers = [each.data_ptr() + begin for each, begin, _ in chosen]
        return _core.sample_all(pointers, [size for *_, size in chosen])

    return take


def turns_of(places: Sequence[object]) -> int:
    """After how many backward passes each place has been sampled once."""
    return max(1, -(-len(places) // _SAMPLED_TENSORS))


def places_to_sample(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    places = []
    for index in (index for index, size in enumerate(sizes) if size):
        begin = max(0, sizes[index] - _SAMPLED_BYTES) // 2 // 64 * 64  # in the middle
        places.append((index, begin, min(_SAMPLED_BYTES, sizes[index] - begin)))
    return places


def describe_writes(notes: Sequence[Note]) -> str:
    """Ranks by how often their parameters were written to; "" if all are equal."""
    counts = _by_count([note.writes for note in notes])
    return f"writes to parameters since the last backward, as an optimizer makes: {counts}" if counts else ""


def dropped_warning(notes: Sequence[Note]) -> str:
    counts = _by_count([note.dropped for note in notes])
    if not counts:
        return ""
    return (
        f"Ranks took batches from iterate() and ran no forward for them: {counts}.\n"
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


class DriftWatch:
    """Compares replicas at the end of good backward passes in which all ranks had data; alike on every rank.

    Args:
        every: Compare after this many backward passes; None: only when there is a reason; 0: never.
    """

    def __init__(
        self, every: int | None, hash_replica: Callable[[Any], Sequence[Entry]], gather: Gather
    ) -> None:
        self._every = every
        self._hash_replica = hash_replica
        self._gather = gather
        self.backwards = 0
        self._next_suspicion = 0
        self._has_warned_of_drift = False
        self._has_warned_of_dropped = False

    def check(self, optimizer: Any = None, *, seen: str = "") -> None:
        """Compare the replicas, and the optimizer's state if one is given. Collective."""
        backwards = f"{self.backwards} backward pass{'es' * (self.backwards != 1)}"
        where = f"the check of replicas after {backwards} of all ranks"
        check_replicas(self._hash_replica(optimizer), self._gather, where=where, seen=seen)

    @property
    def is_due(self) -> bool:
        return self._every is not None and self._every > 0 and self.backwards % self._every == 0

    def look(self, notes: Sequence[int] | None) -> None:
        """Compare the replicas if there is a reason. Collective if so."""
        if notes is not None:
            reported = [Note.unpack(note) for note in notes]
            known = [note for note in reported if note is not None]
            if len(known) == len(reported):
                self._compare(known)
        if self.is_due:
            self.check()

    def _compare(self, notes: Sequence[Note]) -> None:
        writes = describe_writes(notes)
        has_drifted = len({note.sample for note in notes}) > 1
        if self._every != 0 and (writes or has_drifted) and self.backwards >= self._next_suspicion:
            # A user who makes steps in no_sync() may want replicas that differ for a while.
            is_error = self._every is not None or (writes and not any(note.accumulated for note in notes))
            if is_error or not self._has_warned_of_drift:
                self._suspect(writes, is_error=bool(is_error))
        if not self._has_warned_of_dropped and (text := dropped_warning(notes)):
            self._has_warned_of_dropped = True
            warn(text)

    def _suspect(self, seen: str, *, is_error: bool) -> None:
        try:
            self.check(seen=seen)
            self._next_suspicion = self.backwards + _BACKWARDS_BETWEEN_SUSPICIONS
        except ReplicasDifferError as error:
            if is_error:
                raise
            self._has_warned_of_drift = True
            warn(f"{error}\n  (reported once; check_replicas_every=100 makes it an error, 0 is silent)")
