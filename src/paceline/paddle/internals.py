"""All of Paddle's private names that Paceline uses, in one file. Written for Paddle 3.0 to 3.3.

Each function has a test in tests/multiprocess/test_paddle_internals.py that fails when Paddle changes the
private names behind it. No other file of `paceline.paddle` uses an undocumented name of Paddle.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

import numpy as np
import paddle
from paddle import Tensor, empty, from_dlpack, nn, view
from paddle.base import core, framework
from paddle.distributed import ParallelEnv, parallel
from paddle.io.dataloader import dataloader_iter
from paddle.nn.utils.spectral_norm_hook import SpectralNorm

from paceline import _core
from paceline.health.connections import connected_sockets, open_sockets, send_at_once

_Function = TypeVar("_Function", bound=Callable[..., Any])


def skip_in_sot(folder: str) -> None:
    """Make SOT, the default of paddle.jit.to_static, skip all functions of the files below `folder`.

    Like Paddle's own functions they run untranslated where SOT's frame callback finds them: for example hooks
    that a backward within to_static calls. Functions that they call are still translated.
    """
    core.eval_frame_skip_file_prefix((folder,))


def untranslated(function: _Function) -> _Function:
    """Make to_static translate neither this function nor the functions it calls, including Python's own
    files.

    If SOT simulates a call of it, SOT's graph ends there, and the call runs untranslated.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        callback = _set_frame_callback(None)  # a builtin function, which SOT does not translate
        try:
            return function(*args, **kwargs)
        finally:
            _set_frame_callback(callback)

    return cast(_Function, paddle.jit.not_to_static(run))


_set_frame_callback = core.set_eval_frame


def use_threads(number: int) -> int:
    """Set the number of threads of CPU kernels. Returns how many there were."""
    core.set_num_threads(number)  # for matrix products
    try:
        openmp = ctypes.CDLL("libiomp5.so")  # the library that Paddle has loaded
    except OSError:
        return int(paddle.get_flags("FLAGS_paddle_num_threads")["FLAGS_paddle_num_threads"])
    before = int(openmp.omp_get_max_threads())
    openmp.omp_set_num_threads(number)
    return before


class _NeverApplied(paddle.autograd.PyLayer): ...


def may_be_in_a_graph(function: type[paddle.autograd.PyLayer]) -> bool:
    """True if a function may have a node in some graph; if not, there is none. Costs next to nothing.

    Each node holds an object of a class that Paddle makes for the function, and each such object adds one
    reference to its class.
    """
    return sys.getrefcount(function._backward_function) > sys.getrefcount(_NeverApplied._backward_function)


def on_gradient(parameter: Tensor, hook: Callable[[], None]) -> None:
    """Call `hook` in every backward, once the gradient of `parameter` is accumulated.

    The parameter keeps the hook for its whole life. The hook must not raise, because Paddle continues with
    the exception pending. It may fire more than once if backward runs a part of the graph separately
    (reentrant recompute).
    """
    _register_backward_hook(parameter, hook)


_register_backward_hook = core.eager.Tensor._register_backward_hook


def watch_hooks_of_others(note: Callable[[Tensor], None]) -> None:
    """Call `note` with a parameter whenever other code registers such a hook. Call it once per process.

    Paddle calls hooks in the order of registration, and removes none.
    """

    @functools.wraps(_register_backward_hook)
    def register(parameter: Tensor, hook: Callable[[], None]) -> Any:
        note(parameter)
        return _register_backward_hook(parameter, hook)

    core.eager.Tensor._register_backward_hook = register


