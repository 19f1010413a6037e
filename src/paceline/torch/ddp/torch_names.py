"""The names that Paceline's class has in common with torch's: attributes, half-private hooks, copies, Join.

A name is here if existing code (Accelerate, Lightning, Transformers, torch itself) uses it. It has the effect
that its caller expects, implemented by Paceline's own parts. torch's attributes are properties, which read
Paceline's state. All other names of torch's class are hidden, because they would run on state that does not
exist. A test compares the names with those of an object of torch's class.
"""

# mypy: disable-error-code="override, misc"
# Attributes of torch's class are properties here

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils import _pytree as pytree

from paceline.arguments import Arguments
from paceline.ddp.wrapped_model import hide_inherited
from paceline.ddp.wrapper_arguments import MIB
from paceline.errors import ConfigError, ReplicaError
from paceline.reducer.backward.state import IDLE, RUNNING
from paceline.reducer.local_sgd.outer_sync import OuterSync, Warmup
from paceline.sharding.partial_steps import partial_steps
from paceline.sharding.shared_parameters import written
from paceline.torch.backward.autograd import ErrorNote
from paceline.torch.communicator.comm_hook import BufferHook
from paceline.torch.data_parallel.scatter import gather, scatter_call
from paceline.torch.ddp.join import DDPJoinHook, Joining, NamingJoin
from paceline.torch.ddp.logging_data import TorchLogger, logging_data, noting_errors
from paceline.torch.ddp.pickling import copy_of, restore, state_of
from paceline.torch.ddp.regrouping import regroup
from paceline.torch.ddp.wrapped_twice import AskedWhenWrapped, refuse_replicas
from paceline.torch.model.arguments import as_device
from paceline.torch.sharding.shared_storage import SharedStorage

if TYPE_CHECKING:
    from paceline.reducer.comm_hooks import CommHook
    from paceline.torch.backward.autograd import TorchBackwardSync
    from paceline.torch.communicator.find_peers import Peers
    from paceline.torch.model.config import DDPConfig
    from paceline.torch.model.parameters import ManagedTensors

# Names of torch's class that need only the module, or that torch's compiler needs.
_INHERITED = {
    "train",
    "_active_ddp_module",
    "_get_active_ddp_module",
    "_set_params_and_buffers_to_ignore_for_model",
}
# Names that torch's objects have only sometimes. The same name on the wrapped module is something else.
_NOT_THE_MODULES = {"device_mesh"}

_Class = TypeVar("_Class", bound=type)


