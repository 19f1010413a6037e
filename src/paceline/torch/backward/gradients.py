"""The gradients of one model, and where they lie: in torch's own memory, or in the gradient buffer.

When a plan is adopted, each parameter gets one of the five hooks of `gradient_hooks`: *pointer*, *copy*,
*view*, *taking* or *sparse*.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from paceline.reducer.backward.state import BackwardState
from paceline.reducer.communicator import Reduction
from paceline.reducer.plan import ParameterSpec
from paceline.sharding.scattered_gradients import scatter
from paceline.torch.backward.gradient_hooks import (
    Hook,
    HookMaker,
    changed_gradient,
    converted_parameter,
    copy_hook,
    pointer_hook,
    reshaped_parameter,
    sparse_hook,
    taking_hook,
    view_hook,
)
from paceline.torch.model.config import DDPConfig
from paceline.torch.model.gradient_stand_in import Scattered
from paceline.torch.model.inner_tensors import extent, is_plain
from paceline.torch.model.parameters import ManagedTensors
from paceline.torch.ops import OPS


class Gradients:
    """torch's `front_end_interface.Gradients`.

    Attributes:
        reduction: Averages the gradients.
        scattered: The gradients whose means are scattered over the ranks; None: every rank gets all means.
        hooks: The hook of each parameter, which hands its gradient over.
    """

    def __init__(self, tensors: ManagedTensors, state: BackwardState, config: DDPConfig, rank: int) -> None:
        self.hooks: list[Hook] = []
        self.reduction: Reduction[torch.Tensor]
        self.scattered: Scattered | None = None
        self._tensors = tensors
        self._names, self._parameters = tensors.names, tensors.trainable
        self._state = state
        self._config = config
        self._rank = rank
        self._shared: set[int] = set()
        self._kinds: list[set[int]] = []  # parameters by the device and dtype of their places
        self._shapes = [parameter.shape for parameter in tensors.trainable]
        self._dtypes = [parameter.dtype for parameter in tensors.trainable]

    @property
    def is_on_host(self) -> bool:
        """Whether the thread that calls backward() runs all hooks: no parameter is on a device."""
        return all(parameter.is_cpu for parameter in self._parameters)

    @property
    def any_in_buffer(self) -> bool:
        return self._config.gradients_in_buffer

    def specs(self, *, whole: bool) -> list[ParameterSpec]:
        return self._tensors.specs(self._config, whole=whole)

    def adopt(self, reduction: Reduction[torch.Tensor]) -> None:
        moved = self._in_buffer()
        self.reduction = reduction
        for index in moved:
            self._move_to_buffer(index, self._parameters[index].grad)
        kinds: dict[object, set[int]] = {}
        for index, place in enumerate(reduction.places):
            kinds.setdefault((place.device, place.dtype), set()).add(index)
        self._kinds = list(kinds.values())
        self._scatter(reduction)
        self._make_hooks()

    def _scatter(self, reduction: Reduction[torch.Tensor]) -> None:
        self.scattered = scatter(self._names, OPS, self._parameters, reduction, self._rank, self.scattered)

    def share(self, indices: set[int]) -> None:
        self._shared = indices
        self._make_hooks()

    def _make_hooks(self) -> None:
        places = zip(self._names, self._dtypes, self.reduction.places)
        self.hooks = [
            self._choose_copy_or_view(index, dtype, view)(
                self._state, index, name, view, self.reduction.reducer, dtype
            )
            for index, (name, dtype, view) in enumerate(places)
        ]

    def _choose_copy_or_view(self, index: int, dtype: torch.dtype, view: torch.Tensor) -> HookMaker:
        copied = functools.partial(copy_hook, waiting=self.reduction.waiting)
        if index in self._tensors.sparse:
            return functools.partial(sparse_hook, shape=self._shapes[index])
        if index in self._shared:  # another model may write its mean to the same memory first
            return functools.partial(copy_hook, is_shared=True)
        if view.dtype is not dtype:
            return copied
        if self._config.gradients_in_buffer:
            return functools.partial(view_hook, waiting=self.reduction.waiting)
        if self.scattered is not None:
            return functools.partial(taking_hook, stand_in=self.scattered.stand_ins[index])
        if view.nbytes <= self.reduction.most_pointer_bytes:
            # The memory may hold the conjugate of a complex gradient.
            return copied if dtype.is_complex else pointer_hook
        return copied

    def in_own_memory(self) -> list[int]:
        """Parameters whose gradients stay in memory of autograd, so that means are written there."""
        if self.scattered is not None:
            return []
        in_buffer, shared, dtypes = self._config.gradients_in_buffer, self._shared, self._dtypes
        return [
            index
            for index, place in enumerate(self.reduction.places)
            if index not in self._tensors.sparse
            and (not in_buffer or index in shared or place.dtype is not dtypes[index])
        ]

    def exists(self, index: int) -> bool:
        return self._parameters[index].grad is not None

    def hand_over_rest(self, index: int) -> None:
        self.hooks[index](self._parameters[index])

    def count_unused(self, indices: Collection[int]) -> None:
        if self.scattered is not None:
            return
        places, mark_unused = self.reduction.places, self.reduction.reducer.mark_unused
        with torch.no_grad():
            for index in indices:
                gradient = self._parameters[index].grad
                if gradient is None or gradient.is_sparse or index in self._tensors.sparse:
                    continue
                if gradient.shape == self._shapes[index]:  # else the parameter is refused
                    places[index].copy_(gradient)
                    mark_unused(index)

    def clear(self, index: int) -> None:
        self.reduction.places[index].zero_()

    def leave_out(self, indices: Collection[int]) -> None: ...

    def check(self) -> None:
        state, names, trainable = self._state, self._names, self._parameters
        if state.refusal is not None or state.status.twice is not None:
            return
        changed_ones, shared = state.handed.look()
        for changed in changed_ones:
            if changed in self._shared:  # by another wrapped model, which has written its mean
                continue
            handed, now = state.handed[changed], trainable[changed].grad
            if handed is not now or not self._shares_version(changed):
                state.refuse(changed, changed_gradient(names[changed], state.where, handed, now))
                break
        for index in shared:  # its mean gets memory of its own
            gradient = state.handed[index]
            if not gradient.requires_grad:
                self.reduction.reducer.add_foreign(gradient.data_ptr(), extent(gradient))
        if len(state.handed) == len(names):
            return
        for index, shape in enumerate(self._shapes):  # without a gradient, they get the other ranks' mean
            parameter, dtype = trainable[index], self._dtypes[index]
            if index in state.handed:
                continue
            if parameter.shape != shape:
                state.refuse(index, reshaped_parameter(names[index], state.where, parameter.shape, shape))
            elif parameter.dtype is not dtype:
                error = converted_parameter(names[index], state.where, parameter.dtype, dtype)
                state.refuse(index, error)

    def _shares_version(self, index: int) -> bool:
        """Whether other gradients lie in the same storage, as when autograd has split one tensor.

        They share a version counter, so a new version may come from a change of another gradient.
        """
        handed, gradient = self._state.handed, self._state.handed[index]
        if gradient is self.reduction.places[index]:
            return False
        storage = _storage_of(gradient)
        others = [handed[other] for other in handed if other != index]
        return storage != 0 and any(
            other is not None and not other.is_sparse and _storage_of(other) == storage for other in others
        )

    def write_back(self, missing: Sequence[int]) -> None:
        if self.scattered is not None:
            self.scattered.put([*self._state.handed, *missing])
            return
        places, staged = self.reduction.places, self._state.staged
        if self._shared and (moved := self._moved_by_others(staged)):
            missing, staged = [*missing, *moved], [index for index in staged if index not in moved]
        with torch.no_grad():
            self._write_back(staged)
            for index in missing:
                if index not in self._tensors.sparse:
                    parameter, place = self._parameters[index], places[index]
                    is_own = self._config.gradients_in_buffer and index not in self._shared
                    is_in_buffer = is_own and place.dtype is parameter.dtype
                    parameter.grad = place if is_in_buffer else place.to(parameter.dtype, copy=True)

    def _moved_by_others(self, indices: Sequence[int]) -> list[int]:
        """Shared gradients that another model has moved; their old memory belongs to another tensor."""
        handed, parameters = self._state.handed, self._parameters
        return [i for i in indices if i in self._shared and parameters[i].grad is not handed[i]]

    def _write_back(self, indices: Sequence[int]) -> None:
        handed, places, unlike = self._state.handed, self.reduction.places, []
        plain = [index for index in indices if type(handed[index]) is torch.Tensor]
        try:
            # One kernel copies all gradients of one device and dtype.
            for kind in self._kinds:
                of_kind = plain if len(self._kinds) == 1 else [index for index in plain if index in kind]
                gradients = [handed[index] for index in of_kind]
                if gradients:
                    torch._foreach_copy_(gradients, [places[index] for index in of_kind])
            if len(plain) < len(indices):
                unlike = [index for index in indices if type(handed[index]) is not torch.Tensor]
        except RuntimeError:  # torch's zero tensors cannot be written to
            unlike = list(indices)
        for index in unlike:
            self._write_back_one(index, handed[index], places[index])

    def _write_back_one(self, index: int, gradient: torch.Tensor, place: torch.Tensor) -> None:
        if gradient.data_ptr() or not gradient.numel():
            gradient.copy_(place)
            return
        try:  # its class may know how to write a plain tensor to its inner tensors
            gradient.copy_(place)
        except (NotImplementedError, RuntimeError, TypeError):
            self._parameters[index].grad = place.to(gradient.dtype, copy=True)

    def hand_over_sum(self, index: int, total: torch.Tensor) -> None:
        if total.dtype is self._dtypes[index]:
            self._parameters[index].grad = total
            self.hand_over_rest(index)
        else:
            self.reduction.places[index].copy_(total)
            self.reduction.reducer.mark_ready(index, 0)

    def keep(self) -> dict[int, tuple[Any, bool]]:
        in_buffer, kept = set(self._in_buffer()), {}
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None:  # keeps a stand-in, too: a backward that adds to it must raise
                is_in_buffer = index in in_buffer
                kept[index] = (gradient.clone() if is_in_buffer else gradient, is_in_buffer)
        return kept

    def restore(self, kept: dict[int, tuple[Any, bool]]) -> None:
        for index, parameter in enumerate(self._parameters):
            gradient, is_in_buffer = kept.get(index, (None, False))
            if is_in_buffer:  # move it to its place in the current plan
                self._move_to_buffer(index, gradient)
            else:
                parameter.grad = gradient

    def leave_buffer(self, indices: Collection[int] | None = None) -> None:
        for index in self._in_buffer():
            if indices is None or index in indices:
                self._parameters[index].grad = self.reduction.places[index].clone()

    def interrupt(self) -> None:
        if self.is_on_host:  # else this is autograd's thread, and the user's may be clearing gradients
            self.leave_buffer()

    def settle(self) -> None:
        """Drop gradients that in-flight buckets may have overwritten, before or after the user wrote them."""
        if not self.is_on_host:
            for index in self._in_buffer():
                self._parameters[index].grad = None

    def _in_buffer(self) -> list[int]:
        if not hasattr(self, "reduction"):
            return []
        pairs = zip(self._parameters, self.reduction.places)
        return [index for index, (parameter, place) in enumerate(pairs) if parameter.grad is place]

    def _move_to_buffer(self, index: int, gradient: Any) -> None:
        self._parameters[index].grad = self.reduction.places[index].copy_(gradient)

    def fingerprint(self) -> list[tuple[int, int]]:
        gradients = [p.grad for p in self._parameters]
        return [(id(g), g._version) for g in gradients if g is not None]

    def memory(self) -> tuple[list[int], list[int]] | None:
        if self._tensors.sparse or self.scattered is not None:
            return None
        pointers, sizes = [], []
        for gradient in [p.grad for p in self._parameters]:
            if gradient is None:
                continue
            if not gradient.is_cpu or not is_plain(gradient):
                return None
            pointers.append(gradient.data_ptr())
            sizes.append(extent(gradient))
        return pointers, sizes


def _storage_of(gradient: torch.Tensor) -> int:
    """The address of the gradient's storage; 0: it has no storage of its own."""
    return gradient.untyped_storage().data_ptr() if gradient.data_ptr() else 0