_find_gradient = core.eager.Tensor._grad_ivar
_grad, _grad_to_change = core.eager.Tensor.grad, core.eager.Tensor.grad_
_clear_gradient = core.eager.Tensor.clear_gradient


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient itself; `parameter.grad` makes a new tensor over the same memory.

    None if the parameter has a stand-in instead of a gradient.
    """
    return _find_gradient(parameter)


def find_gradient(parameter: Tensor) -> Callable[[], Tensor | None]:
    """A function that does the same in half the time of `gradient_of`."""
    found: Callable[[], Tensor | None] = _find_gradient.__get__(parameter)
    return found


class GradientStandIn(Protocol):
    def refuse(self) -> NoReturn: ...


def put_stand_in(parameter: Tensor, stand_in: GradientStandIn) -> None:
    """Make every Python access to a parameter's gradient go to this stand-in, until it is cleared or
    replaced.

    The gradient is dropped, so Paddle's C++ code finds no gradient, and the next backward makes a new one.
    Setting `parameter.grad`, also to None, and clear_gradient() remove the stand-in.
    """
    if type(parameter) is framework.EagerParamBase:
        _watch_lists_of_gradients()
        parameter.__class__ = _ParameterWithStandIn
    drop_gradient(parameter)
    parameter.__dict__[_STAND_IN] = stand_in


def stand_in_of(parameter: Tensor) -> Any | None:
    return parameter.__dict__.get(_STAND_IN)


def drop_stand_in(parameter: Tensor) -> None:
    parameter.__dict__.pop(_STAND_IN, None)


_STAND_IN = "_paceline_stand_in"


class _ParameterWithStandIn(framework.EagerParamBase):
    """A parameter that may have a stand-in. Its `__class__` is replaced, so it stays the same object."""

    def _refuse_if_elsewhere(self) -> None:
        stand_in = self.__dict__.get(_STAND_IN)
        if stand_in is not None:
            stand_in.refuse()

    @property
    def grad(self) -> Tensor | None:
        self._refuse_if_elsewhere()
        return _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        drop_stand_in(self)
        _grad.__set__(self, value)

    @property
    def grad_(self) -> Tensor | None:
        self._refuse_if_elsewhere()
        return _grad_to_change.__get__(self)

    @grad_.setter
    def grad_(self, value: Tensor | None) -> None:
        drop_stand_in(self)
        _grad_to_change.__set__(self, value)

    def _grad_ivar(self) -> Tensor | None:
        self._refuse_if_elsewhere()
        return _find_gradient(self)

    def clear_gradient(self, *args: Any, **kwargs: Any) -> None:
        drop_stand_in(self)
        _clear_gradient(self, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        stand_in = self.__dict__.pop(_STAND_IN, None)
        try:
            return super().__deepcopy__(memo)
        finally:
            if stand_in is not None:
                self.__dict__[_STAND_IN] = stand_in


@functools.cache
def _watch_lists_of_gradients() -> None:
    """Also check stand-ins in minimize() and in a GradScaler, which read all gradients in one call of C++."""
    for name in ("get_all_grads", "get_grads_lists"):
        _refuse_stand_ins_in(name)


def _refuse_stand_ins_in(name: str) -> None:
    read = getattr(core.eager, name)

    @functools.wraps(read)
    def reading(parameters: Sequence[Tensor]) -> Any:
        for parameter in parameters:
            if type(parameter) is _ParameterWithStandIn:
                parameter._refuse_if_elsewhere()
        return read(parameters)

    setattr(core.eager, name, reading)


def set_gradient(parameter: Tensor, place: Tensor) -> None:
    """Give the parameter a new gradient in the memory of `place`; no value is copied.

    Setting `parameter.grad` would copy into the old gradient, which another parameter may hold as well.
    """
    parameter._copy_gradient_from(_view(place))


def _view(tensor: Tensor) -> Tensor:
    """Another tensor in the same memory. Paddle makes no views of empty tensors, so these are cloned."""
    return tensor.clone() if 0 in tensor.shape else view(tensor, tensor.shape)


def drop_gradient(parameter: Tensor) -> None:
    """Remove the parameter's gradient.

    `parameter.grad = None` alone would free the memory of the gradient tensor, which others may hold.
    """
    if _find_gradient(parameter) is not None:
        parameter._copy_gradient_from(empty([1], parameter.dtype))
        _clear_gradient(parameter, False)


@functools.cache
def uses_of_memory() -> _core.SharedPointerUses | None:
    """A counter of the tensors that share a gradient's memory; None if this Paddle is not supported.

    Every backward needs the count for each gradient. So the core finds out from sample tensors where Paddle
    keeps it.
    """
    # Independent of the default dtype and the default place.
    first, other, values, mean = (
        paddle.to_tensor(np.full(1, value, np.float32), place=paddle.CPUPlace()) for value in range(4)
    )
    copy, alias = first.detach(), _view(first)
    parameter = make_parameter(values, "paceline_sample")
    set_gradient(parameter, mean)
    gradient = _find_gradient(parameter)
    uses = _core.SharedPointerUses(
        first, alias, other, first.get_tensor(), first.data_ptr(), parameter, gradient
    )
    del copy  # it had to live until here, to be counted
    return uses if uses.is_known else None


def count_as_gradient(parameter: Tensor) -> None:
    """Make the next backward add to the gradient even after clear_grad(), which would make it replace the
    gradient.
    """
    if _find_gradient(parameter) is not None:
        parameter._unset_fake_empty()


def has_memory(tensor: Tensor) -> bool:
    """True if a tensor has memory for its elements, or has no elements.

    False for a buffer that was only declared, as a recurrent layer declares its `_dropout_state` for a GPU.
    """
    return 0 in tensor.shape or bool(tensor._is_initialized())


def grad_node(tensor: Tensor) -> Any:
    """The node of autograd's graph that made a tensor; None: there is none.

    Like `grad_fn`, which in Paddle 3.3 leaks a reference at each access: the graph, and everything that hooks
    hold, would live as long as the process.
    """
    node = tensor.grad_fn
    if node is not None and _grad_fn_leaks():
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(node))
    return node


@functools.cache
def _grad_fn_leaks() -> bool:
    with paddle.enable_grad():
        leaf = empty([1])
        leaf.stop_gradient = False
        node, other = (leaf * 2).grad_fn, object()
    return sys.getrefcount(node) > sys.getrefcount(other)


def is_sparse(gradient: Tensor) -> bool:
    result: bool = gradient.is_selected_rows()
    return result


def rows_of(gradient: Tensor) -> tuple[list[int], np.ndarray[Any, Any]]:
    selected = gradient.get_selected_rows()
    return list(selected.rows()), np.array(selected.get_tensor())


def set_rows(gradient: Tensor, rows: list[int], values: np.ndarray[Any, Any]) -> None:
    selected = gradient.get_selected_rows()
    selected.set_rows(rows)
    selected.get_tensor().set(values, core.CPUPlace())
    selected.sync_index()


def scale_rows(gradient: Tensor, factor: float) -> None:
    """Multiply the values of a sparse gradient. A factor of 0 makes them 0, even infinities and NaNs."""
    rows, values = rows_of(gradient)
    set_rows(gradient, rows, values * values.dtype.type(factor) if factor else np.zeros_like(values))


def give_rows(parameter: Tensor, rows: list[int], values: np.ndarray[Any, Any]) -> None:
    kind = core.VarDesc.VarType
    dtype = {"float32": kind.FP32, "float64": kind.FP64}[str(values.dtype)]
    gradient = core.eager.Tensor(
        dtype, list(parameter.shape), f"{parameter.name}@GRAD", kind.SELECTED_ROWS, True
    )
    gradient.get_selected_rows().set_height(parameter.shape[0])
    set_rows(gradient, rows, values)
    parameter.grad = gradient


def slots_of(layer: nn.Layer) -> list[dict[str, object]]:
    return [layer._parameters, layer._sub_layers]


def buffers_of(layer: nn.Layer) -> dict[str, Any]:
    found: dict[str, Any] = layer._buffers
    return found


def example_of_bytes(tensors: Sequence[Tensor]) -> Tensor | None:
    return tensors[0] if tensors and hasattr(tensors[0], "__dlpack_c_exchange_api__") else None


def parameters_of(layer: nn.Layer) -> dict[str, Any]:
    found: dict[str, Any] = layer._parameters
    return found


def convert(tensor: Tensor, dtype: Any) -> None:
    """Give a tensor another dtype; it stays the same object, as with Layer.to()."""
    converted = tensor.cast(dtype)  # held here, because get_tensor() does not keep it alive
    tensor.value().get_tensor()._share_data_with(converted.value().get_tensor())


def count_writes(tensors: Sequence[Tensor]) -> None:
    """Count up the version of each tensor, so that a backward that needs the old values raises."""
    for tensor in tensors:
        tensor._bump_inplace_version()


def has_max_norm(embedding: nn.Embedding) -> bool:
    return getattr(embedding, "_max_norm", None) is not None


def makes_sparse_gradients(embedding: nn.Embedding) -> bool:
    return bool(embedding._sparse)


def running_statistics_of(layer: nn.Layer) -> tuple[Tensor, Tensor] | None:
    """Mean and variance of batch normalisation, which are untrained parameters; None: the layer has none."""
    mean, variance = layer._parameters.get("_mean"), layer._parameters.get("_variance")
    if mean is None or variance is None or not (mean.stop_gradient and variance.stop_gradient):
        return None
    return mean, variance


def estimates_of(layer: nn.Layer) -> list[str]:
    """Names of the buffers that spectral_norm() writes: its power iteration, and the weight that results."""
    norms = [hook.name for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return [f"{norm}{which}" for norm in norms for which in ("_u", "_v", "")]


@dataclass(frozen=True)
class NormSettings:
    num_features: int
    momentum: float
    epsilon: float
    weight_attr: Any
    bias_attr: Any
    data_format: str
    use_global_stats: bool | None


def norm_settings_of(layer: nn.Layer) -> NormSettings:
    return NormSettings(
        layer._num_features,
        layer._momentum,
        layer._epsilon,
        layer._weight_attr,
        layer._bias_attr,
        layer._data_format,
        layer._use_global_stats,
    )


def use_global_stats(layer: nn.Layer, value: bool | None) -> None:
    layer._use_global_stats = value


def set_running_statistics(layer: nn.Layer, mean: Tensor, variance: Tensor) -> None:
    layer._mean, layer._variance = mean, variance


def ranks_of_wrapper(wrapper: nn.Layer) -> int:
    """How many ranks a paddle.DataParallel averages over; with 1 it does nothing."""
    return int(wrapper._strategy.nranks)


def wrap_run_backward(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function behind Tensor.backward() and paddle.autograd.backward(), for the whole process.

    Both look it up at each call. Nothing else calls it: paddle.grad() uses another function.
    """
    core.eager.run_backward = wrapper(core.eager.run_backward)


