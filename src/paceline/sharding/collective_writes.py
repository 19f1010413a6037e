"""One copy of a model's parameters on each host, and collective writes to it.

The writes between `begin()` and `end()` are a transaction. Until `end()` each rank writes to private copies
of the pages. At `end()` the ranks compare hashes of their changes: if they agree, one rank of each host
publishes the changes; if they differ, or if any rank has raised, nothing changes on any rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline import _core
from paceline.errors import PacelineError, ReplicaError, ReplicasDifferError, format_ranks
from paceline.reducer.backward_errors import shorten
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects

_LONGEST_TEXT = 500


class Place(NamedTuple):
    name: str
    begin: int
    nbytes: int


def lay_out(sizes: Mapping[str, int]) -> tuple[list[Place], int]:
    """Place each parameter at a cache line of its own, so that ranks that update neighbours do not write to
    one line.

    Pure.
    """
    places, end = [], 0
    for name, nbytes in sizes.items():
        places.append(Place(name, end, nbytes))
        end += -(-nbytes // _core.ALIGNMENT_BYTES) * _core.ALIGNMENT_BYTES
    return places, end


class OneCopy:
    """The parameters that the ranks of one host share, as seen by one rank."""

    def __init__(
        self,
        memory: _core.ModelMemory,
        places: Sequence[Place],
        values_end: int,
        exchange: Exchange,
        hosts: Sequence[Sequence[int]],
        timeout_s: float,
    ) -> None:
        self.memory, self.places, self.values_end = memory, places, values_end
        self.host_ranks = next(tuple(ranks) for ranks in hosts if exchange.rank in ranks)
        self._exchange = exchange
        self._hosts = hosts
        self._timeout_s = timeout_s
        self._depth = 0

    @property
    def is_writing(self) -> bool:
        return self._depth > 0

    def begin(self) -> None:
        """Begin a write. Does not block; calls may be nested."""
        if self._depth == 0:
            self.memory.begin_writing()
        self._depth += 1

    def end(self, failure: BaseException | None = None) -> None:
        """Publish what was written since begin(), for all ranks. Collective over all hosts.

        Raises:
            ReplicaError: Another rank has raised.
            ReplicasDifferError: The ranks that wrote have written different values, or no rank of some host
                has written.
            DeadlineError: A rank did not reach this call in time.
            PeerLostError: A rank has died. If the ranks had agreed before, their changes are published as a
                whole.
        """
        self._depth -= 1
        if self._depth:
            return
        try:
            self._end(failure)
        finally:
            self.memory.end_writing()

    def _end(self, failure: BaseException | None) -> None:
        changes = self.memory.changes() if failure is None else []
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_LONGEST_TEXT]
        reported = self._exchange_facts({"failure": text, "digest": self._digest(changes)})
        failed = [rank for rank, each in enumerate(reported) if each["failure"]]
        if failed:
            if failure is None:
                raise _other_has_raised(failed, [each["failure"] for each in reported])
            return
        writers = [rank for rank, each in enumerate(reported) if each["digest"]]
        if not writers:
            return
        self._check_same(writers, [each["digest"] for each in reported])
        if self._exchange.rank == next(rank for rank in self.host_ranks if rank in writers):
            self.memory.publish(changes)
        try:
            self._exchange_facts({})
        except PacelineError:
            # The publishing rank may have died half way. All ranks that wrote have written the same values.
            self.memory.publish(changes)
            raise

    def _check_same(self, writers: Sequence[int], digests: Sequence[str]) -> None:
        if len({digests[rank] for rank in writers}) > 1:
            hashes = self._exchange_facts(
                {place.name: f"{each:x}" for place, each in zip(self.places, self._hashes())}
            )
            differing = {
                name: tuple(rank for rank in writers if hashes[rank][name] != hashes[writers[0]][name])
                for name in hashes[0]
            }
            differing = {name: ranks for name, ranks in differing.items() if ranks}
            ranks = tuple(sorted({rank for each in differing.values() for rank in each}))
            raise ReplicasDifferError(
                "Ranks have not written the same in writing(): nothing was written.",
                seen=f"{format_ranks(writers)} wrote; {format_ranks(ranks)} other values than "
                f"rank {writers[0]} to {shorten(list(differing))}",
                likely="what was written depends on the rank: on its data, its random numbers or its file",
                hint="write the same on every rank, or on one rank of each host only",
                ranks=ranks,
                differing=differing,
            )
        silent = [ranks for ranks in self._hosts if not set(ranks) & set(writers)]
        if silent:
            idle = sorted(rank for ranks in silent for rank in ranks)
            raise ReplicasDifferError(
                "Some hosts have written within writing() and others have not, so nothing was written.",
                seen=f"{format_ranks(writers)} wrote, no rank of another host: {format_ranks(idle)}",
                likely="only rank 0 was to write, and each host has its own copy of the parameters",
                hint="write the same on every rank, or on one rank of each host (LOCAL_RANK=0)",
                ranks=tuple(idle),
            )

    def _digest(self, changes: Sequence[tuple[int, int]]) -> str:
        if not changes:
            return ""
        values = self.memory.values
        hashes = _core.hash_all([values + begin for begin, _ in changes], [size for _, size in changes])
        return f"{_core.hash_bytes(repr((changes, hashes)).encode()):x}"

    def _hashes(self) -> list[int]:
        values = self.memory.values
        return _core.hash_all([values + p.begin for p in self.places], [p.nbytes for p in self.places])

    def _exchange_facts(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        return gather_objects(self._exchange, facts, self._timeout_s)

    def name_at(self, offset: int) -> str:
        """The last parameter that begins at or before this byte of the memory."""
        return next((p.name for p in reversed(self.places) if p.begin <= offset), self.places[0].name)


def _other_has_raised(failed: Sequence[int], texts: Sequence[str]) -> ReplicaError:
    return ReplicaError(
        f"{format_ranks(failed).capitalize()} raised in writing(): nothing was written.",
        seen="\n".join(f"rank {rank}: {texts[rank]}" for rank in failed),
        hint="all ranks hold the parameters as they were before the block",
        ranks=tuple(failed),
    )
