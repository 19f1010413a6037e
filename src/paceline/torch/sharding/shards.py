"""The pieces of the parameters as tensors: what this rank's optimizer updates, and what travels afterwards.

The one idea: a piece is a view of the parameter's own memory (all of it, or a flat range), made through
.data, and so counts its writes by itself. Each rank writes to other elements, and all ranks must count the
same number of writes to each parameter; so they are counted once, for all, after the step. A parameter that
the ranks of a host share is read-only where it lies: its pieces are views of the same memory where it may be
written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.sharding.cuts import Extent, Piece
from paceline.sharding.journal_layout import Slot
from paceline.sharding.ownership import tell_owners
from paceline.sharding.shared_parameters import check_step_allowed, storage_of, storages_of
from paceline.sharding.shared_step import OWNER
from paceline.torch.communicator.gradient_buffer import is_dense
from paceline.torch.sharding.scattered_gradients import ScatteredGradient
from paceline.torch.sharding.shared_storage import SharedStorage


def extent_of(parameter: torch.Tensor) -> Extent:
    """Its size, and whether it can be cut."""
    return Extent(parameter.numel(), parameter.element_size(), is_dense(parameter))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def part_of(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a piece in a tensor that is as its parameter; all of it where the piece is whole."""
    return tensor if piece.is_whole else flat(tensor)[piece.begin : piece.end]