def over(array: np.ndarray[Any, np.dtype[np.uint8]], dtype: Any) -> Tensor:
    """A flat tensor in the memory of a flat array of bytes, which the tensor keeps alive.

    The array gets elements of the right width before Paddle sees it, because view() of Paddle 3.0 crashes (it
    divides by zero) if it has to make them wider.
    """
    width = int(empty([1], dtype).element_size())
    return view(from_dlpack(array.view(_OF_WIDTH[width])), dtype)


_OF_WIDTH = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def from_bytes(tensor: Tensor, dtype: Any) -> Tensor:
    return over(tensor.cpu().numpy(), dtype)


GLOO_LIMIT_S = 30.0
"""The fixed time-out of calls of Paddle's Gloo."""


def make_pair(
    number: int, address: str, port: int, *, keeps_store: bool, receives: bool
) -> Callable[[np.ndarray[Any, np.dtype[np.uint8]]], None]:
    """Connect to another process over Gloo, in one direction; blocks until both processes call it.

    Each pair has its own store, because a group stores the address of each rank under the rank's number
    alone, and another group in the same store would find it.

    Returns:
        A function that sends an array, or receives one that is no longer than the given array. It blocks,
        without the interpreter's lock, and raises RuntimeError after GLOO_LIMIT_S, and when the connection
        ends. The n-th calls of both processes pair, because a tag counts each process's calls on the group.
    """
    before = open_sockets()
    store = core.TCPStore(address, port, keeps_store, 0, int(GLOO_LIMIT_S))
    # Paddle's request has two packets, the second of which Linux would send only 40 ms later.
    send_at_once(connected_sockets(but=before))
    group = core.ProcessGroupGloo.create(store, int(receives), 2, number)
    if receives:
        return lambda array: group.recv(from_dlpack(array), 0, True)
    return lambda array: group.send(from_dlpack(array), 1, True)


