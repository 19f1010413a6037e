"""A journal for optimizer steps, with which surviving ranks complete the shard of a rank that is lost.

A step is made in blocks, each of which any rank can repeat. A block is small, so it is cheap to copy its old
values. Before a rank writes a block, it copies the block's parameters and state. A rank that finds a block
half written restores the copy and continues from there. Parameters, state and copies lie in memory that all
ranks share, and the step table records which blocks are written.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic

from paceline.collectives.whole_exchange import WholeExchange
from paceline.reducer.framework_ops import Tensor, numel
from paceline.rendezvous.model_memory import share_model_memory
from paceline.sharding.journal_layout import Layout, Slot, aligned, lay_out_journal, slot_bytes
from paceline.sharding.optimizer_arguments import no_journal
from paceline.sharding.shards import Shards
from paceline.sharding.shared_parameters import SharedStorage, storage_of

_HERE, _ELSEWHERE = 1, 2
_LOOK_S = 0.0005


class Part(ABC, Generic[Tensor]):
    @abstractmethod
    def has_gradient(self, number: int) -> bool: ...

    @abstractmethod
    def step(self, block: int, numbers: Sequence[int]) -> None:
        """Make the step of one block."""

    @abstractmethod
    def held(self, number: int) -> dict[Any, Any]: ...

    @abstractmethod
    def lay(self, number: int, key: Any, view: Tensor) -> None: ...

    @abstractmethod
    def recall(self, number: int, views: Mapping[Any, Tensor]) -> None: ...


def slots_from(held: Mapping[Any, Tensor], shape: tuple[int, ...]) -> list[Slot]:
    slots = []
    for key, value in held.items():
        own_shape = None if tuple(value.shape) == shape else tuple(value.shape)
        slots.append(Slot(key, value.dtype, int(value.element_size()), own_shape))
    return slots


def storage_of_all(parameters: Sequence[Tensor], world_size: int) -> SharedStorage[Tensor]:
    storage = storage_of(parameters[0])
    if storage is None or any(storage_of(parameter) is not storage for parameter in parameters):
        raise no_journal("parameters that are not those of one model with share_parameters=True")
    if storage.world_size != world_size:
        raise no_journal(f"{world_size} ranks, of which this host has {storage.world_size}")
    return storage


class Journal(Generic[Tensor]):
    """The journal of one optimizer, as seen by one rank. The constructor is collective."""

    def __init__(
        self,
        shards: Shards[Tensor],
        storage: SharedStorage[Tensor],
        slots: Sequence[Sequence[Slot]],
        timeout_s: float,
    ) -> None:
        self._pieces, self._shards = list(shards.pieces), shards
        self.storage, self._step_table = storage, storage.step_table
        self._slots = [slots[piece.parameter] for piece in self._pieces]
        itemsizes = shards.itemsizes()
        self._layout: Layout = lay_out_journal(self._pieces, itemsizes, self._slots, storage.world_size)
        exchange, ranks = WholeExchange(storage.core), range(storage.world_size)
        memory = share_model_memory(exchange, ranks, self._layout.nbytes, timeout_s=timeout_s)
        self._base = memory.writable
        self._bytes = (ctypes.c_ubyte * self._layout.nbytes).from_address(self._base)
        self._bytes.owner = memory  # type: ignore[attr-defined]
        self._views: dict[int, dict[Any, Tensor]] = {}
        self._has_written = False

    # --- where the state is ---

    def _views_of(self, number: int) -> dict[Any, Tensor]:
        if number not in self._views:
            self._views[number] = {
                slot.key: self._shards.view(number, slot, self._bytes, at)
                for slot, at in zip(self._slots[number], self._layout.state[number])
            }
        return self._views[number]

    def note_loaded(self) -> None:
        """This rank's state was replaced. Until its next step, the journal does not have it."""
        self._bytes[self._layout.is_ready[self.storage.rank]] = 0

    @property
    def is_ready(self) -> bool:
        return bool(self._bytes[self._layout.is_ready[self.storage.rank]])

    def make_ready(self, part: Part[Tensor]) -> None:
        own = self.storage.rank
        for number in self._numbers_of(own):
            self._adopt(part, number)
        self._bytes[self._layout.is_ready[own]] = 1

    def _adopt(self, part: Part[Tensor], number: int) -> None:
        self._bytes[self._layout.has_state[number]] = self._bring(part, number)

    def _bring(self, part: Part[Tensor], number: int) -> int:
        held, views = part.held(number), self._views_of(number)
        if not held:
            return 0
        if held.keys() != views.keys():
            return _ELSEWHERE
        for key, view in views.items():
            value = held[key]
            if value is view:
                continue
            form = getattr(value, "dtype", None), tuple(getattr(value, "shape", ()))
            if form != (view.dtype, tuple(view.shape)):
                return _ELSEWHERE
            if numel(view) and value.data_ptr() != view.data_ptr():
                self._shards.ops.copy(value, view)
                part.lay(number, key, view)
        return _HERE

    def knows_all(self) -> bool:
        return all(map(self._knows, range(self.storage.world_size)))

    def _knows(self, rank: int) -> bool:
        return bool(self._bytes[self._layout.is_ready[rank]]) and all(
            self._bytes[self._layout.has_state[number]] != _ELSEWHERE for number in self._numbers_of(rank)
        )

    def _numbers_of(self, rank: int) -> list[int]:
        return [number for number, piece in enumerate(self._pieces) if piece.rank == rank]

    def state(self, number: int) -> Mapping[Any, Tensor]:
        return self._views_of(number) if self._bytes[self._layout.has_state[number]] == _HERE else {}

    # --- steps ---

    def run(self, part: Part[Tensor]) -> None:
        self._has_written = False
        self._run(part, self.storage.rank, 0)

    def has_written(self) -> bool:
        """True if `run` has written any block. A block in which it raised has its old values again."""
        return self._has_written

    def _run(self, part: Part[Tensor], of: int, first: int) -> None:
        step_table, blocks = self._step_table, self._layout.blocks[of]
        for number in range(first, len(blocks)):
            block = [each for each in blocks[number] if part.has_gradient(each)]
            if not block:
                continue
            step_table.open_block(of, number, list(self._copies(of, number)))
            try:
                part.step(number, block)
            except BaseException:
                self._put_back(of, number)
                raise
            for each in block:
                self._adopt(part, each)
            step_table.close_block(of, number)
            self._has_written = True

    def _copies(self, of: int, number: int) -> Iterator[tuple[int, int, int]]:
        at = self._base + self._layout.kept[of]
        for each in self._layout.blocks[of][number]:
            flag = self._layout.has_state[each]
            yield self._base + flag, at, 1
            at += aligned(1)
            place, nbytes = self._shards.place_of(each)
            yield place, at, nbytes
            at += aligned(nbytes)
            for slot, offset in zip(self._slots[each], self._layout.state[each]):
                nbytes = slot_bytes(slot, self._pieces[each])
                if self._bytes[flag] == _HERE:
                    yield self._base + offset, at, nbytes
                at += aligned(nbytes)

    def _put_back(self, of: int, number: int) -> None:
        at = self._base + self._layout.kept[of]
        # First restore the flags, because `_copies` reads them to find out whether there was state to copy.
        for each in self._layout.blocks[of][number]:
            self._bytes[self._layout.has_state[each]] = ctypes.c_ubyte.from_address(at).value
            sizes = [1, self._shards.place_of(each)[1]]
            sizes += [slot_bytes(slot, self._pieces[each]) for slot in self._slots[each]]
            at += sum(map(aligned, sizes))
        for place, kept, nbytes in self._copies(of, number):
            ctypes.memmove(place, kept, nbytes)

    def complete(
        self,
        of: int,
        part_of: Callable[[int], AbstractContextManager[Part[Tensor]]],
        gone: Callable[[], set[int]],
        until: float,
    ) -> bool:
        """Write the rest of a lost rank's shard, or wait until another rank has written it.

        Args:
            of: The lost rank.
            part_of: Makes the optimizers for that rank's shard.
            gone: Returns the ranks that write nothing more.
            until: The deadline, on the clock of `time.monotonic()`.

        Returns:
            Whether the shard is written.
        """
        step_table, own = self._step_table, self.storage.rank
        if not self._knows(of):
            return False
        holder = step_table.claim(of)
        while holder != own:
            if step_table.is_finished(of):
                return True
            if holder in gone():
                holder = step_table.claim(of, holder)
            elif time.monotonic() > until:
                return False
            else:
                time.sleep(_LOOK_S)
        if step_table.is_finished(of):
            return True
        first, is_open = step_table.progress(of)
        if is_open:
            self._put_back(of, first)
        with part_of(of) as part:
            for number in self._numbers_of(of):
                if state := self.state(number):
                    part.recall(number, state)
            self._run(part, of, first)
        step_table.finish(of)
        return True

    def await_completion(
        self, of: int, unable: Sequence[int], gone: Callable[[], set[int]], until: float
    ) -> bool:
        """Wait until another rank has written the shard of a rank that is lost.

        Args:
            of: The lost rank.
            unable: Ranks that cannot write it, because they have no gradients.
            gone: Returns the ranks that write nothing more.
            until: The deadline, on the clock of `time.monotonic()`.

        Returns:
            Whether the shard is written.
        """
        able = set(range(self.storage.world_size)) - set(unable)
        while not self._step_table.is_finished(of):
            if not self._knows(of) or able <= gone() or time.monotonic() > until:
                return self._step_table.is_finished(of)
            time.sleep(_LOOK_S)
        return True
