"""The hook of each parameter, which hands over the finished gradient in as few Python steps as possible.

There are five kinds. In *pointer* mode the reducer copies the gradient into the gradient buffer, and at the
end copies the mean back. In *copy* mode torch makes both copies; over a process group, for all gradients of a
bucket at once. In *view* mode the gradient itself moves into the gradient buffer and stays there. In *taking*
mode it is copied there and nothing is copied back, because the backward scatters the means. A *sparse*
gradient lies elsewhere, and its hook only marks it as ready.

Hooks run some hundred times in every backward. So each is a closure over what it needs, and a rare case is a
call of another function. Where the core itself averages, the usual case runs no Python: see `in_core`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline import _core
from paceline.errors import ConfigError
from paceline.reducer.backward.state import RUNNING, BackwardState
from paceline.reducer.reducer_interface import Reducer
from paceline.reducer.reporting_reducer import ReportingReducer
from paceline.sharding.scattered_gradients import left_over
from paceline.torch.model.gradient_stand_in import ScatteredGradient
from paceline.torch.model.inner_tensors import extent
from paceline.torch.model.parameters import HAS_EXCHANGE_API, other_gradients
from paceline.torch.model.torch_compile import untraced
from paceline.torch.ops import OPS

Hook = Callable[[torch.Tensor], None]
HookMaker = Callable[[BackwardState, int, str, torch.Tensor, Reducer, torch.dtype], Hook]
"""Its arguments besides the state: index, name, place in the buffer, reducer, and dtype of the gradient."""


def pointer_hook(
    state: BackwardState,
    index: int,
    name: str,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
) -> Hook:
    """For a reducer that takes pointers, and gradients with the memory layout of their place."""
    mark_ready, handed = reducer.mark_ready, state.handed
    shape, strides, device = view.shape, view.stride(), view.device
    stage = copy_hook(state, index, name, view, reducer, dtype)
    is_row_major = view.is_contiguous()

    @untraced
    def hand_over(parameter: torch.Tensor) -> None:
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if state.phase < RUNNING:
            state.arm()
        gradient = parameter.grad
        if (
            gradient is None
            or gradient.dtype is not dtype
            or parameter.dtype is not dtype
            or gradient.is_sparse
            or gradient.shape != shape
            or type(gradient) is not torch.Tensor
            or gradient.device != device
            or gradient.is_neg()
            or not (gradient.is_contiguous() if is_row_major else gradient.stride() == strides)
        ):
            stage(parameter)
            return
        if index in handed:
            state.status.twice = index
            return
        pointer = gradient.data_ptr()
        if not pointer and gradient.numel():  # torch's zero tensors
            stage(parameter)
            return
        handed[index] = gradient
        mark_ready(index, pointer)

    return in_core(hand_over, state, index, view, reducer, dtype, gradient_in_buffer=False)


def copy_hook(
    state: BackwardState,
    index: int,
    name: str,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
    waiting: dict[int, torch.Tensor] | None = None,
    is_shared: bool = False,
) -> Hook:
    """For any reducer and any layout of the gradient; its place may have another dtype."""
    mark_copied, handed, staged = reducer.mark_copied, state.handed, state.staged
    copy, shape, device = view.copy_, view.shape, view.device

    @untraced
    def hand_over(parameter: torch.Tensor) -> None:
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if state.phase < RUNNING:
            state.arm()
        gradient = parameter.grad
        if (
            gradient is None
            or gradient.dtype is not dtype
            or parameter.dtype is not dtype
            or gradient.is_sparse
            or gradient.shape != shape
            or gradient.device != device
        ):
            refuse_unsupported(state, index, name, parameter, dtype, shape, device)
            return
        if index in handed:
            state.status.twice = index
            return
        if waiting is not None:
            waiting[index] = gradient
        else:
            # Only backward(create_graph=True) needs detach(), which takes as long as the rest of the hook.
            copy(gradient.detach() if gradient.requires_grad else gradient)
        handed[index] = gradient
        staged.append(index)
        pointer = gradient.data_ptr()  # 0: it consists of other tensors
        mark_copied(index, pointer, extent(gradient) if pointer else 0, is_shared)

    if waiting is None:
        return hand_over
    return in_core(hand_over, state, index, view, reducer, dtype, gradient_in_buffer=False, waiting=waiting)


def taking_hook(
    state: BackwardState,
    index: int,
    name: str,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
    *,
    stand_in: ScatteredGradient,
) -> Hook:
    """For scattered gradients: each is copied to its place, and freed at once.

    The freed memory is still in the CPU's caches, and autograd uses it for the next gradients. Keeping all
    gradients until the means are there would take as much memory again. The allocator would return it to the
    system after each backward, and get it back page by page in the next one.
    """
    mark_ready, handed, copy = reducer.mark_ready, state.handed, view.copy_
    shape, device = view.shape, view.device

    @untraced
    def hand_over(parameter: torch.Tensor) -> None:
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if state.phase < RUNNING:
            state.arm()
        gradient = parameter.grad
        if index in handed:
            state.status.twice = index
            return
        if type(gradient) is ScatteredGradient:  # autograd made no gradient, and cannot add to a stand-in
            state.refuse(index, left_over(name, state.where, OPS.names))
            return
        if (
            gradient is None
            or gradient.dtype is not dtype
            or parameter.dtype is not dtype
            or gradient.is_sparse
            or gradient.shape != shape
            or gradient.device != device
        ):
            refuse_unsupported(state, index, name, parameter, dtype, shape, device)
            return
        copy(gradient.detach() if gradient.requires_grad else gradient)  # as in copy_hook
        parameter.grad = handed[index] = stand_in
        mark_ready(index, 0)

    return in_core(hand_over, state, index, view, reducer, dtype, gradient_in_buffer=True, stand_in=stand_in)


def view_hook(
    state: BackwardState,
    index: int,
    name: str,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
    waiting: dict[int, torch.Tensor] | None = None,
) -> Hook:
    """For gradients that live in the gradient buffer: a new tensor of autograd is copied into it."""
    mark_ready, handed, copy = reducer.mark_ready, state.handed, view.copy_
    shape, device = view.shape, view.device
    # A communication hook may move the memory, by enlarging it for a while; the view moves with it.
    pointer, buffer_pointer = view.data_ptr, view.untyped_storage().data_ptr
    offset = pointer() - buffer_pointer()

    @untraced
    def hand_over(parameter: torch.Tensor) -> None:
        if state.is_syncing and state.phase < RUNNING:
            state.arm()
        gradient = parameter.grad
        if pointer() != buffer_pointer() + offset:
            state.refuse(index, moved_gradient(name, state.where, view))
            return
        if parameter.dtype is not dtype:
            refuse_unsupported(state, index, name, parameter, dtype, shape, device)
            return
        if gradient is not view:
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.is_sparse
                or gradient.shape != shape
                or gradient.device != device
            ):
                refuse_unsupported(state, index, name, parameter, dtype, shape, device)
                return
            copy(gradient.detach() if gradient.requires_grad else gradient)  # as in copy_hook
            parameter.grad = view
        if waiting:
            waiting.pop(index, None)  # from a backward that an exception has ended
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if index in handed:
            state.status.twice = index
            return
        handed[index] = view
        mark_ready(index, 0)

    if view.is_cpu:
        waiting = None  # the core copies it faster, while it is in the CPU's caches
    return in_core(hand_over, state, index, view, reducer, dtype, gradient_in_buffer=True, waiting=waiting)


def sparse_hook(
    state: BackwardState,
    index: int,
    name: str,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
    *,
    shape: torch.Size,
) -> Hook:
    """For sparse gradients of a parameter of this shape: the hook only marks that there is one."""
    mark_ready, handed = reducer.mark_ready, state.handed

    @untraced
    def hand_over(parameter: torch.Tensor) -> None:
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if state.phase < RUNNING:
            state.arm()
        if index in handed:
            state.status.twice = index
            return
        gradient = parameter.grad
        if gradient is None or parameter.dtype is not dtype:
            refuse_unsupported(state, index, name, parameter, dtype, shape)
            return
        if gradient.shape != shape:
            state.refuse(index, reshaped_parameter(name, state.where, gradient.shape, shape))
            return
        handed[index] = gradient
        mark_ready(index, 0)

    return hand_over


def in_core(
    hook: Hook,
    state: BackwardState,
    index: int,
    view: torch.Tensor,
    reducer: Reducer,
    dtype: torch.dtype,
    *,
    gradient_in_buffer: bool,
    stand_in: ScatteredGradient | None = None,
    waiting: dict[int, torch.Tensor] | None = None,
) -> Hook:
    """The same hook with the usual case in C++, or the hook itself where that is not possible.

    Other cases call the Python hook: the first gradient of a backward, a gradient that is not synchronised,
    and one whose memory layout differs from that of its place.
    """
    taker = reducer.marks if isinstance(reducer, ReportingReducer) else reducer
    if not isinstance(taker, (_core.Reducer, _core.BackwardMarks)):
        return hook
    if view.is_complex() or not HAS_EXCHANGE_API:
        return hook
    if waiting is None and not view.is_cpu:
        return hook
    try:
        return _core.GradientHook(
            hook,
            state,
            index,
            taker,
            view,
            dtype,
            gradient_in_buffer,
            transformed="is_neg" if waiting is None else "",  # a gradient in `waiting` is copied by torch
            stand_in=stand_in,
            waiting=waiting,
            note_stream=reducer.note_stream if isinstance(reducer, ReportingReducer) else None,
        )
    except (BufferError, RuntimeError):  # a device that DLPack does not know
        return hook


class SharedGradients:
    """Gradients of parameters that several wrapped models have; only a backward of this model counts.

    One backward may run through two models, and produce such a gradient through the other model before it
    reaches this model's outputs. The early gradient is then handed over when this model's backward begins, if
    it is the same backward. On other ranks it may have come later, and all ranks must use the same gradients.
    """

    def __init__(self, state: BackwardState) -> None:
        self._state = state
        # By index: the number of the backward, the hook, and the parameter.
        self._early: dict[int, tuple[int, Hook, torch.Tensor]] = {}

    def hook(self, index: int, hook: Hook) -> Hook:
        state, graphs = self._state, self._state.graphs

        @untraced
        def hand_over(parameter: torch.Tensor) -> None:
            if graphs.is_running or state.phase >= RUNNING or not state.is_syncing:
                hook(parameter)
            else:
                self._early[index] = (torch._C._current_graph_task_id(), hook, parameter)

        return hand_over

    def begin_backward(self) -> None:
        if not self._early:
            return
        early, self._early = self._early, {}
        here = torch._C._current_graph_task_id()
        for backward, hook, parameter in early.values():
            if backward == here:
                hook(parameter)


def moved_gradient(name: str, where: str, view: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"DistributedDataParallel cannot average the gradient of '{name}'.",
        where=where,
        expected="a gradient that stays in its bucket, as gradient_as_bucket_view=True says",
        got=f"one of {view.dtype} that does not lie in the memory where gradients are averaged any more",
        likely="the model was converted, by .half(), .to() or .share_memory(), after it had been wrapped",
        hint="make conversions first, then wrap; or wrap `.module` again, on every rank",
    )


def refuse_unsupported(
    state: BackwardState,
    index: int,
    name: str,
    parameter: torch.Tensor,
    dtype: torch.dtype,
    shape: torch.Size,
    device: torch.device | None = None,
) -> None:
    """Refuse a gradient that cannot be averaged.

    Autograd calls hooks even if there is no gradient, as for a Function whose backward returns None. Such a
    parameter is unused and is not refused. But a hook of the user may have dropped the gradient, as an
    optimizer does that steps within backward with this rank's own gradients.
    """
    gradient = parameter.grad
    is_as_wrapped = gradient is not None and gradient.dtype is dtype and gradient.shape == shape
    if is_as_wrapped and parameter.dtype is not dtype:
        # Autograd adds to a kept gradient in the gradient's dtype; the optimizer rounds to the parameter's.
        state.refuse(index, converted_parameter(name, state.where, parameter.dtype, dtype))
    elif gradient is not None or _has_hooks_of_users(parameter):
        state.refuse(index, unsupported_gradient(name, state.where, parameter, dtype, shape, device))


def _has_hooks_of_users(parameter: Any) -> bool:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(not str(getattr(hook, "__module__", "")).startswith("paceline.") for hook in hooks)


def unsupported_gradient(
    name: str,
    where: str,
    parameter: torch.Tensor,
    dtype: torch.dtype,
    shape: torch.Size,
    device: torch.device | None,
) -> ConfigError:
    gradient, hint = parameter.grad, ""
    if gradient is None:
        got = "no gradient"
        likely = "another hook of this parameter set its gradient to None; or backward made none for it"
    elif gradient.is_sparse:
        got = "a sparse gradient"
        likely = "torch.nn.functional.embedding(sparse=True); use nn.Embedding(sparse=True) instead"
    elif gradient.shape != shape:
        return reshaped_parameter(name, where, gradient.shape, shape)
    elif gradient.dtype is not parameter.dtype and getattr(parameter, "grad_dtype", None) is gradient.dtype:
        return other_gradients(name, dtype, gradient.dtype)
    elif gradient.dtype is dtype and device is not None and gradient.device != device:
        got = f"one on {gradient.device}"
        likely = "the model was moved, by .to() or .cuda(), after it had been wrapped"
        hint = "move the model first, then wrap; or wrap `.module` again, on every rank"
    else:
        got = f"a gradient of {gradient.dtype}"
        likely = "the model was converted, by .half() or .to(), after it had been wrapped"
    return ConfigError(
        f"DistributedDataParallel cannot average the gradient of '{name}'.",
        where=where,
        expected=f"a dense gradient of {dtype}" + (f" on {device}" if hint else ""),
        got=got,
        likely=likely,
        hint=hint,
    )


def reshaped_parameter(name: str, where: str, got: torch.Size, expected: torch.Size) -> ConfigError:
    return ConfigError(
        f"DistributedDataParallel cannot average the gradient of '{name}': it has another shape.",
        where=where,
        expected=f"a gradient of shape {tuple(expected)}, as the parameter had when it was wrapped",
        got=f"shape {tuple(got)}",
        likely="the parameter's .data was replaced after that: pruned, or a vocabulary that grew",
        hint="make such changes first, then wrap; or wrap `.module` again, on every rank",
    )


def converted_parameter(name: str, where: str, got: torch.dtype, expected: torch.dtype) -> ConfigError:
    return ConfigError(
        f"DistributedDataParallel cannot average the gradient of '{name}': the parameter has another dtype.",
        where=where,
        expected=f"a parameter of {expected}, as it was when it was wrapped",
        got=str(got),
        likely="the model was converted, by .half() or .to(), or the parameter's .data was replaced, after "
        "it had been wrapped",
        hint="make such changes first, then wrap; or wrap `.module` again, on every rank",
    )


def changed_gradient(
    name: str, where: str, handed: torch.Tensor | None, now: torch.Tensor | None
) -> ConfigError:
    if now is None:
        got = "no gradient any more"
    elif now is handed:
        got = "a gradient that was changed in place in the middle of backward"
    else:
        got = "another tensor in .grad"
    return ConfigError(
        f"DistributedDataParallel cannot average the gradient of '{name}'.",
        where=where,
        expected="the gradient that was there when its hooks had been called, until backward is over",
        got=got,
        likely="a hook of another tensor, or of autograd's own node, or another thread changes it",
        hint="change gradients after backward(); or in a hook that parameter."
        "register_post_accumulate_grad_hook() registers: such hooks run before gradients are averaged",
    )
