"""The pieces of the parameters as tensors: what this rank's optimizer updates, and what ranks exchange after
a step.

A piece lies in the memory of its parameter: all of it, or a flat range. A parameter that the ranks of a host
share is mapped read-only; its pieces use a second, writable mapping of the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import FrameworkOps, Tensor, nbytes, numel
from paceline.reducer.owners import Owned, OwnedRange, owners
from paceline.sharding.journal_layout import Slot
from paceline.sharding.optimizer_arguments import OWNER
from paceline.sharding.partition import Extent, Piece
from paceline.sharding.shared_parameters import (
    SharedStorage,
    check_step_allowed,
    storage_of,
    storages_of,
)


def part_of(ops: FrameworkOps[Tensor], tensor: Tensor, piece: Piece) -> Tensor:
    part: Tensor = tensor if piece.is_whole else ops.flat(tensor)[piece.begin : piece.end]
    return part


@dataclass
class _Run:
    parameter: int
    begin: int
    end: int
    is_whole: bool
    numbers: list[int]
    sizes: list[int]


class Shards(Generic[Tensor]):
    """All pieces of an optimizer's parameters, on one rank.

    Attributes:
        parameters: All parameters.
        names: Their names, for errors.
        pieces: The pieces of all ranks.
        own: The numbers of the pieces that this rank updates.
        tensors: A tensor for each piece, on the memory of its parameter.
        generation: Changes whenever the memory of some tensor changes.
        storages: The shared storages of the parameters that the ranks of this host share.
    """

    def __init__(self, ops: FrameworkOps[Tensor], rank: int, world_size: int) -> None:
        self.ops, self.rank, self.world_size = ops, rank, world_size
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.pieces: list[Piece] = []
        self.own: list[int] = []
        self.tensors: list[Tensor] = []
        self.generation = 0
        self.storages: list[SharedStorage[Tensor]] = []
        self._places: list[int] = []
        self._forms: list[str] = []
        self._runs: list[_Run] = []

    def add(self, parameters: Sequence[Tensor], names: Sequence[str], pieces: Sequence[Piece]) -> None:
        self.parameters += parameters
        self.storages = storages_of(self.parameters)
        self.names += names
        self._places += [parameter.data_ptr() for parameter in parameters]
        self._forms += [self.ops.form(parameter) for parameter in parameters]
        for piece in pieces:
            if piece.rank == self.rank:
                self.own.append(len(self.pieces))
            self.pieces.append(piece)
            self.tensors.append(part_of(self.ops, self._memory_of(self.parameters[piece.parameter]), piece))
        self._runs = _runs_of(self.pieces, self.own)
        self.generation += 1

    def extents(self, parameters: Sequence[Tensor]) -> list[Extent]:
        return [Extent(numel(p), int(p.element_size()), self.ops.is_dense(p)) for p in parameters]

    def numbers_of(self, rank: int) -> list[int]:
        return [number for number, piece in enumerate(self.pieces) if piece.rank == rank]

    def publish_owners(self) -> None:
        """Report to wrapped models which rank needs which part of each gradient. Collective, because models
        may compare it over the ranks.
        """
        ranges: list[list[OwnedRange]] = [[] for _ in self.parameters]
        itemsizes = self.itemsizes()
        for piece in self.pieces:
            if piece.end == piece.begin:
                continue
            itemsize = itemsizes[piece.parameter]
            known, begin = ranges[piece.parameter], piece.begin * itemsize
            if known and (known[-1].end, known[-1].rank) == (begin, piece.rank):
                begin = known.pop().begin
            known.append(OwnedRange(begin, piece.end * itemsize, piece.rank))
        owners.publish(
            (parameter, Owned(tuple(its), self.rank, self.world_size))
            for parameter, its in zip(self.parameters, ranges)
        )

    def own_versions(self) -> list[int]:
        return self.ops.versions([self.tensors[number] for number in self.own])

    def has_part(self, has_gradient: Sequence[int]) -> bool:
        """True if this rank writes anything in a step in which these parameters have gradients."""
        return any(has_gradient[self.pieces[number].parameter] for number in self.own)

    def follow(self) -> None:
        """Update the pieces of parameters that have moved to other memory since the last step.

        Raises:
            ConfigError: A parameter has another form than before (its shape or dtype, say); or it is shared,
                and must not be written now.
        """
        for storage in self.storages:
            check_step_allowed(storage, OWNER, self.world_size)
        places = [parameter.data_ptr() for parameter in self.parameters]
        if places == self._places:
            return
        for name, form, parameter in zip(self.names, self._forms, self.parameters):
            if self.ops.form(parameter) != form:
                raise ConfigError(
                    f"{OWNER}: parameter '{name}' has been resized or replaced.",
                    expected=form,
                    got=self.ops.form(parameter),
                    likely=f"{self.ops.names.converting} after the optimizer was made",
                    hint="make the optimizer anew, on every rank, when the model has its final form",
                )
        self.storages = storages_of(self.parameters)
        for storage in self.storages:
            storage.check_in_place()
        for number, piece in enumerate(self.pieces):
            if places[piece.parameter] != self._places[piece.parameter]:
                memory = self._memory_of(self.parameters[piece.parameter])
                self._move(number, part_of(self.ops, memory, piece))
        self._places = places
        self.generation += 1

    def _move(self, number: int, values: Tensor) -> None:
        """Move a piece to the memory of these values. The tensor stays the same object, by which the
        optimizer finds its state.
        """
        self.ops.lay(self.tensors[number], values)

    def _memory_of(self, parameter: Tensor) -> Tensor:
        storage = storage_of(parameter)
        if storage is None:
            return self.ops.data(parameter)
        check_step_allowed(storage, OWNER, self.world_size)
        return storage.writable(parameter)

    # --- gradients ---

    def gradients(self) -> list[Any]:
        """Each parameter's gradient; None where the optimizer would find no gradient."""
        found, stand_in = self._find_gradients(), self.ops.stand_in
        scattered = [gradient for gradient in found if type(gradient) is stand_in]
        for gradient in scattered:
            gradient.of.check_present(gradient.number)
        for run in self._runs if scattered else ():
            gradient = found[run.parameter]
            if type(gradient) is stand_in:
                gradient.of.part(gradient.number, run.begin, run.end)
        return found

    def _find_gradients(self) -> list[Any]:
        ops = self.ops
        found = ops.step_gradients(self.parameters)
        for name, gradient in zip(self.names, found):
            if gradient is not None and type(gradient) is not ops.stand_in and ops.is_sparse(gradient):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is sparse.",
                    expected="dense gradients",
                    hint="nn.Embedding(..., sparse=False); or an optimizer of its own for this parameter, "
                    "which is not sharded, on every rank",
                )
        return found

    def lend_gradients(self, gradients: Sequence[Any], numbers: Sequence[int] | None = None) -> None:
        """Set the gradient of each piece to its part of the parameter's gradient."""
        tensors: list[Tensor] = []
        parts: list[Tensor] = []
        for run in self._runs if numbers is None else _runs_of(self.pieces, numbers):
            gradient = gradients[run.parameter]
            if gradient is not None:  # else its pieces have no gradient, since `end_loans` cleared them
                parts += self._parts_of(run, gradient)
                tensors += [self.tensors[number] for number in run.numbers]
        self.ops.lend_gradients(tensors, parts)

    def _parts_of(self, run: _Run, gradient: Any) -> Sequence[Tensor]:
        if type(gradient) is self.ops.stand_in:
            part = gradient.of.part(gradient.number, run.begin, run.end)
        elif run.is_whole:
            return (gradient,)
        else:
            whole = self.ops.as_laid_out(gradient, self.parameters[run.parameter])
            part = self.ops.flat(whole)[run.begin : run.end]
        # One split() for all pieces, because the cost per piece counts in each step.
        return (part,) if len(run.sizes) == 1 else self.ops.split(self.ops.flat(part), run.sizes)

    def send_gradients(
        self,
        communicator: Communicator[Tensor],
        to: int,
        root: int,
        gradients: Sequence[Any] | None,
        has_gradient: Sequence[int],
    ) -> None:
        """Send a rank without data its part of the gradients of rank `root`. Collective."""
        parts: list[Tensor] = []
        for piece, tensor in zip(self.pieces, self.tensors):
            if piece.rank != to or not has_gradient[piece.parameter]:
                continue
            gradient = None if gradients is None else gradients[piece.parameter]
            if self.rank == root and gradient is not None:
                whole = self.ops.as_laid_out(gradient, self.parameters[piece.parameter])
                parts.append(part_of(self.ops, whole, piece))
            else:
                parts.append(tensor.detach().clone())
            if self.rank == to:
                self.ops.lend_gradients([tensor], parts[-1:])
        if parts:
            communicator.broadcast(parts, root=root)

    def end_loans(self, numbers: Sequence[int] | None = None) -> None:
        """Remove the gradients from the pieces, because users clear the memory of gradients themselves."""
        self.ops.end_loans([self.tensors[number] for number in (self.own if numbers is None else numbers)])

    def written(self, has_gradient: Sequence[int]) -> list[list[Tensor]]:
        """The tensors that a step writes in which these parameters have gradients, by the rank that writes
        them.

        Tensors in memory that all ranks share are left out. With several hosts they are exchanged like all
        others: the ranks of a host then write the same bytes to the same place.
        """
        by_rank: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for piece, tensor in zip(self.pieces, self.tensors):
            if not has_gradient[piece.parameter] or not numel(tensor):
                continue
            storage = storage_of(self.parameters[piece.parameter])
            if storage is None or storage.world_size < self.world_size:
                by_rank[piece.rank].append(tensor)
        return by_rank

    # --- for a journal ---

    def itemsizes(self) -> list[int]:
        return [int(parameter.element_size()) for parameter in self.parameters]

    def place_of(self, number: int) -> tuple[int, int]:
        tensor = self.tensors[number]
        size = nbytes(tensor)
        return (tensor.data_ptr() if size else 0), size

    def view(self, number: int, slot: Slot, memory: Any, at: int) -> Tensor:
        """A tensor over the journal's memory for one state of a piece."""
        shape, like = slot.shape, None
        if shape is None:
            like = self.tensors[number]
            shape = tuple(like.shape)
        return self.ops.over(memory, at, math.prod(shape) * slot.itemsize, slot.dtype, shape, like)


def _runs_of(pieces: Sequence[Piece], numbers: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    for number in numbers:
        piece = pieces[number]
        if not runs or (runs[-1].parameter, runs[-1].end) != (piece.parameter, piece.begin):
            runs.append(_Run(piece.parameter, piece.begin, piece.begin, piece.is_whole, [], []))
        runs[-1].numbers.append(number)
        runs[-1].sizes.append(piece.end - piece.begin)
        runs[-1].end = piece.end
    return runs