class TorchNames(TorchDDP):
    """A base of `DistributedDataParallel` with the names that existing code uses.

    It derives from torch's class only so that existing code recognises Paceline's class. Nothing of torch's
    class runs except the names listed in this file.

    Attributes:
        device_mesh: The argument; as in torch, missing without it.
        broadcast_bucket_size: Bytes that torch broadcasts at once when wrapping. For code that passes it on
            to torch's own functions; Paceline does not use it.
        use_side_stream_for_tensor_copies: False: inputs are moved in the current stream.
    """

    module: nn.Module
    process_group: Any
    _arguments: dict[str, Any]
    _config: DDPConfig
    _tensors: ManagedTensors
    _backward_sync: TorchBackwardSync | None
    _outer_sync: OuterSync[torch.Tensor] | None
    _warmup: Warmup | None
    _peers: Peers | None  # None: a copy that does not know them yet
    _is_connected: bool  # False: a copy that has not been trained yet
    _join_config: Any
    _joining: Joining | None
    _has_joined = False
    _comm_hook: CommHook | None
    _builtin_hook: str | None = None  # what torch calls the hook, if it is one of those in C++
    _on_drop: weakref.finalize[Any, Any] | None
    # before the backwards of the current group; None: some were not counted
    _good_backwards: int | None = 0
    _are_hooks_removed = False
    _ends_by_hand = False
    _storage: SharedStorage | None
    _sample_rate: int | None = None
    _ddp_params_and_buffers_to_ignore = AskedWhenWrapped()

    if TYPE_CHECKING:

        def _check_model(self, peers: Peers) -> None: ...

        def _begin_sync(self, *, is_first: bool = True) -> TorchBackwardSync: ...

        def _connect(self, peers: Peers, *, is_first: bool = True) -> None: ...

        def _connected(self) -> Peers: ...

        def _check_join(
            self, where: str, divide: Any, enable: Any, throws: Any
        ) -> tuple[bool, bool, bool]: ...

        def _refuse_with_local_sgd(self, what: str) -> None: ...

    # --- attributes ---

    broadcast_bucket_size: ClassVar[int] = 250 * MIB
    use_side_stream_for_tensor_copies: ClassVar[bool] = False

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self._tensors.trainable[0].device

    @property
    def device_type(self) -> str:
        """The device type of the parameters."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the parameters are on several devices."""
        return len({p.device for p in self._tensors.all_parameters.values()}) > 1

    @property
    def dim(self) -> int:
        """The argument."""
        return int(self._arguments["dim"])

    @property
    def find_unused_parameters(self) -> bool:
        """The argument."""
        return bool(self._arguments["find_unused_parameters"])

    @property
    def skip_all_reduce_unused_params(self) -> bool:
        """The argument."""
        return self._config.skip_unused

    @property
    def batched_grad_copy(self) -> bool:
        """The argument."""
        return bool(self._arguments["batched_grad_copy"])

    @property
    def lazy_bucket_allocation(self) -> bool:
        """The argument."""
        return bool(self._arguments["lazy_bucket_allocation"])

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the gradients of a synchronised backward are means only after `finalize_backward()`.

        For work that must run between the two, such as a sparse exchange of the program. Until then `.grad`
        is this rank's own gradient; with gradient_as_bucket_view it is undefined. Set it on every rank,
        before forward, or after the previous backward has been finalized: a forward that trains raises if a
        backward has not been finalized. Such backwards are not timed (`_get_ddp_logging_data`). torch has
        this since 2.15.
        """
        return self._ends_by_hand

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        flag = Arguments("DistributedDataParallel").flag("require_manual_backward_finalization", required)
        if self._backward_sync is not None:
            self._backward_sync.use_ends_by_hand(flag)
        self._ends_by_hand = flag

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward()` must wait until backward has returned: always, if it is required.

        In some backwards, torch's class also allows it in a hook of the last gradient.
        """
        return self._ends_by_hand

    def finalize_backward(self) -> None:
        """Average the gradients of the backward that has returned (`require_manual_backward_finalization`).

        Collective: every rank calls it once after each synchronised backward. Raises the errors that the
        backward would have raised.

        Raises:
            ConfigError: Backwards finalize themselves, or there is no backward to finalize.
        """
        if not self._ends_by_hand:
            raise ConfigError(
                "finalize_backward(): each backward finalizes itself.",
                expected="require_manual_backward_finalization = True, set before forward",
                got="False",
            )
        if self._backward_sync is not None:  # a single rank's own gradients are the means
            self._backward_sync.end_by_hand()

    @property
    def mixed_precision(self) -> Any:
        """The argument: torch's `_MixedPrecision`, or None."""
        return self._arguments["mixed_precision"]

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are broadcast in training, by the argument of this name or by broadcast_buffers."""
        return self._config.broadcast_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which torch.compile splits a model into graphs; it requires at least 1 MiB."""
        return max(self._config.bucket_cap_bytes, MIB)

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes in bucket_cap_mb_list, in bytes; without it, []."""
        return list(self._config.bucket_caps_bytes)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether neither bucket_cap_mb nor bucket_cap_mb_list was passed."""
        return self._arguments["bucket_cap_mb"] is None and not self._config.bucket_caps_bytes

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of ignored parameters and buffers; as in torch, delayed parameters are included."""
        delayed = self._arguments["delay_all_reduce_named_params"] or ()
        return self._tensors.ignored.union(name for name, _ in delayed)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the module has now, except ignored ones."""
        return dict(self._tensors.current_buffers())

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers in `named_module_buffers`, without names."""
        return list(self.named_module_buffers.values())

    # --- the module, through the wrapper ---

    @property
    def _errors(self) -> ErrorNote:
        note: ErrorNote = self.__dict__.setdefault("_error_note", ErrorNote())
        return note

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise refuse_replicas()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module that the wrapper does not have: `ddp.config`, `ddp.generate()`.

        Names with a leading underscore are not forwarded: libraries detect by them what a module is.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or name in _NOT_THE_MODULES:
                raise
        value = getattr(module, name)
        if isinstance(value, MethodType) and value.__self__ is module:
            return self._with_sync(value)
        return value

    def _with_sync(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            backward_sync = self._backward_sync if torch.is_grad_enabled() else None
            if backward_sync is None or not self._tensors.are_trained():
                return method(*args, **kwargs)
            graph_before = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            backward_sync.begin_untrained_forward()
            output = method(*args, **kwargs)
            if torch.autograd._get_sequence_nr() == graph_before:  # type: ignore[attr-defined]
                return output  # the method computed nothing that has a backward
            backward_sync.buffers.end_forward()
            # Not counted as a forward: it may be any method, called on some ranks only.
            backward_sync.begin_forward((), {}, is_syncing=self._syncs_backward, is_training=False)
            backward_sync.watch(output)
            return output

        return call

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch.

        Raises:
            TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
        """
        self._check_whole(self._tensors.all_parameters.values())
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in torch, but it also takes names without `module.`, saved without the wrapper.

        Collective with share_parameters=True: see writing(). assign=True would replace shared parameters.
        """
        if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
            owner, hint = "load_state_dict", "torch.load(path, weights_only=True) reads one from a file"
            raise Arguments(owner).refuse("state_dict", state_dict, "a state_dict", hint, is_type=True)
        flag = Arguments("load_state_dict").flag
        strict, assign = flag("strict", strict), flag("assign", assign)
        if assign and self._storage is not None:
            raise ConfigError(
                "load_state_dict: assign=True would give this rank parameters of its own.",
                seen="share_parameters=True: all ranks of the host share them",
                hint="leave assign out; or load before wrapping",
            )
        with written(self._storage):
            result = self._load(state_dict, strict, assign)
        partial_steps.forget(self._tensors.all_parameters.values())
        return result

    def _load(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        own = self.module.state_dict().keys()
        num_bare = sum(key in own for key in state_dict)
        num_wrapped = sum(key.startswith("module.") and key[len("module.") :] in own for key in state_dict)
        if num_bare > num_wrapped:
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[Any]
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Split the arguments of a call along `dim`, one part for each device."""
        return scatter_call(inputs, kwargs, [as_device(device) for device in device_ids], self.dim)

    def to_kwargs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_id: Any
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Move the arguments of a call to a device; returns lists of one item, as torch does."""
        moved_inputs, moved_kwargs = moved((inputs, kwargs), as_device(device_id))
        return [moved_inputs], [moved_kwargs]

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the outputs of replicas along `dim`, on one device."""
        return gather(outputs, as_device(output_device), self.dim)

    # --- torch's reducer and logger ---

    @property
    def reducer(self) -> TorchReducer:
        """The members of torch's reducer that libraries call."""
        return TorchReducer(self)

    @property
    def logger(self) -> TorchLogger:
        """The members of torch's logger that libraries call."""
        return TorchLogger(logging_data(self))

    @noting_errors
    def _set_static_graph(self) -> None:
        """Set static_graph=True. Call it before the first forward that trains, on every rank."""
        if self.static_graph:
            warnings.warn("static_graph is True already, no need to set it again.", stacklevel=2)
            return
        backward_sync = self._backward_sync
        forwards = 0 if backward_sync is None else backward_sync.state.status.forwards
        if backward_sync is not None and (
            backward_sync.good_backwards or forwards or backward_sync.state.phase >= RUNNING
        ):
            raise ConfigError(
                "_set_static_graph() should be called before training loop starts, and after wrapping.",
                where=backward_sync.who,
                seen=f"{backward_sync.good_backwards} good synchronised backwards, {forwards} forwards "
                "since the last one",
                hint="pass static_graph=True when wrapping, or call it right after that, on every rank",
            )
        self._config = replace(self._config, allow_unused=True, static_graph=True)
        if self._backward_sync is not None:
            self._backward_sync.use_config(self._config)
            # In the next backward, ranks that have not called this are reported.
            self._backward_sync.state.status.static_graph = True

    def _check_reducer_finalized(self) -> None:
        state = None if self._backward_sync is None else self._backward_sync.state
        if state is not None and state.phase is not IDLE:
            raise ReplicaError(
                "A backward has begun to average gradients and has not ended.",
                likely="it ended in an exception that was caught",
                hint="run another forward: it discards the backward, on all ranks",
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to do: outputs are not copied here, whatever `val`."""

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module, or (name, parameter) pairs, except ignored ones.

        With names, torch's function does not leave out the ignored ones.
        """
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):  # set by _set_params_and_buffers_to_ignore_for_model
                yield (name, parameter) if named_params else parameter

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients, so that the model can be wrapped again while this wrapper still exists.

        After this, a backward of outputs of this wrapper leaves each rank its own gradients. The next forward
        in training mode raises ConfigError.
        """
        backward_sync, self._backward_sync = self._backward_sync, None
        self._outer_sync = self._warmup = None
        if backward_sync is not None:
            backward_sync.graphs.close()
            backward_sync.end_turn()
        if self._on_drop is not None:
            self._on_drop.detach()
        self._are_hooks_removed, self._is_connected = True, False

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Time one backward in `sample_rate`, after the first ten, for `_get_ddp_logging_data`. Default: 100.

        Raises:
            ConfigError: The rate is less than 1.
        """
        check = Arguments("_set_ddp_runtime_logging_sample_rate")
        self._sample_rate = sample_rate = check.whole("sample_rate", sample_rate, least=1)
        if self._backward_sync is not None:
            self._backward_sync.autograd.times.use_rate(sample_rate, self._backward_sync.good_backwards)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about the wrapper and times of its steps, under the names and in the units of torch.

        Values are strings and integers. Times are those of this rank, in nanoseconds:
        `avg_forward_compute_time`, `avg_backward_compute_time`, `avg_backward_comm_time` (from the first
        complete bucket until all means and buffers are in place) and
        `avg_backward_compute_comm_overlap_time`. The same names without `avg_` are the times of the last
        timed backward, whose number is `iteration`. The second to the tenth good backward are timed, and then
        one in a hundred, with parameters on the CPU and more than one rank; before the first timed backward
        these keys are missing. `can_set_static_graph` is 1 if this rank has used the same parameters in all
        backwards so far. Once the wrapper, or a backward of its outputs, has raised a Paceline error,
        `has_error` is 1 and `error` is the last error, even if it was caught and training continued.

        Example:
            >>> ddp._get_ddp_logging_data()["bucket_sizes"]  # bytes of gradients in each bucket
            '1048576, 12582912'
        """
        return logging_data(self)

    # --- half-private hooks ---

    @noting_errors
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register one of torch's hooks that torch has in C++: ALLREDUCE or FP16_COMPRESS."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        hook = hooks.get(comm_hook_type) if isinstance(comm_hook_type, BuiltinCommHookType) else None
        if hook is None:
            check, hint = Arguments("_register_builtin_comm_hook"), "dist.BuiltinCommHookType.FP16_COMPRESS"
            raise check.refuse("comm_hook_type", comm_hook_type, "a BuiltinCommHookType", hint, is_type=True)
        self.register_comm_hook(self._connected().process_group, hook)
        self._builtin_hook = str(comm_hook_type)

    @noting_errors
    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Let `hook` synchronise the buffers, instead of the arguments `buffers` and broadcast_buffers.

        Args:
            state: Passed to the hook unchanged.
            hook: Called as `hook(state, {name: buffer})` on every rank, in each forward whose backward will
                synchronise; changes the buffers. May return a list of futures, which the end of that
                backward waits for.
            comm_hook_location: torch's `_BufferCommHookLocation`: before forward, or (None) after it.

        Raises:
            TypeError: The hook is not callable.
        """
        chosen = BufferHook(state, hook, comm_hook_location)
        self._refuse_with_local_sgd("a buffer hook keeps buffers in step in every backward")
        self._connected()
        if self._backward_sync is None:
            self._backward_sync = self._begin_sync()
        self._backward_sync.buffers.hook = chosen

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Let a torch optimizer step each parameter as soon as its bucket is averaged.

        Raises:
            RuntimeError: torch has no functional form of this optimizer.
        """
        if not isinstance(optim, type) or not issubclass(optim, torch.optim.Optimizer):
            check, hint = Arguments("_register_fused_optim"), "torch.optim.Adam, without a call"
            raise check.refuse("optim", optim, "the class of an optimizer", hint, is_type=True)
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise ConfigError(
                f"{optim.__name__} does not support overlapped DDP.", hint="step it after backward()"
            ) from error

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets have their final order, which they get after the first backward."""
        return self._backward_sync is not None and self._backward_sync.current_plan.is_order_final

    # --- torch's Join ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may make different numbers of steps, as in torch; see also finish().

        A rank that leaves the context takes part in the others' backwards until all ranks have left it. Then
        all ranks get the model of a rank that trained longest, and `.grad` is restored. Run one forward for
        each backward.

        Args:
            divide_by_initial_world_size: Divide sums of gradients by the number of all ranks; False: by the
                number of ranks that still have data.
            enable: False: the context has no effect.
            throw_on_early_termination: Raise RuntimeError on all ranks as soon as one of them runs out of
                data.

        Raises:
            ConfigError: The ranks are connected by a `paceline.Group`; torch's Join needs a process group.
        """
        divide, is_on, throws = self._check_join(
            "torch's Join", divide_by_initial_world_size, enable, throw_on_early_termination
        )
        return NamingJoin(self, is_on, throws, divide)

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """The hook that torch's `Join` runs when this rank has no more data, for its `Joinable` protocol."""
        self._refuse_with_local_sgd(
            "torch's Join counts the backward passes of all ranks; finish() and iterate() don't"
        )
        self._refuse_scattering("in torch's Join a rank without data needs the gradients of another")
        self._has_joined = True
        divide = bool(kwargs.get("divide_by_initial_world_size", True))
        peers = self._connected()
        self._joining = Joining(self._backward_sync, peers, self.join_device)
        return DDPJoinHook(self._joining, divide, self._leave_join)

    def _leave_join(self) -> None:
        self._joining = self._join_config = None

    @property
    def join_device(self) -> torch.device:
        """The device of the model's parameters, on which `Join` keeps its flags."""
        return self._tensors.trainable[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group over which `Join` counts the ranks that still have data."""
        return self.process_group

    # --- copies; see `pickling` ---

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_of(self, memo)

    # --- other ranks ---

    def _update_process_group(self, new_process_group: Any) -> None:
        """Train with the ranks of another process group from now on.

        Collective over the new group, between two steps: every rank of the group makes this call, including a
        new rank (which wraps its model over a group of its own first). A rank that is not in the group
        returns at once, and takes no part in synchronised backwards until it is in a group. A backward that
        an exception has interrupted, as when a rank died in it, is discarded. Communication hooks stay, with
        the group that their state holds.

        Nothing is broadcast. The ranks compare their numbers of good backwards. If these differ, their
        weights must be equal, bit by bit: copy them to a new rank before this call. Gradients from before are
        then dropped, because not every rank has them.

        Raises:
            ModelMismatchError: The ranks' models or weights differ; names the first difference, or the ranks
                and their numbers of good backwards.
        """
        self._refuse_with_local_sgd("_update_process_group() goes on with replicas that are equal")
        regroup(self, new_process_group)


class TorchReducer:
    def __init__(self, ddp: TorchNames) -> None:
        self._ddp = ddp

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Synchronise the next backward, even if its forward was in no_sync(); Accelerate calls this."""
        backward_sync = self._ddp._backward_sync
        if backward_sync is not None:
            backward_sync.sync_next_backward()
            backward_sync.watch(list(outputs))

    def prepare_for_forward(self) -> None: ...

    def _rebuild_buckets(self) -> bool:
        """Nothing to do: buckets are planned again at the end of the first backward."""
        return False

    def _ddp_graph_static(self) -> bool:
        backward_sync = self._ddp._backward_sync
        return backward_sync is None or backward_sync.is_graph_static

    def _set_static_graph(self) -> None:
        self._ddp._set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self._ddp._remove_autograd_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._ddp._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _check_reducer_finalized(self) -> None:
        self._ddp._check_reducer_finalized()


def moved(inputs: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda item: item.to(device) if isinstance(item, torch.Tensor) else item, inputs)


def hide_torchs_own(cls: _Class) -> _Class:
    """Let `cls` inherit only the names listed above from torch's class."""
    hide_inherited(cls, TorchDDP, _INHERITED)
    return cls
