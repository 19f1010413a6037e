"""The pieces of the parameters as tensors: what this rank's optimizer updates, and what travels afterwards.

The one idea: a piece is a parameter of its own in the memory of the whole one (all of it, or a flat range),
with the name of the whole one, by which Paddle's optimizers and users' functions know it. A parameter that
the ranks of a host share is read-only where it lies: its pieces are in the same memory where it may be
written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.model.parameters import dtype_name, nbytes
from paceline.paddle.sharding.scattered_gradients import ScatteredGradient, held
from paceline.paddle.sharding.shared_storage import SharedStorage
from paceline.sharding.cuts import Extent, Piece
from paceline.sharding.journal_layout import Slot
from paceline.sharding.ownership import tell_owners
from paceline.sharding.shared_parameters import check_step_allowed, storage_of, storages_of
from paceline.sharding.shared_step import OWNER

Gradient: TypeAlias = paddle.Tensor | ScatteredGradient | None


def extent_of(parameter: paddle.Tensor) -> Extent:
    """Its size, and whether it can be cut."""
    return Extent(int(parameter.size), int(parameter.element_size()), bool(parameter.is_contiguous()))


def part_of(tensor: paddle.Tensor, piece: Piece) -> paddle.Tensor:
    """The elements of a piece in a tensor that is as its parameter; all of it where the piece is whole."""
    if piece.is_whole:
        return tensor.detach()
    flat = paddle.view(tensor.detach(), [int(tensor.size)])
    return flat[piece.begin : piece.end]


class Shards:
    """All pieces of an optimizer's parameters, on one rank.

    Args:
        rank: The rank of this process.
        world_size: Number of ranks.
        parameters: All of them.
        names: Their names for errors, the same on all ranks.
        pieces: Theirs.

    Attributes:
        own: The indices of the pieces that this rank updates.
        tensors: A tensor for each piece, on the memory of its parameter; for this rank's own, a parameter.
        generation: Changes whenever some tensor has other memory.
        storages: Where parameters lie that the ranks of this host share.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        parameters: Sequence[paddle.Tensor],
        names: Sequence[str],
        pieces: Sequence[Piece],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.parameters, self.names, self.pieces = list(parameters), list(names), list(pieces)
        self.own = [index for index, piece in enumerate(pieces) if piece.rank == rank]
        self.tensors: list[paddle.Tensor] = []
        self.storages: list[SharedStorage] = storages_of(parameters)
        self.generation = 0
        self._updates = 0
        self._places = [parameter.data_ptr() for parameter in parameters]
        self._forms = [_form(parameter) for parameter in parameters]
        for piece in pieces:
            self.tensors.append(part_of(self._memory_of(self.parameters[piece.parameter]), piece))
        for index, tensor in self.parameters_of(rank).items():
            self.tensors[index] = tensor

    def parameters_of(self, rank: int) -> dict[int, paddle.Tensor]:
        """The pieces of a rank as parameters of their own, by their numbers."""
        made = {
            index: internals.make_parameter(self.tensors[index], self.parameters[piece.parameter].name)
            for index, piece in enumerate(self.pieces)
            if piece.rank == rank
        }
        self._mark(made)
        return made

    def version(self, parameter: paddle.Tensor) -> int:
        """Counts the writes to a parameter."""
        return int(parameter.inplace_version)

    def own_versions(self) -> list[int]:
        """Counts the writes to each piece of this rank."""
        return [self._updates, *(int(self.tensors[index].inplace_version) for index in self.own)]

    def count_updates_of(self, optimizer: Any) -> None:
        """Count what an optimizer of Paddle's updates as writes: its kernels count up no version."""

        def count() -> None:
            self._updates += 1

        internals.note_updates(optimizer, count)

    def has_part(self, has_gradient: Sequence[int]) -> bool:
        """Whether this rank writes anything in a step with gradients of these parameters."""
        return any(has_gradient[self.pieces[index].parameter] for index in self.own)

    def follow(self) -> None:
        """Look how the parameters are now: somebody may have moved, frozen or marked one since the last step.

        Raises:
            ConfigError: One has another shape or dtype; or it is shared, and must not be written now.
        """
        for storage in self.storages:
            check_step_allowed(storage, OWNER, self.world_size)
        self._mark({index: self.tensors[index] for index in self.own})
        places = [parameter.data_ptr() for parameter in self.parameters]
        if places == self._places:
            return
        for index, parameter in enumerate(self.parameters):
            if _form(parameter) != self._forms[index]:
                raise ConfigError(
                    f"{OWNER}: parameter '{self.names[index]}' has been resized or replaced.",
                    expected="shape {}, {}".format(*self._forms[index]),
                    got="shape {}, {}".format(*_form(parameter)),
                    likely="layer.to(dtype=...) or another conversion after the optimizer was made",
                    hint="make the optimizer anew, on every rank, when the model has its final form",
                )
        self.storages = storages_of(self.parameters)
        for storage in self.storages:
            storage.check_in_place()
        for index, piece in enumerate(self.pieces):
            if places[piece.parameter] != self._places[piece.parameter]:
                values = part_of(self._memory_of(self.parameters[piece.parameter]), piece)
                if piece.rank == self.rank:  # by which the optimizer knows its state
                    internals.lay_into(self.tensors[index], values)
                else:
                    self.tensors[index] = values
        self._places = places
        self.generation += 1

    def _memory_of(self, parameter: paddle.Tensor) -> paddle.Tensor:
        """A parameter's elements, where this rank may write them."""
        storage = storage_of(parameter)
        if storage is None:
            return parameter
        check_step_allowed(storage, OWNER, self.world_size)
        return storage.writable(parameter)

    def _mark(self, tensors: Mapping[int, paddle.Tensor]) -> None:
        """Let pieces have the attributes by which optimizers decide about a parameter."""
        for index, tensor in tensors.items():
            parameter = self.parameters[self.pieces[index].parameter]
            tensor.stop_gradient = parameter.stop_gradient
            tensor.optimize_attr = getattr(parameter, "optimize_attr", {"learning_rate": 1.0})
            tensor.regularizer = getattr(parameter, "regularizer", None)

    def tell_owners(self) -> None:
        """Tell wrapped models which rank needs which part of each gradient. Collective."""
        tell_owners(self.parameters, self.itemsizes(), self.pieces, self.rank, self.world_size)

    def gradients(self) -> list[Gradient]:
        """Each parameter's gradient; None where the optimizer would find none.

        Raises:
            ConfigError: One is sparse, or kept elsewhere; or the part of it that this rank needs is not here.
        """
        found: list[Gradient] = []
        for name, parameter in zip(self.names, self.parameters):
            gradient = None if parameter.stop_gradient else held(parameter)
            if isinstance(gradient, ScatteredGradient):
                gradient.of.check_present(gradient.number)
            elif gradient is not None and internals.is_sparse(gradient):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is sparse.",
                    expected="dense gradients",
                    hint="nn.Embedding(..., sparse=False); or an optimizer of its own for this parameter",
                )
            if internals.has_main_gradient(parameter):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is kept as main_grad.",
                    likely="fleet.utils.mix_precision_utils",
                    hint="use the optimizer unsharded, or paddle.amp.decorate(..., master_grad=True)",
                )
            found.append(gradient)
        for index in self.own:
            piece = self.pieces[index]
            gradient = found[piece.parameter]
            if isinstance(gradient, ScatteredGradient):
                gradient.of.part(gradient.number, piece.begin, piece.end)
        return found

    def lend_gradients(
        self,
        gradients: Sequence[Gradient],
        tensors: Mapping[int, paddle.Tensor] | None = None,
    ) -> None:
        """Give pieces their parts of the gradients.

        Args:
            gradients: The whole ones, one for each parameter.
            tensors: Pieces of `parameters_of()`; None: those of this rank.
        """
        for index in self.own if tensors is None else tensors:
            piece = self.pieces[index]
            gradient = gradients[piece.parameter]
            if gradient is None:
                continue
            tensor = self.tensors[index] if tensors is None else tensors[index]
            if isinstance(gradient, ScatteredGradient):
                part = gradient.of.part(gradient.number, piece.begin, piece.end)
                internals.lend_gradient(tensor, part)
                continue
            if not piece.is_whole and not gradient.is_contiguous():
                gradient = gradient.contiguous()
            internals.lend_gradient(tensor, part_of(gradient, piece))

    # --- for a journal: see `JournaledPieces` ---

    def itemsizes(self) -> list[int]:
        return [int(parameter.element_size()) for parameter in self.parameters]

    def place_of(self, number: int) -> tuple[int, int]:
        tensor = self.tensors[number]
        return (tensor.data_ptr(), nbytes(tensor)) if tensor.size else (0, 0)

    def view(self, number: int, slot: Slot, memory: Any, at: int) -> paddle.Tensor:
        shape = self.tensors[number].shape if slot.shape is None else list(slot.shape)
        count = math.prod(shape)
        if not count:
            return paddle.empty(shape, slot.dtype)
        array = np.frombuffer(memory, np.uint8, count * slot.itemsize, at)
        return paddle.view(internals.over(array, slot.dtype), shape)

    def end_loans(self) -> None:
        """Let go of gradients: their memory belongs to whoever clears them."""
        for index in self.own:
            internals.end_loan(self.tensors[index])

    def written(self, has_gradient: Sequence[int]) -> list[list[paddle.Tensor]]:
        """Tensors that a step with gradients of these parameters writes to, by the rank that does.

        Without those that lie in memory which all ranks share. Between hosts they travel like any other: the
        ranks of a host then write the same bytes to the same place.
        """
        by_rank: list[list[paddle.Tensor]] = [[] for _ in range(self.world_size)]
        for piece, tensor in zip(self.pieces, self.tensors):
            storage = storage_of(self.parameters[piece.parameter])
            is_everybodys = storage is not None and storage.world_size == self.world_size
            if has_gradient[piece.parameter] and tensor.size and not is_everybodys:
                by_rank[piece.rank].append(tensor)
        return by_rank


def _form(parameter: paddle.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(parameter.shape), dtype_name(parameter.dtype)