def like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape, with its strides; itself if it has them."""
    if tensor.stride() == parameter.stride():
        return tensor
    copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


@dataclass
class _Run:
    """Pieces of this rank that lie one after the other in one parameter: what it was dealt of it."""

    pieces: list[Piece]
    indices: list[int]

    @property
    def begin(self) -> int:
        return self.pieces[0].begin

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    def is_followed_by(self, piece: Piece) -> bool:
        return (self.pieces[0].parameter, self.end) == (piece.parameter, piece.begin)

    def parts_of(self, gradient: torch.Tensor, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each piece has of the gradient of a parameter, of any layout."""
        if self.pieces[0].is_whole:
            return (gradient,)
        return self.split(flat(_as_laid_out(gradient, parameter))[self.begin : self.end])

    def split(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each piece has of what belongs to them together."""
        if len(self.pieces) == 1:
            return (part,)
        # In one call: what is done for each piece counts at each step.
        return flat(part).split_with_sizes([piece.end - piece.begin for piece in self.pieces])


class Shards:
    """All pieces of an optimizer's parameters, on one rank.

    Args:
        rank: The rank of this process.
        world_size: Number of ranks.

    Attributes:
        parameters: All of them.
        names: Their names, for errors.
        pieces: All pieces, of all ranks.
        own: The indices of the pieces that this rank updates.
        tensors: A tensor for each piece, on the memory of its parameter.
        generation: Changes whenever some tensor has other memory.
        storages: Where parameters lie that the ranks of this host share.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.parameters: list[torch.Tensor] = []
        self.names: list[str] = []
        self.pieces: list[Piece] = []
        self.own: list[int] = []
        self.tensors: list[torch.Tensor] = []
        self.generation = 0
        self.storages: list[SharedStorage] = []
        self._places: list[int] = []
        self._forms: list[tuple[torch.Size, torch.dtype, tuple[int, ...]]] = []
        self._runs: list[_Run] = []

    def add(self, parameters: Sequence[torch.Tensor], names: Sequence[str], pieces: Sequence[Piece]) -> None:
        """Take more parameters; `pieces` are theirs."""
        self.parameters += parameters
        self.storages = storages_of(self.parameters)
        self.names += names
        self._places += [parameter.data_ptr() for parameter in parameters]
        self._forms += [(p.shape, p.dtype, p.stride()) for p in parameters]
        for piece in pieces:
            if piece.rank == self.rank:
                self.own.append(len(self.pieces))
            self.pieces.append(piece)
            self.tensors.append(part_of(self._memory_of(self.parameters[piece.parameter]), piece))
        self._runs = _runs_of(self.pieces, self.own)
        self.generation += 1

    def tell_owners(self) -> None:
        """Tell wrapped models which rank needs which part of each gradient. Collective."""
        tell_owners(self.parameters, self.itemsizes(), self.pieces, self.rank, self.world_size)

    def version(self, parameter: torch.Tensor) -> int:
        """Counts the writes to a parameter."""
        return parameter._version

    def own_versions(self) -> list[int]:
        """Counts the writes to each piece of this rank."""
        return [self.tensors[index]._version for index in self.own]

    def has_part(self, has_gradient: Sequence[int]) -> bool:
        """Whether this rank writes anything in a step with gradients of these parameters."""
        return any(has_gradient[self.pieces[index].parameter] for index in self.own)

    def follow(self) -> None:
        """Look where the parameters lie now: somebody may have given one other memory since the last step.

        Raises:
            ConfigError: One has another shape, dtype or layout; or it is shared, and must not be written now.
        """
        for storage in self.storages:
            check_step_allowed(storage, OWNER, self.world_size)
        places = [parameter.data_ptr() for parameter in self.parameters]
        if places == self._places:
            return
        for index, parameter in enumerate(self.parameters):
            form = parameter.shape, parameter.dtype, parameter.stride()
            if form != self._forms[index]:
                raise ConfigError(
                    f"ShardedOptimizer: parameter '{self.names[index]}' has been resized or replaced.",
                    expected="shape {}, {}, strides {}".format(*_spelled(self._forms[index])),
                    got="shape {}, {}, strides {}".format(*_spelled(form)),
                    likely="module.to(), .half() or `parameter.data = ...` after the optimizer was made",
                    hint="make the optimizer anew, on every rank, when the model has its final form",
                )
        self.storages = storages_of(self.parameters)
        for storage in self.storages:
            storage.check_in_place()
        for piece, tensor in zip(self.pieces, self.tensors):
            if places[piece.parameter] != self._places[piece.parameter]:
                # The tensor stays the same: what the optimizer remembers is found by it.
                tensor.data = part_of(self._memory_of(self.parameters[piece.parameter]), piece)
        self._places = places
        self.generation += 1

    def _memory_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter's elements, where this rank may write them."""
        storage = storage_of(parameter)
        if storage is None:
            return parameter.data
        check_step_allowed(storage, OWNER, self.world_size)
        return storage.writable(parameter)

    def gradients(self) -> list[torch.Tensor | None]:
        """Each parameter's gradient.

        Raises:
            ConfigError: One is sparse, or the part of it that this rank needs is not here.
        """
        found = [parameter.grad for parameter in self.parameters]
        for index, gradient in enumerate(found):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"ShardedOptimizer: the gradient of parameter '{self.names[index]}' is sparse.",
                    expected="dense gradients",
                    got=str(gradient.layout),
                    hint="nn.Embedding(..., sparse=False); or an optimizer of its own for this parameter, "
                    "such as torch.optim.SparseAdam, on every rank",
                )
            if type(gradient) is ScatteredGradient:
                gradient.of.check_present(gradient.number)
        for run in self._runs:
            gradient = found[run.pieces[0].parameter]
            if type(gradient) is ScatteredGradient:
                gradient.of.part(gradient.number, run.begin, run.end)
        return found

    def set_gradients(
        self, gradients: Sequence[torch.Tensor | None], numbers: Sequence[int] | None = None
    ) -> None:
        """Give pieces their parts of the gradients, one for each parameter.

        Args:
            gradients: The whole ones.
            numbers: Which pieces; None: those of this rank.
        """
        for run in self._runs if numbers is None else _runs_of(self.pieces, numbers):
            index = run.pieces[0].parameter
            gradient = gradients[index]
            if gradient is None:
                continue  # no piece has one since `clear_gradients`
            if type(gradient) is ScatteredGradient:
                parts = run.split(gradient.of.part(gradient.number, run.begin, run.end))
            else:
                parts = run.parts_of(gradient, self.parameters[index])
            for place, part in zip(run.indices, parts):
                self.tensors[place].grad = part

    def lend_gradients(
        self,
        communicator: Communicator[torch.Tensor],
        to: int,
        root: int,
        gradients: Sequence[torch.Tensor | None] | None,
        has_gradient: Sequence[int],
    ) -> None:
        """Give a rank without data its part of the gradients of another. Collective.

        Args:
            communicator: Between the ranks.
            to: The rank that gets them; its pieces have them afterwards.
            root: The rank that gives them.
            gradients: All gradients of this rank; None: it has none.
            has_gradient: Whether each parameter has one.
        """
        parts: list[torch.Tensor] = []
        for piece, tensor in zip(self.pieces, self.tensors):
            if piece.rank != to or not has_gradient[piece.parameter]:
                continue
            gradient = None if gradients is None else gradients[piece.parameter]
            if self.rank == root and gradient is not None:
                parameter = self.parameters[piece.parameter]
                parts.append(part_of(_as_laid_out(gradient, parameter), piece))
            else:
                parts.append(torch.empty_like(tensor))
            if self.rank == to:
                tensor.grad = parts[-1]
        if parts:
            communicator.broadcast(parts, root=root)

    def clear_gradients(self, numbers: Sequence[int] | None = None) -> None:
        """Let go of them: their memory belongs to whoever calls zero_grad()."""
        for index in self.own if numbers is None else numbers:
            self.tensors[index].grad = None

    def written(self, has_gradient: Sequence[int]) -> list[list[torch.Tensor]]:
        """Tensors that a step with gradients of these parameters writes to, by the rank that does.

        Without those that lie in memory which all ranks share. Between hosts they travel like any other: the
        ranks of a host then write the same bytes to the same place.
        """
        by_rank: list[list[torch.Tensor]] = [[] for _ in range(self.world_size)]
        for piece, tensor in zip(self.pieces, self.tensors):
            if not has_gradient[piece.parameter] or not tensor.numel():
                continue
            storage = storage_of(self.parameters[piece.parameter])
            if storage is None or storage.world_size < self.world_size:
                by_rank[piece.rank].append(tensor)
        return by_rank

    # --- for a journal: see `JournaledPieces` ---

    def itemsizes(self) -> list[int]:
        return [parameter.element_size() for parameter in self.parameters]

    def place_of(self, number: int) -> tuple[int, int]:
        tensor = self.tensors[number]
        return tensor.data_ptr(), tensor.nbytes

    def view(self, number: int, slot: Slot, memory: Any, at: int) -> torch.Tensor:
        like = self.tensors[number]
        shape = like.shape if slot.shape is None else torch.Size(slot.shape)
        if not math.prod(shape):
            return torch.empty(shape, dtype=slot.dtype)
        flat = torch.frombuffer(memory, dtype=slot.dtype, count=math.prod(shape), offset=at)
        return flat.as_strided(shape, like.stride()) if slot.shape is None else flat.reshape(shape)

    def count_writes(self, has_gradient: Sequence[int]) -> None:
        """Let autograd, and Paceline's comparison of the ranks, know of one write to each parameter."""
        torch.autograd.graph.increment_version(
            [parameter for parameter, has in zip(self.parameters, has_gradient) if has]
        )


def _runs_of(pieces: Sequence[Piece], numbers: Sequence[int]) -> list[_Run]:
    """Some pieces, those that lie one behind the other together."""
    runs: list[_Run] = []
    for number in numbers:
        if not runs or not runs[-1].is_followed_by(pieces[number]):
            runs.append(_Run([], []))
        runs[-1].pieces.append(pieces[number])
        runs[-1].indices.append(number)
    return runs


def _as_laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient as it can be cut like its parameter; itself, if it can."""
    return like(gradient.detach().resolve_conj().resolve_neg(), parameter)


def _spelled(form: tuple[torch.Size, torch.dtype, tuple[int, ...]]) -> tuple[object, ...]:
    shape, dtype, strides = form
    return tuple(shape), str(dtype).removeprefix("torch."), strides
