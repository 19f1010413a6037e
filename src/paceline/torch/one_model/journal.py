"""The journal of a `ShardedOptimizer` of torch: its state in memory of all ranks, and steps in blocks.

See `paceline.sharding.journal` for where everything lies.
"""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.collectives.whole_exchange import WholeExchange
from paceline.rendezvous.model_memory import share_model_memory
from paceline.sharding.cuts import CUT_ELEMENTS
from paceline.sharding.journal import Layout, Slot, aligned, lay_out_journal, no_journal, slot_bytes
from paceline.torch.one_model.groups import bare_step
from paceline.torch.one_model.homes import Home
from paceline.torch.one_model.shards import Shards

_HERE, _ELSEWHERE = 1, 2
_TRIAL_STEPS = 4
_LOOK_S = 0.0005


class Journal:
    """The journal of one optimizer, as one rank sees it. Collective to make.

    Args:
        shards: Its pieces, none larger than a block.
        home: Where all its parameters lie.
        slots: What the optimizer remembers of each piece.
        timeout_s: How long to wait for the other ranks.

    Attributes:
        home: The same.
    """

    def __init__(self, shards: Shards, home: Home, slots: Sequence[Sequence[Slot]], timeout_s: float) -> None:
        self._shards, self.home, self._slots = shards, home, slots
        self._ledger = home.ledger
        itemsizes = [parameter.element_size() for parameter in shards.parameters]
        self._layout: Layout = lay_out_journal(shards.pieces, itemsizes, slots, shards.world_size)
        exchange = WholeExchange(home.core)
        ranks = range(home.world_size)
        self._memory = share_model_memory(exchange, ranks, self._layout.nbytes, timeout_s=timeout_s)
        self._base = self._memory.writable
        self._bytes = (ctypes.c_ubyte * self._layout.nbytes).from_address(self._base)
        self._bytes.owner = self._memory  # type: ignore[attr-defined]
        self._views: dict[int, list[torch.Tensor]] = {}

    # --- where the state is ---

    def views(self, number: int) -> list[torch.Tensor]:
        """What is remembered of a piece, where all ranks see it."""
        if number not in self._views:
            piece, made = self._shards.pieces[number], []
            for slot, at in zip(self._slots[number], self._layout.state[number]):
                shape = (piece.end - piece.begin,) if slot.shape is None else slot.shape
                if slot.shape is None and piece.is_whole and self._shards.tensors[number].numel():
                    like = self._shards.tensors[number]
                    made.append(self._flat(slot, at, like.numel()).as_strided(like.shape, like.stride()))
                else:
                    made.append(self._flat(slot, at, torch.Size(shape).numel()).reshape(shape))
            self._views[number] = made
        return self._views[number]

    def _flat(self, slot: Slot, at: int, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=slot.dtype)
        return torch.frombuffer(self._bytes, dtype=slot.dtype, count=count, offset=at)

    def note_loaded(self) -> None:
        """This rank's state was replaced: until its next step, nobody else knows it."""
        self._bytes[self._layout.is_ready[self.home.rank]] = 0

    def make_ready(self, optimizer: Optimizer) -> None:
        """Bring this rank's state here, if it is not yet."""
        own = self.home.rank
        if self._bytes[self._layout.is_ready[own]]:
            return
        for number in self._shards.own:
            self._bytes[self._layout.has_state[number]] = 0
            self._adopt(optimizer, number)
        self._bytes[self._layout.is_ready[own]] = 1

    def _adopt(self, optimizer: Optimizer, number: int) -> None:
        """Let what an optimizer remembers of a piece lie here."""
        held = optimizer.state.get(self._shards.tensors[number])
        if not held:
            return
        slots, views = self._slots[number], self.views(number)
        if held.keys() != {slot.key for slot in slots}:
            self._bytes[self._layout.has_state[number]] = _ELSEWHERE
            return
        for slot, view in zip(slots, views):
            value = held[slot.key]
            if value is view:
                continue
            if not isinstance(value, torch.Tensor) or value.dtype != view.dtype or value.shape != view.shape:
                self._bytes[self._layout.has_state[number]] = _ELSEWHERE
                return
            if value.data_ptr() != view.data_ptr():
                view.copy_(value)
            held[slot.key] = view
        self._bytes[self._layout.has_state[number]] = _HERE

    def knows(self, rank: int) -> bool:
        """Whether all state of a rank is here."""
        pieces = self._shards.pieces
        return bool(self._bytes[self._layout.is_ready[rank]]) and all(
            self._bytes[self._layout.has_state[number]] != _ELSEWHERE
            for number, piece in enumerate(pieces)
            if piece.rank == rank
        )

    def state(self, number: int) -> dict[Any, torch.Tensor]:
        """What is remembered of a piece; empty: nothing yet."""
        if self._bytes[self._layout.has_state[number]] != _HERE:
            return {}
        return {slot.key: view for slot, view in zip(self._slots[number], self.views(number))}

    # --- steps ---

    def run(self, optimizer: Optimizer, of: int, kwargs: Mapping[str, Any], first: int = 0) -> None:
        """Make a rank's part of the step, one block after the other.

        Args:
            optimizer: It has the pieces of that rank, with their gradients.
            of: The rank.
            kwargs: For the optimizer's step().
            first: The first block.
        """
        tensors, ledger = self._shards.tensors, self._ledger
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        group_of = {id(tensor): group for group, held in groups for tensor in held}
        step = bare_step(optimizer)
        try:
            for number in range(first, len(self._layout.blocks[of])):
                block = [each for each in self._layout.blocks[of][number] if tensors[each].grad is not None]
                if not block:
                    continue
                for group, _ in groups:
                    group["params"] = []
                for each in block:
                    group_of[id(tensors[each])]["params"].append(tensors[each])
                ledger.open_block(of, number, list(self._copies(of, number)))
                step(optimizer, **kwargs)
                for each in block:
                    self._adopt(optimizer, each)
                ledger.close_block(of, number)
        finally:
            for group, held in groups:
                group["params"] = held

    def _copies(self, of: int, number: int) -> Iterator[tuple[int, int, int]]:
        """From where to where a block's old values are copied, and how many bytes."""
        at = self._base + self._layout.kept[of]
        for each in self._layout.blocks[of][number]:
            tensor, piece = self._shards.tensors[each], self._shards.pieces[each]
            flag = self._layout.has_state[each]
            yield self._base + flag, at, 1
            at += aligned(1)
            yield tensor.data_ptr(), at, tensor.nbytes
            at += aligned(tensor.nbytes)
            for slot, place in zip(self._slots[each], self._layout.state[each]):
                nbytes = slot_bytes(slot, piece)
                if self._bytes[flag] == _HERE:
                    yield self._base + place, at, nbytes
                at += aligned(nbytes)

    def _put_back(self, of: int, number: int) -> None:
        """Undo what was written of a block."""
        at = self._base + self._layout.kept[of]
        for each in self._layout.blocks[of][number]:  # first whether there was state: it says what was copied
            self._bytes[self._layout.has_state[each]] = ctypes.c_ubyte.from_address(at).value
            sizes = [1, self._shards.tensors[each].nbytes]
            sizes += [slot_bytes(slot, self._shards.pieces[each]) for slot in self._slots[each]]
            at += sum(map(aligned, sizes))
        for place, kept, nbytes in self._copies(of, number):
            ctypes.memmove(place, kept, nbytes)

    def complete(
        self,
        of: int,
        make: Callable[[int], Optimizer],
        gradients: Sequence[torch.Tensor | None],
        kwargs: Mapping[str, Any],
        gone: Callable[[], set[int]],
        until: float,
    ) -> bool:
        """Make the rest of the part of a rank that is lost; or wait until another rank has.

        Args:
            of: The rank.
            make: An optimizer of the pieces of a rank.
            gradients: The mean, for each parameter.
            kwargs: For the optimizer's step().
            gone: The ranks that are lost, as of now.
            until: When to give up waiting.

        Returns:
            Whether it is made.
        """
        ledger, own = self._ledger, self.home.rank
        if not self.knows(of):
            return False
        holder = ledger.claim(of)
        while holder != own:
            if ledger.is_finished(of):
                return True
            if holder in gone():
                holder = ledger.claim(of, holder)
            elif time.monotonic() > until:
                return False
            else:
                time.sleep(_LOOK_S)
        if ledger.is_finished(of):
            return True
        first, is_open = ledger.progress(of)
        if is_open:
            self._put_back(of, first)
        optimizer = make(of)
        numbers = [number for number, piece in enumerate(self._shards.pieces) if piece.rank == of]
        for number in numbers:
            if state := self.state(number):
                optimizer.state[self._shards.tensors[number]] = state
        self._shards.set_gradients(gradients, numbers)
        try:
            self.run(optimizer, of, kwargs, first)
        finally:
            self._shards.clear_gradients(numbers)
        ledger.finish(of)
        return True

    def await_completion(
        self, of: int, unable: Sequence[int], gone: Callable[[], set[int]], until: float
    ) -> bool:
        """Wait until another rank has made the part of one that is lost.

        Args:
            of: The rank that is lost.
            unable: The ranks that cannot, as this one: they have no gradients.
            gone: The ranks that are lost, as of now.
            until: When to give up waiting.

        Returns:
            Whether it is made.
        """
        able = set(range(self.home.world_size)) - set(unable)
        while not self._ledger.is_finished(of):
            if not self.knows(of) or able <= gone() or time.monotonic() > until:
                return self._ledger.is_finished(of)
            time.sleep(_LOOK_S)
        return True