def make_parameter(values: Tensor, name: str) -> Tensor:
    """Make a parameter with this name, under which an optimizer keeps its state."""
    made = framework.EagerParamBase(shape=list(values.shape), dtype=values.dtype, name=name)
    lay_into(made, values)
    return made


def lay_into(tensor: Tensor, values: Tensor) -> None:
    """Move a tensor to the memory of another one of its dtype; it stays the same object.

    Tensors that detach() has made from it move too, because they always have the same memory.
    """
    tensor.get_tensor()._share_data_with(values.get_tensor())


def lend_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter._copy_gradient_from(_view(gradient))


def end_loan(parameter: Tensor) -> None:
    _clear_gradient(parameter, False)


def same_dtype(one: paddle.dtype, other: paddle.dtype) -> bool:
    """True if two dtypes are equal; Paddle before 3.3 has several objects for one dtype."""
    return one is other or bool(one == other)


def empty_on(place: Any, shape: Sequence[int], dtype: Any) -> Tensor:
    """A tensor on this place; before Paddle 3.2, paddle.empty() cannot be given a place."""
    made = empty(shape, dtype)
    return made if same_place(made.place, place) else copy_to(made, place)


def read_rank_anew() -> None:
    """Make paddle.distributed read its launcher's variables again: get_rank() caches the rank."""
    parallel._global_parallel_env = None


