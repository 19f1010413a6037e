"""The gradients of one model, and the memory they lie in: Paddle's own, or the gradient buffer.

A gradient is handed over in one of four ways:
- By *pointer*: the reducer reads the gradient in Paddle's memory, and writes the mean there.
- As a *copy*: the gradient is copied to the gradient buffer, and the mean is copied back. Used if the reducer
  takes no pointers, if another wrapped model has the same parameter, and if gradients are averaged in another
  dtype.
- *In place*: the gradient lives in the gradient buffer.
- *Taken*: the gradient is moved to the gradient buffer, and each rank keeps its part of the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.model.gradient_stand_in import Scattered, ScatteredGradient
from paceline.paddle.model.parameters import ManagedTensors, dtype_name
from paceline.paddle.ops import OPS
from paceline.reducer.backward.state import BackwardState
from paceline.reducer.communicator import Reduction
from paceline.reducer.framework_ops import nbytes
from paceline.reducer.plan import ParameterSpec
from paceline.sharding.scattered_gradients import left_over, scatter


class Gradients:
    """The gradients of the parameters that a plan lists: Paddle's `front_end_interface.Gradients`.

    Attributes:
        scattered: The parts of the means that this rank has; None: every rank gets all means.
        hand_over: For each parameter, in the plan or not, a function that gives its gradient to the reducer.
            The list object stays the same.
    """

    def __init__(
        self,
        tensors: ManagedTensors,
        state: BackwardState,
        rank: int,
        *,
        live_in_buffer: bool,
        reduce_dtype: paddle.dtype | None = None,
        widens: bool = False,
    ) -> None:
        # Sparse gradients are not handed over, but averaged at the end of a backward.
        self.hand_over: list[Callable[[], None]] = [_nothing] * len(tensors.all_trainable)
        self.scattered: Scattered | None = None
        self._rank = rank
        self._tensors = tensors
        self._names = tensors.names
        self._parameters = tensors.trainable
        self._state = state
        self._live_in_buffer = live_in_buffer
        self._reduce_dtype, self._widens = reduce_dtype, widens
        self._shared: set[int] = set()
        self._straightened: set[int] = set()
        self._shapes = [parameter.shape for parameter in tensors.trainable]
        self._dtypes = [parameter.dtype for parameter in tensors.trainable]

    def adopt(self, reduction: Reduction[paddle.Tensor]) -> None:
        moved = self._in_buffer()
        self._reduction = reduction
        self._places = reduction.places
        self._pointers = [place.data_ptr() for place in self._places]
        for index, gradient in moved.items():
            self._move_to_buffer(index, gradient)
        self._scatter(reduction)
        self._choose_hand_overs()

    def _scatter(self, reduction: Reduction[paddle.Tensor]) -> None:
        self.scattered = scatter(self._names, OPS, self._parameters, reduction, self._rank, self.scattered)

    def specs(self, *, whole: bool) -> list[ParameterSpec]:
        return self._tensors.specs(self._reduce_dtype, widens=self._widens)

    def share(self, indices: set[int]) -> None:
        """Move the gradients of these parameters, which other wrapped models have too, out of the gradient
        buffer.
        """
        self.leave_buffer(indices)
        self._shared = indices
        self._choose_hand_overs()

    def leave_buffer(self, indices: Collection[int] | None = None) -> None:
        for index, gradient in self._in_buffer().items():
            if indices is None or index in indices:
                with paddle.no_grad():
                    internals.set_gradient(self._parameters[index], gradient.clone())

    def interrupt(self) -> None:
        """Paddle runs a backward in the thread of its caller, so nothing remains for `settle`."""
        self.leave_buffer()

    def settle(self) -> None: ...

    def _choose_hand_overs(self) -> None:
        count = len(self._parameters)
        self.hand_over[:count] = [self._choose_copy_or_view(index)(index) for index in range(count)]
        uses = internals.uses_of_memory()
        self._state.handed.watch(self._parameters, "", "", uses, self._in_own_memory())

    def _in_own_memory(self) -> list[int]:
        if self.scattered is not None:
            return []
        return [
            index
            for index, place in enumerate(self._places)
            if index in self._shared
            or not (self._live_in_buffer and internals.same_dtype(place.dtype, self._dtypes[index]))
        ]

    def _choose_copy_or_view(self, index: int) -> Callable[[int], Callable[[], None]]:
        if not internals.same_dtype(self._places[index].dtype, self._dtypes[index]):
            return self._by_cast
        if index in self._shared:
            return self._by_copy
        if self._live_in_buffer:
            return self._in_place
        if self.scattered is not None:
            return self._taking
        is_taken = nbytes(self._places[index]) <= self._reduction.most_pointer_bytes
        return self._by_pointer if is_taken else self._by_copy

    @property
    def any_in_buffer(self) -> bool:
        return bool(self._in_buffer())

    def _in_buffer(self) -> dict[int, paddle.Tensor]:
        if not self._live_in_buffer or not hasattr(self, "_pointers"):
            return {}
        gradients = map(internals.gradient_of, self._parameters)
        return {
            index: gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.data_ptr() == self._pointers[index]
        }

    def exists(self, index: int) -> bool:
        return OPS.gradient(self._parameters[index]) is not None

    def check_cleared(self, index: int) -> None:
        """Raise if a backward has added to a stand-in, because the sum would lack the means that it stands
        for.
        """
        if self.scattered is not None and internals.stand_in_of(self._parameters[index]) is not None:
            raise left_over(self._names[index], self._state.where, OPS.names)

    def count(self, index: int) -> None:
        """Keep the gradient even if it was cleared: Paddle would replace it in the next backward."""
        internals.count_as_gradient(self._parameters[index])

    def count_all(self) -> None:
        """Keep cleared gradients in the gradient buffer: Paddle's new ones would have to be copied there."""
        if self._live_in_buffer:
            for parameter, shape, dtype in zip(self._parameters, self._shapes, self._dtypes):
                # Else Paddle would raise on this rank only, or misread elements of the new dtype.
                if parameter.shape == shape and internals.same_dtype(parameter.dtype, dtype):
                    internals.count_as_gradient(parameter)

    def hand_over_rest(self, index: int) -> None:
        self.count(index)
        self.hand_over[index]()

    def count_unused(self, indices: Collection[int]) -> None:
        if self.scattered is not None:
            return
        with paddle.no_grad():
            for index in indices:
                gradient, place = OPS.gradient(self._parameters[index]), self._places[index]
                if gradient is None or isinstance(gradient, ScatteredGradient):
                    continue
                if internals.is_sparse(gradient):
                    continue
                if gradient.shape == self._shapes[index]:
                    place.copy_(gradient.cast(place.dtype), True)
                    self._reduction.reducer.mark_unused(index)

    def clear(self, index: int) -> None:
        self._places[index].zero_()

    def leave_out(self, indices: Collection[int]) -> None:
        for index in indices:
            self._check_kind(index)
        self.leave_buffer(indices)  # because their places there are filled with zeros

    def check(self) -> None:
        """Find gradients whose memory another tensor holds too, and give their means memory of their own.

        The other tensor may be an input, a view of the parameter, or one that a user's hook has kept.
        Gradients are not expected to change during backward, except by hooks of the parameter itself.
        """
        handed = self._state.handed
        for index in handed.look()[1]:
            gradient = handed[index]
            self._reduction.reducer.add_foreign(gradient.data_ptr(), nbytes(gradient))

    def _by_pointer(self, index: int) -> Callable[[], None]:
        find, take = internals.find_gradient(self._parameters[index]), self._take
        shape, dtype = self._shapes[index], self._dtypes[index]
        handed, mark_ready = self._state.handed, self._reduction.reducer.mark_ready

        def hand_over() -> None:
            gradient = find()
            if (
                gradient is None
                or ((found := gradient.dtype) is not dtype and found != dtype)
                or gradient.shape != shape
                or not gradient.is_contiguous()
                or index in handed
                or (pointer := gradient.data_ptr()) is None  # a sparse gradient
            ):
                gradient = take(index)
                if gradient is None:
                    return
                pointer = gradient.data_ptr()
            handed[index] = gradient
            mark_ready(index, pointer)

        return hand_over

    def _by_copy(self, index: int) -> Callable[[], None]:
        take, copy, state = self._take, self._places[index].copy_, self._state
        mark_copied, is_shared = self._reduction.reducer.mark_copied, index in self._shared

        def hand_over() -> None:
            gradient = take(index)
            if gradient is not None:
                copy(gradient, True)  # costs a sixth of paddle.assign()
                state.handed[index] = gradient
                state.staged.append(index)
                mark_copied(index, gradient.data_ptr() or 0, nbytes(gradient), is_shared)

        return hand_over

    def _by_cast(self, index: int) -> Callable[[], None]:
        take, copy, state = self._take, self._places[index].copy_, self._state
        mark_copied, dtype = self._reduction.reducer.mark_copied, self._places[index].dtype
        is_shared = index in self._shared

        def hand_over() -> None:
            gradient = take(index)
            if gradient is not None:
                with paddle.no_grad():
                    copy(gradient.cast(dtype), True)
                state.handed[index] = gradient
                state.staged.append(index)
                mark_copied(index, gradient.data_ptr() or 0, nbytes(gradient), is_shared)

        return hand_over

    def _in_place(self, index: int) -> Callable[[], None]:
        find, check, move = (
            internals.find_gradient(self._parameters[index]),
            self._check,
            self._move_to_buffer,
        )
        own_place = self._pointers[index]
        handed, mark_ready = self._state.handed, self._reduction.reducer.mark_ready

        def hand_over() -> None:
            gradient = find()
            # A gradient that is already in its place has the right shape and dtype.
            if gradient is None or index in handed or gradient.data_ptr() != own_place:
                if not check(index, gradient):
                    return
                gradient = move(index, gradient)
            handed[index] = gradient
            mark_ready(index, 0)

        return hand_over

    def _taking(self, index: int) -> Callable[[], None]:
        assert self.scattered is not None
        take, copy, state, parameter = (
            self._take,
            self._places[index].copy_,
            self._state,
            self._parameters[index],
        )
        mark_ready, stand_in = self._reduction.reducer.mark_ready, self.scattered.stand_ins[index]

        def hand_over() -> None:
            if internals.stand_in_of(parameter) is not None and index not in state.handed:
                state.refuse(index, left_over(self._names[index], state.where, OPS.names))
                return
            gradient = take(index)
            if gradient is not None:
                copy(gradient, True)
                state.handed[index] = stand_in
                internals.put_stand_in(parameter, stand_in)
                mark_ready(index, 0)

        return hand_over

    def _take(self, index: int) -> paddle.Tensor | None:
        parameter = self._parameters[index]
        gradient = internals.gradient_of(parameter)
        if not self._check(index, gradient):
            return None
        assert gradient is not None
        if not gradient.is_contiguous():  # its strides differ from the parameter's
            with paddle.no_grad():
                internals.set_gradient(parameter, gradient.contiguous())
            gradient = internals.gradient_of(parameter)
            self._straighten(index)
        return gradient

    def _straighten(self, index: int) -> None:
        """Make gradients that Paddle adds to this one contiguous, as the parameter is.

        Custom devices add the memory of the two tensors as it lies, whatever the strides; CPUs and GPUs
        respect strides.
        """
        parameter = self._parameters[index]
        if parameter.place.is_custom_place() and index not in self._straightened:
            self._straightened.add(index)
            parameter.register_hook(lambda gradient: gradient.contiguous())

    def _check(self, index: int, gradient: paddle.Tensor | None) -> bool:
        """True if the gradient can be handed over; records an error if it is of the wrong kind.

        None counts as unused: Paddle calls the parameter's hooks, but leaves the gradient undefined, for
        example that of a batch normalisation's shift if its scale is frozen.
        """
        if index in self._state.handed:
            self._refuse_second(index)
        elif gradient is None:
            return False
        elif (
            not internals.same_dtype(gradient.dtype, self._dtypes[index])
            or gradient.shape != self._shapes[index]
            or internals.is_sparse(gradient)
        ):
            self._refuse_kind(index, gradient)
        else:
            return True
        return False

    def _move_to_buffer(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        parameter, place = self._parameters[index], self._places[index]
        place.copy_(gradient, True)
        if not gradient.is_contiguous():
            self._straighten(index)
        # A new tensor, because the rest of the backward, or another parameter, may hold the old one.
        internals.set_gradient(parameter, place)
        own_place = internals.gradient_of(parameter)
        assert own_place is not None
        return own_place

    def write_back(self, missing: Sequence[int]) -> None:
        if self.scattered is not None:
            self.scattered.put([*self._state.handed, *missing])
            return
        staged = self._state.staged
        if self._shared and (parted := self._parted_by_others(staged)):
            missing, staged = [*missing, *parted], [index for index in staged if index not in parted]
        with paddle.no_grad():
            for index in staged:
                self._state.handed[index].copy_(self._in_own_dtype(index), True)
            for index in missing:
                parameter, place = self._parameters[index], self._in_own_dtype(index)
                is_in_buffer = self._live_in_buffer and index not in self._shared
                internals.set_gradient(parameter, place if is_in_buffer else place.clone())
                internals.count_as_gradient(parameter)

    def _parted_by_others(self, indices: Sequence[int]) -> list[int]:
        """The parameters whose gradient another wrapped model has moved to other memory.

        The old memory must not be written to, because another tensor holds it.
        """
        handed = self._state.handed
        shared = {
            index: internals.gradient_of(self._parameters[index])
            for index in indices
            if index in self._shared
        }
        return [i for i, now in shared.items() if now is None or now.data_ptr() != handed[i].data_ptr()]

    def _in_own_dtype(self, index: int) -> paddle.Tensor:
        place = self._places[index]
        return (
            place
            if internals.same_dtype(place.dtype, self._dtypes[index])
            else place.cast(self._dtypes[index])
        )

    def hand_over_sum(self, index: int, total: paddle.Tensor) -> None:
        if internals.same_dtype(total.dtype, self._dtypes[index]):
            internals.set_gradient(self._parameters[index], total)
            self.hand_over_rest(index)
        else:
            self._places[index].copy_(total, True)
            self._reduction.reducer.mark_ready(index, 0)

    def keep(self) -> dict[int, tuple[Any, bool]]:
        in_buffer: dict[int, paddle.Tensor] = self._in_buffer()
        kept: dict[int, tuple[Any, bool]] = {}
        for index, parameter in enumerate(self._parameters):
            gradient = OPS.gradient(parameter)
            if isinstance(gradient, ScatteredGradient):
                kept[index] = (gradient, False)
            elif gradient is not None:
                is_in_buffer = index in in_buffer
                with paddle.no_grad():
                    kept[index] = (gradient.clone() if is_in_buffer else gradient, is_in_buffer)
        for index, parameter in self._sparse():
            kept[index] = (internals.gradient_of(parameter), False)
        return kept

    def restore(self, kept: dict[int, tuple[Any, bool]]) -> None:
        for index, parameter in enumerate(self._parameters):
            internals.drop_stand_in(parameter)
            if index not in kept:
                internals.drop_gradient(parameter)
            elif kept[index][1]:
                self._move_to_buffer(index, kept[index][0])
            elif isinstance(kept[index][0], ScatteredGradient):
                internals.put_stand_in(parameter, kept[index][0])
            else:
                internals.set_gradient(parameter, kept[index][0])
        for index, parameter in self._sparse():
            internals.drop_gradient(parameter)
            gradient, _ = kept.get(index, (None, False))
            if gradient is not None:
                parameter.grad = gradient  # Paddle copies

    def _sparse(self) -> Iterable[tuple[int, paddle.Tensor]]:
        return enumerate(self._tensors.sparse.values(), len(self._names))

    def fingerprint(self) -> list[tuple[int, int]]:
        gradients = map(internals.gradient_of, self._parameters)
        return [(g.data_ptr(), g.inplace_version) for g in gradients if g is not None]

    def memory(self) -> tuple[list[int], list[int]] | None:
        if self.scattered is not None:
            return None
        gradients = [g for g in map(internals.gradient_of, self._parameters) if g is not None]
        if not all(g.place.is_cpu_place() and g.is_contiguous() for g in gradients):
            return None
        return [g.data_ptr() for g in gradients], [nbytes(g) for g in gradients]

    def _check_kind(self, index: int) -> None:
        parameter = self._parameters[index]
        if not internals.same_dtype(parameter.dtype, self._dtypes[index]):
            self._state.refuse(index, self._error(index, _described(parameter, "a value"), _CONVERTED))
        elif parameter.shape != self._shapes[index]:
            self._state.refuse(index, self._error(index, _described(parameter, "a value"), _CHANGED))

    def _refuse_second(self, index: int) -> None:
        error = ConfigError(
            f"The gradient of '{self._names[index]}' came again after it had been handed over.",
            where=self._state.where,
            likely="a layer is used inside and outside of recompute(), for the first time in this backward",
            hint="recompute(..., use_reentrant=False); or do it from the first backward on",
        )
        self._state.refuse(index, error)

    def _refuse_kind(self, index: int, gradient: paddle.Tensor) -> None:
        if internals.is_sparse(gradient):
            got = "a sparse gradient"
            likely = "embedding(..., sparse=True) as a function: use the layer nn.Embedding(sparse=True)"
        elif not internals.same_dtype(gradient.dtype, self._dtypes[index]):
            got, likely = _described(gradient, "a gradient"), _CONVERTED
        else:
            got, likely = _described(gradient, "a gradient"), _CHANGED
        self._state.refuse(index, self._error(index, got, likely))

    def _error(self, index: int, got: str, likely: str) -> ConfigError:
        expected = f"a dense gradient of {dtype_name(self._dtypes[index])}, shape {list(self._shapes[index])}"
        return ConfigError(
            f"DataParallel cannot average the gradient of '{self._names[index]}'.",
            where=self._state.where,
            expected=expected,
            got=got,
            likely=likely,
            hint="make such changes first, then wrap; or wrap `.module` again, on every rank",
        )


_CONVERTED = "the model was converted, by .astype() or .to(), after it had been wrapped"
_CHANGED = "the parameter's value was replaced by one of another shape after it had been wrapped"


def _described(tensor: paddle.Tensor, what: str) -> str:
    return f"{what} of {dtype_name(tensor.dtype)}, shape {list(tensor.shape)}"


def _nothing() -> None: ...
