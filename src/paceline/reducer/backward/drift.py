"""When replicas are compared without being asked to: now and then, and where the ranks' notes differ.

The one idea: a difference of bits that no rank made on purpose may still be harmless (processors of different
kinds round differently in an optimizer), so by default it is told, once; it is an error where ranks have also
written to their parameters differently often, and where the user asked for checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import ReplicasDifferError
from paceline.reducer.backward.iteration_notes import Note, describe_writes, dropped_warning
from paceline.reducer.replica_check import Entry, Gather, check_replicas

# Ranks may write differently and yet be equal, each time: then it costs a hundredth of a check.
_BACKWARDS_BETWEEN_SUSPICIONS = 100


class DriftWatch:
    """Looks at the end of each good backward in which all ranks had data; the same on every rank.

    Args:
        every: Compare after so many backward passes; None: where there is a reason; 0: never.
        hash_replica: Hashes of all that is the same on all ranks between two backward passes, and of the
            state of an optimizer, if there is one.
        gather: Connects the ranks.

    Attributes:
        backwards: Good backward passes so far in which all ranks had data.
    """

    def __init__(
        self, every: int | None, hash_replica: Callable[[Any], Sequence[Entry]], gather: Gather
    ) -> None:
        self._every = every
        self._hash_replica = hash_replica
        self._gather = gather
        self.backwards = 0
        self._next_suspicion = 0
        self._has_told_of_drift = False
        self._has_told_of_dropped = False

    def check(self, optimizer: Any = None, *, seen: str = "") -> None:
        """Compare the replicas, and the optimizer's state if there is one. Collective.

        Args:
            optimizer: None: there is none.
            seen: For the error: the reason for the check.

        Raises:
            ReplicasDifferError: They are not the same.
        """
        backwards = f"{self.backwards} backward pass{'es' * (self.backwards != 1)}"
        where = f"the check of replicas after {backwards} of all ranks"
        check_replicas(self._hash_replica(optimizer), self._gather, where=where, seen=seen)

    @property
    def is_due(self) -> bool:
        """Whether to compare the replicas at the end of this backward whatever the ranks' notes say."""
        return self._every is not None and self._every > 0 and self.backwards % self._every == 0

    def look(self, notes: Callable[[], Sequence[int]] | None) -> None:
        """Compare the replicas if there is a reason. Collective then.

        Args:
            notes: All ranks', by rank; None: they agree.
        """
        if notes is not None:
            told = [Note.unpack(note) for note in notes()]
            known = [note for note in told if note is not None]
            if len(known) == len(told):
                self._compare(known)
        if self.is_due:
            self.check()

    def _compare(self, notes: Sequence[Note]) -> None:
        writes = describe_writes(notes)
        has_drifted = len({note.sample for note in notes}) > 1
        if self._every != 0 and (writes or has_drifted) and self.backwards >= self._next_suspicion:
            # Whoever steps in no_sync() may want replicas that differ for a while.
            is_error = self._every is not None or (writes and not any(note.accumulated for note in notes))
            if is_error or not self._has_told_of_drift:
                self._suspect(writes, is_error=bool(is_error))
        if not self._has_told_of_dropped and (text := dropped_warning(notes)):
            self._has_told_of_dropped = True
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _suspect(self, seen: str, *, is_error: bool) -> None:
        try:
            self.check(seen=seen)
            self._next_suspicion = self.backwards + _BACKWARDS_BETWEEN_SUSPICIONS
        except ReplicasDifferError as error:
            if is_error:
                raise
            self._has_told_of_drift = True
            warnings.warn(
                f"{error}\n  (reported once; check_replicas_every=100 makes it an error, 0 is silent)",
                RuntimeWarning,
                stacklevel=6,
            )