def device_of_this_process() -> Any:
    """The place of the tensors that paddle.distributed moves: the device that paddle.set_device() named.

    If that is the CPU, although init_parallel_env() was called, the device that init_parallel_env() has
    chosen.
    """
    current = empty([1]).place
    if not current.is_cpu_place():
        return current
    chosen = ParallelEnv()
    if chosen.device_type:
        return core.CustomPlace(chosen.device_type, chosen.device_id)
    return core.CUDAPlace(chosen.device_id)


def copy_to(tensor: Tensor, place: Any) -> Tensor:
    return tensor._copy_to(place, True)


def same_place(one: Any, other: Any) -> bool:
    """True if two places are equal; in Paddle 3.0 no two place objects compare equal."""
    return str(one) == str(other)


def has_main_gradient(parameter: Tensor) -> bool:
    return getattr(parameter, "main_grad", None) is not None


def has_groups(optimizer: Any) -> bool:
    return isinstance(optimizer._parameter_list[0], dict)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, with their options by name; one group if it has no groups."""
    if has_groups(optimizer):
        return list(optimizer._param_groups)
    return [{"params": optimizer._parameter_list}]


def clip_gradients(
    optimizer: Any, group: Mapping[str, Any], pairs: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a group, and their gradients after the optimizer's clip, which may work in place."""
    clip = group["grad_clip"] if has_groups(optimizer) else optimizer._grad_clip
    return pairs if clip is None else list(clip(pairs))


def clips_gradients(optimizer: Any) -> bool:
    groups = groups_of(optimizer)
    return optimizer._grad_clip is not None or any(group.get("grad_clip") is not None for group in groups)


def take_precision(optimizer: Any, whole: Any) -> None:
    """Make an optimizer keep its learning rate in the same dtype as another optimizer."""
    optimizer._dtype = whole._dtype


