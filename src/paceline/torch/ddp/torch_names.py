"""What torch's class has and ours has under the same names: attributes, half-private hooks, copies, Join.

A name is here if code that people run (Accelerate, Lightning, Transformers, torch itself) uses
it, and it does what its caller wants to happen, with our own parts. What torch keeps in attributes is read
from what ours has, by properties. What torch's class has besides is hidden: it would run on state that is not
there. A test compares the names with those of an object of torch's class.
"""

# mypy: disable-error-code="override, misc"
# What torch's class keeps in attributes are properties here

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

# What torch's class does with nothing but the module, or for the sake of torch's own compiler.
_INHERITED = {
    "train",
    "_active_ddp_module",
    "_get_active_ddp_module",
    "_set_params_and_buffers_to_ignore_for_model",
}
# What torch's objects do not have, or not always: the wrapped module's is another thing.
_NOT_THE_MODULES = {"device_mesh"}

_Class = TypeVar("_Class", bound=type)


class TorchNames(TorchDDP):
    """The base of `DistributedDataParallel` that is there for other people's code.

    A base of torch's class only so that others recognise ours: nothing of torch's runs but what is listed
    in this file.

    Attributes:
        device_mesh: The argument; not there without it, as in torch.
        broadcast_bucket_size: Bytes that torch broadcasts at once when wrapping. For code that passes it on
            to torch's own functions; Paceline does not use it.
        use_side_stream_for_tensor_copies: Inputs are moved in the current stream.
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
    # before the backward passes of the present group; None: some were not counted
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

        For work that is to run between the two: a sparse exchange of one's own, for example. Until then
        `.grad` is this rank's own, or, with gradient_as_bucket_view, anything. Set it on every rank, before
        forward or after the backward before has been finalized; a forward that trains raises while one is
        not. Such backward passes are not timed (`_get_ddp_logging_data`). torch's since 2.15.
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
        """Whether `finalize_backward()` has to wait until backward has returned: always, where it is needed.

        torch's also allows it in a hook of the last gradient, in some backward passes.
        """
        return self._ends_by_hand

    def finalize_backward(self) -> None:
        """Average the gradients of the backward that has returned, where that is left to the caller.

        Collective: every rank calls it once after each synchronised backward. Raises what that backward would
        have raised.

        Raises:
            ConfigError: Backward passes end by themselves, or no backward is to be finalized.
        """
        if not self._ends_by_hand:
            raise ConfigError(
                "finalize_backward(): each backward finalizes itself.",
                expected="require_manual_backward_finalization = True, set before forward",
                got="False",
            )
        if self._backward_sync is not None:  # alone, a rank's own gradients are the means
            self._backward_sync.end_by_hand()

    @property
    def mixed_precision(self) -> Any:
        """The argument: torch's `_MixedPrecision`, or None."""
        return self._arguments["mixed_precision"]

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are broadcast in training, by this argument or by broadcast_buffers."""
        return self._config.broadcast_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """torch.compile cuts a model into graphs of so many bytes. It insists on 1 MiB at least."""
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
        """Names of parameters and buffers that are left alone; as in torch, those that are delayed, too."""
        delayed = self._arguments["delay_all_reduce_named_params"] or ()
        return self._tensors.ignored.union(name for name, _ in delayed)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the module has now, but for those that are left alone."""
        return dict(self._tensors.current_buffers())

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The same without names."""
        return list(self.named_module_buffers.values())

    # --- the module, through the wrapper ---

    @property
    def _errors(self) -> ErrorNote:
        note: ErrorNote = self.__dict__.setdefault("_error_note", ErrorNote())
        return note

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise refuse_replicas()

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped module has is reached through the wrapper: `ddp.config`, `ddp.generate()`.

        Names that begin with an underscore are not: libraries find out by them what a module is.
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
                return output  # it computed nothing that has a backward
            backward_sync.buffers.end_forward()
            # Not counted as a forward: it may be any method, called on some ranks only.
            backward_sync.begin_forward((), {}, is_syncing=self._syncs_backward, is_training=False)
            backward_sync.watch(output)
            return output

        return call

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's.

        Raises:
            TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
        """
        self._check_whole(self._tensors.all_parameters.values())
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's, but it also takes names without `module.`, saved without the wrapper.

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
        """Cut the arguments of a call along `dim`, one part for each device."""
        return scatter_call(inputs, kwargs, [as_device(device) for device in device_ids], self.dim)

    def to_kwargs(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_id: Any
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """Move the arguments of a call to a device; in lists of one, as torch does."""
        moved_inputs, moved_kwargs = moved((inputs, kwargs), as_device(device_id))
        return [moved_inputs], [moved_kwargs]

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join what replicas returned along `dim`, on one device."""
        return gather(outputs, as_device(output_device), self.dim)

    # --- what torch keeps its state in ---

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
        """As static_graph=True. Before the first forward that trains, on every rank."""
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
            self._backward_sync.state.status.static_graph = True  # the next backward tells those who have not

    def _check_reducer_finalized(self) -> None:
        state = None if self._backward_sync is None else self._backward_sync.state
        if state is not None and state.phase is not IDLE:
            raise ReplicaError(
                "A backward has begun to average gradients and has not ended.",
                likely="it ended in an exception that was caught",
                hint="run another forward: it gives the backward up, on all ranks",
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing to do: outputs are not copied here, whatever `val`."""

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of a module, or (name, parameter) pairs, but for those to be left alone.

        With names too; torch's forgets about those to be left alone then.
        """
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):  # as _set_params_and_buffers_to_ignore_for_model notes
                yield (name, parameter) if named_params else parameter

    def _remove_autograd_hooks(self) -> None:
        """Average no gradients any more: the model can be wrapped anew while this wrapper is still held.

        A backward of what this wrapper has computed already leaves each rank its own gradients. The next
        forward in training mode raises ConfigError.
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
        """Time one backward in so many, after the first ten, for `_get_ddp_logging_data`. Without it: 100.

        Raises:
            ConfigError: It is less than 1.
        """
        check = Arguments("_set_ddp_runtime_logging_sample_rate")
        self._sample_rate = sample_rate = check.whole("sample_rate", sample_rate, least=1)
        if self._backward_sync is not None:
            self._backward_sync.autograd.times.use_rate(sample_rate, self._backward_sync.good_backwards)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about the wrapper and times of its steps, under the names and in the units of torch.

        Strings and integers. Times are in nanoseconds, of this rank: `avg_forward_compute_time`,
        `avg_backward_compute_time`, `avg_backward_comm_time` (from the first bucket that is complete until
        all means, and buffers, are in place) and `avg_backward_compute_comm_overlap_time`; without `avg_`
        those of the last backward that was timed, whose number is `iteration`. Timed are the second to the
        tenth good backward, and one in a hundred after that, with parameters on the CPU and more than one
        rank; before, there are no such keys. `can_set_static_graph` is 1 if this rank has used the same
        parameters in all backward passes so far. Once the wrapper, or a backward of its outputs, has raised
        an error of ours, `has_error` is 1 and `error` the last one, also if it was caught and training went
        on.

        Example:
            >>> ddp._get_ddp_logging_data()["bucket_sizes"]  # bytes of gradients in each bucket
            '1048576, 12582912'
        """
        return logging_data(self)

    # --- half-private hooks ---

    @noting_errors
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Torch's names for its hooks written in C++: ALLREDUCE and FP16_COMPRESS."""
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
        """Let `hook` keep the buffers in step, instead of what `buffers` and broadcast_buffers say.

        Args:
            state: Handed to the hook, as it is.
            hook: Called as `hook(state, {name: buffer})` on every rank, in each forward whose backward will
                synchronise; changes the buffers. May return a list of futures, which the end of that
                backward waits for.
            comm_hook_location: torch's `_BufferCommHookLocation`: before forward, or (None) after it.

        Raises:
            TypeError: It is not callable.
        """
        chosen = BufferHook(state, hook, comm_hook_location)
        self._refuse_with_local_sgd("a buffer hook keeps buffers in step in every backward")
        self._connected()
        if self._backward_sync is None:
            self._backward_sync = self._begin_sync()
        self._backward_sync.buffers.hook = chosen

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Let an optimizer of torch step each parameter as soon as its bucket is averaged.

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
        """Whether buckets have their final order: after the first backward."""
        return self._backward_sync is not None and self._backward_sync.planning.is_order_final

    # --- torch's Join ---

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may make different numbers of steps, as torch's; see also finish().

        A rank that leaves the context takes part in the others' backward passes until all ranks have left it.
        Then all ranks have the model of a rank that went on longest, and `.grad` is restored. Make one
        forward for each backward.

        Args:
            divide_by_initial_world_size: Divide sums of gradients by the number of all ranks; False: by the
                number of ranks that still have data.
            enable: False: the context has no effect.
            throw_on_early_termination: Raise RuntimeError on all ranks as soon as one has no more data.

        Raises:
            ConfigError: The ranks are connected by a `paceline.Group`; torch's Join needs a process group.
        """
        divide, is_on, throws = self._check_join(
            "torch's Join", divide_by_initial_world_size, enable, throw_on_early_termination
        )
        return NamingJoin(self, is_on, throws, divide)

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """What torch's `Join` runs when this rank has no more data; part of its `Joinable` protocol."""
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
        """Where `Join` keeps its flags: the device of the model's parameters."""
        return self._tensors.trainable[0].device

    @property
    def join_process_group(self) -> Any:
        """The group over which `Join` asks who has joined."""
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

        Collective over the new group, between two steps: every rank of it makes this call, one that comes
        anew too (wrap its model over a group of its own first). A rank that is not in it returns at once, and
        takes no part in synchronised backward passes until it is. A backward that an exception has broken
        off, as when a rank died in it, is forgotten. Communication hooks stay, with the group that their
        state holds.

        Nothing is broadcast. The ranks compare how many good backward passes they have behind them; where
        that differs, their weights must be equal, bit by bit: give them to a rank that comes anew before this
        call. Gradients that are left from before are dropped then, as not every rank has them.

        Raises:
            ModelMismatchError: The ranks' models differ, or their weights; names the first difference, or
                the ranks and their numbers of good backward passes.
        """
        self._refuse_with_local_sgd("_update_process_group() goes on with replicas that are equal")
        regroup(self, new_process_group)


class TorchReducer:
    def __init__(self, ddp: TorchNames) -> None:
        self._ddp = ddp

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward synchronises, though its forward was in no_sync(); Accelerate calls it."""
        backward_sync = self._ddp._backward_sync
        if backward_sync is not None:
            backward_sync.sync_next_backward()
            backward_sync.watch(list(outputs))

    def prepare_for_forward(self) -> None: ...

    def _rebuild_buckets(self) -> bool:
        """Buckets are planned anew at the end of the first backward."""
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
    """Let `cls` inherit from torch's class only what is listed above."""
    hide_inherited(cls, TorchDDP, _INHERITED)
    return cls