def slots_of(optimizer_class: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> list[Slot]:
    """What an optimizer remembers of a parameter; found out by steps on small tensors.

    Args:
        optimizer_class: One that updates every element by itself.
        options: All options of one group.
        dtype: The parameters'.

    Raises:
        ConfigError: Its step cannot be made in blocks, or it remembers what is no tensor.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole, parts = ([torch.linspace(-1, 1, size).to(dtype) for size in _SIZES] for _ in range(2))
        made = [
            optimizer_class([{**copy.deepcopy(dict(options)), "params": held}])  # type: ignore[call-arg]
            for held in (whole, list(parts))
        ]
        one, several = made
        before = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        for number in range(_TRIAL_STEPS):
            for tensor, other in zip(whole, parts):
                tensor.grad = torch.linspace(1, number + 2, tensor.numel()).to(dtype)
                other.grad = tensor.grad.clone()
            one.step()
            for other in parts:
                several.param_groups[0]["params"] = [other]
                several.step()
        after = {key: value for key, value in several.param_groups[0].items() if key != "params"}
        held = several.state.get(parts[0], {})
        strange = [key for key, value in held.items() if not isinstance(value, torch.Tensor)]
        if strange or repr(before) != repr(after) or not all(map(torch.equal, whole, parts)):
            why = f"remembers {strange} in other things than tensors" if strange else "steps all at once"
            raise no_journal(f"{optimizer_class.__name__}, which {why}")
    shape = parts[0].shape
    return [
        Slot(key, value.dtype, value.element_size(), None if value.shape == shape else tuple(value.shape))
        for key, value in held.items()
    ]


_SIZES = (CUT_ELEMENTS + 3, 2 * CUT_ELEMENTS)