def share_notes(optimizer: Any, whole: Any) -> None:
    """Make an optimizer share the variables through which a GradScaler and another optimizer communicate."""
    optimizer._auxiliary_vars = whole._auxiliary_vars


def note_updates(optimizer: Any, note: Callable[[], None]) -> None:
    """Call `note` after each update of parameters by an optimizer, whose kernels do not count up versions."""

    def noting(update: _Function) -> _Function:
        @functools.wraps(update)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            note()
            return result

        return cast(_Function, call)

    optimizer._append_optimize_op = noting(optimizer._append_optimize_op)
    optimizer._append_optimize_multi_tensor_op = noting(optimizer._append_optimize_multi_tensor_op)


def state_of(optimizer: Any) -> Iterator[tuple[str, str, Tensor]]:
    """An optimizer's state: the name of the parameter or its master weight, the name of the state, the
    tensor.
    """
    for kind, by_owner in optimizer._accumulators.items():
        for owner, value in by_owner.items():
            yield owner, kind, value


def state_of_one(optimizer: Any, owner: str) -> dict[str, Tensor]:
    """An optimizer's state of one parameter, or of its master weight, by Paddle's names."""
    return {kind: by_owner[owner] for kind, by_owner in optimizer._accumulators.items() if owner in by_owner}


def master_weights_of(optimizer: Any) -> dict[str, Tensor]:
    return dict(optimizer._master_weights)


def make_state(optimizer: Any, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Create the state that an optimizer would make at its first step, for parameters of one of its
    groups.
    """
    block = framework.default_main_program().global_block()
    with paddle.no_grad():
        if has_groups(optimizer):
            optimizer._create_accumulators(block, {**group, "params": list(parameters)})
        else:
            optimizer._create_accumulators(block, list(parameters))


def scheduler_of(optimizer: Any) -> Any:
    rate = optimizer._learning_rate
    return rate if isinstance(rate, paddle.optimizer.lr.LRScheduler) else None


def watch_steps(check: Callable[[Any], None]) -> None:
    """Call `check` with an optimizer before each step changes anything, from now on. Call it once per
    process.

    All steps of Paddle's optimizers, and minimize(), go through one method, except step(closure) of LBFGS.
    """
    apply = paddle.optimizer.Optimizer._apply_optimize

    @functools.wraps(apply)
    def checking(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        check(optimizer)
        return apply(optimizer, *args, **kwargs)

    paddle.optimizer.Optimizer._apply_optimize = checking


def optimizers() -> list[Any]:
    return [each for each in vars(paddle.optimizer).values() if isinstance(each, type)]


def loader_iterators() -> list[Any]:
    return [each for each in vars(dataloader_iter).values() if isinstance(each, type)]


def classes_with(method: str, classes: list[Any]) -> list[Any]:
    return [each for each in classes if method in vars(each)]


def generator_states(device: str | None) -> list[tuple[int, int, int, str]]:
    """The states of a device's generators: device, seed, offset, and the engine as text.

    Args:
        device: "cpu"; None: the device of `paddle.set_device`.
    """
    found = [state.__getstate__() for state in paddle.get_rng_state(device)]
    return [(number, seed, offset, bytes(engine).decode()) for number, seed, offset, engine in found]


def set_generator_states(device: str | None, states: Sequence[tuple[int, int, int, str]]) -> None:
    """Restore the states of a device's generators."""
    made = [core.GeneratorState.__new__(core.GeneratorState) for _ in states]
    for state, (number, seed, offset, engine) in zip(made, states):
        state.__setstate__((number, seed, offset, list(engine.encode())))
    paddle.set_rng_state(made, device)


def loaded_and_unused(optimizer: Any) -> dict[str, Any]:
    """The state tensors that an optimizer has loaded but not used yet; empty for other objects."""
    found: dict[str, Any] = getattr(optimizer, "_accumulators_holder", {})
    return found
