"""What libraries call on a torch DDP beyond its public methods, under torch's names.

The one idea: a name is here if code that people run (Accelerate, Lightning, Transformers, torch itself) uses
it, and it does what its caller wants to happen, with our own parts. What torch's class has besides is hidden:
it would run on state that is not there.
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
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils import _pytree as pytree

from paceline.arguments import Arguments
from paceline.errors import ConfigError, ReplicaError
from paceline.torch.data_parallel.scatter import gather, scatter_call
from paceline.torch.ddp.attributes import TorchAttributes
from paceline.torch.ddp.logging_data import TorchLogger, logging_data, noting_errors
from paceline.torch.ddp.wrapped_twice import AskedWhenWrapped, refuse_replicas
from paceline.torch.model.arguments import as_device
from paceline.torch.passes.passes import ErrorNote

if TYPE_CHECKING:
    from paceline.reducer.comm_hooks import CommHook
    from paceline.torch.ddp.join import Joining
    from paceline.torch.link.peers import Peers
    from paceline.torch.passes.passes import GradientPasses

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


class TorchNames(TorchAttributes):
    """The part of `DistributedDataParallel` that is there for other people's code."""

    process_group: Any
    _passes: GradientPasses | None
    _peers: Peers | None
    _joining: Joining | None
    _has_joined: bool
    _comm_hook: CommHook | None
    _builtin_hook: str | None
    _on_drop: weakref.finalize[Any, Any] | None
    _is_connected: bool
    _are_hooks_removed = False
    _sample_rate: int | None = None
    _ddp_params_and_buffers_to_ignore = AskedWhenWrapped()

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
            return self._with_passes(value)
        return value

    def _with_passes(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the wrapped module that may run forward: a backward of its result synchronises."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            passes = self._passes if torch.is_grad_enabled() else None
            if passes is None or not self._tensors.are_trained():
                return method(*args, **kwargs)
            graph_before = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            output = method(*args, **kwargs)
            if torch.autograd._get_sequence_nr() == graph_before:  # type: ignore[attr-defined]
                return output  # it computed nothing that has a backward
            # Not counted as a forward: it may be any method, called on some ranks only.
            passes.begin_forward(is_syncing=self.require_backward_grad_sync, is_training=False)
            passes.watch(output)
            return output

        return call

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's, but weights that were saved without the wrapper, and its `module.`, will do as well."""
        if not isinstance(state_dict, Mapping):
            owner, hint = "load_state_dict", "torch.load(path, weights_only=True) reads one from a file"
            raise Arguments(owner).refuse("state_dict", state_dict, "a state_dict", hint, is_type=True)
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
        """As static_graph=True. Before the first forward that trains, on every rank.

        Raises:
            ConfigError: The model has been trained already.
        """
        if self.static_graph:
            warnings.warn("static_graph is True already, no need to set it again.", stacklevel=2)
            return
        passes = self._passes
        forwards = 0 if passes is None else passes.state.status.forwards
        if passes is not None and (passes.good_passes or forwards or passes.state.is_armed):
            raise ConfigError(
                "_set_static_graph() should be called before training loop starts, and after wrapping.",
                where=passes.who,
                seen=f"{passes.good_passes} good synchronised backwards, {forwards} forwards "
                "since the last one",
                hint="pass static_graph=True when wrapping, or call it right after that, on every rank",
            )
        self._config = replace(self._config, allow_unused=True, static_graph=True)
        if self._passes is not None:
            self._passes.use_config(self._config)
            self._passes.state.status.static_graph = True  # the next pass tells those who have not

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward has begun to average gradients and not ended."""
        state = None if self._passes is None else self._passes.state
        if state is not None and (state.is_armed or state.is_interrupted):
            raise ReplicaError(
                "A backward has begun to average gradients and has not ended.",
                likely="it ended in an exception that was caught",
                hint="run another forward: it gives the pass up, on all ranks",
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
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.graphs.close()
        if self._on_drop is not None:
            self._on_drop.detach()
        self._are_hooks_removed, self._is_connected = True, False

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Time one pass in so many, after the first ten, for `_get_ddp_logging_data`. Without it: 100.

        Raises:
            ConfigError: It is less than 1.
        """
        if sample_rate < 1:
            raise ConfigError(
                "_set_ddp_runtime_logging_sample_rate: the sample rate should be 1 or more.",
                got=repr(sample_rate),
            )
        self._sample_rate = sample_rate
        if self._passes is not None:
            self._passes.autograd.times.use_rate(sample_rate, self._passes.good_passes)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about the wrapper and times of its passes, under the names and in the units of torch.

        Strings and integers. Times are in nanoseconds, of this rank: `avg_forward_compute_time`,
        `avg_backward_compute_time`, `avg_backward_comm_time` (from the first bucket that is complete until
        all means, and buffers, are in place) and `avg_backward_compute_comm_overlap_time`; without `avg_`
        those of the last pass that was timed, whose number is `iteration`. Timed are the second to the tenth
        good pass, and one in a hundred after that, with parameters on the CPU and more than one rank;
        before, there are no such keys. `can_set_static_graph` is 1 if this rank has used the same parameters
        in all passes so far. Once the wrapper, or a backward of its outputs, has raised an error of ours,
        `has_error` is 1 and `error` the last one, also if it was caught and training went on.

        Example:
            >>> ddp._get_ddp_logging_data()["bucket_sizes"]  # bytes of gradients in each bucket
            '1048576, 12582912'
        """
        return logging_data(self)


class TorchReducer:
    """The members of torch's reducer that libraries call."""

    def __init__(self, ddp: TorchNames) -> None:
        self._ddp = ddp

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward synchronises, though its forward was in no_sync() (Accelerate does that)."""
        passes = self._ddp._passes
        if passes is not None:
            passes.state.is_syncing = True
            passes.watch(list(outputs))

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def _rebuild_buckets(self) -> bool:
        """Buckets are planned anew at the end of the first backward; never here."""
        return False

    def _ddp_graph_static(self) -> bool:
        """Whether this rank has used the same parameters in all passes so far."""
        passes = self._ddp._passes
        return passes is None or passes.is_graph_static

    def _set_static_graph(self) -> None:
        self._ddp._set_static_graph()

    def _remove_autograd_hooks(self) -> None:
        self._ddp._remove_autograd_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._ddp._set_ddp_runtime_logging_sample_rate(sample_rate)

    def _check_reducer_finalized(self) -> None:
        self._ddp._check_reducer_finalized()


def moved(inputs: Any, device: torch.device) -> Any:
    """All tensors of a nested structure, on a device."""
    return pytree.tree_map(lambda item: item.to(device) if isinstance(item, torch.Tensor) else item, inputs)


class _Hidden:
    """A member of torch's class that ours does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")


def hide_torchs_own(cls: _Class) -> _Class:
    """Let `cls` inherit from torch's class only what is listed above. A class decorator."""
    for name in vars(TorchDDP):
        is_own = getattr(cls, name, None) is not getattr(TorchDDP, name)
        if not is_own and name not in _INHERITED and not name.startswith("__"):
            setattr(cls, name, _Hidden(name))
    return cls
