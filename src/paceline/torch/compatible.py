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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils import _pytree as pytree

from paceline.arguments import Arguments
from paceline.errors import ConfigError, ReplicaError
from paceline.reducer.arguments import MIB
from paceline.torch.arguments import as_device
from paceline.torch.scatter import gather, scatter_call
from paceline.torch.wrapped_twice import AskedWhenWrapped, refuse_replicas

if TYPE_CHECKING:
    from paceline.torch.config import DDPConfig
    from paceline.torch.parameters import ManagedTensors
    from paceline.torch.passes import GradientPasses
    from paceline.torch.uneven import Joining

# What torch's class does with nothing but the module, or for the sake of torch's own compiler.
_INHERITED = {"train", "_active_ddp_module", "_get_active_ddp_module"}

_Class = TypeVar("_Class", bound=type)


class TorchNames(TorchDDP):
    """The part of `DistributedDataParallel` that is there for other people's code."""

    module: nn.Module
    process_group: Any
    _config: DDPConfig
    _arguments: dict[str, Any]
    _tensors: ManagedTensors
    _passes: GradientPasses | None
    _joining: Joining | None
    _ddp_params_and_buffers_to_ignore = AskedWhenWrapped()

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
            if module is None or name.startswith("_"):
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
    def device_ids(self) -> list[Any] | None:
        """The argument; None where it was empty."""
        ids = self._arguments["device_ids"]
        return list(ids) if ids else None

    @property
    def output_device(self) -> Any:
        """The argument; without it, the device of device_ids."""
        given = self._arguments["output_device"]
        return self.device_ids[0] if given is None and self.device_ids else given

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return self._tensors.trainable[0].device

    @property
    def device_type(self) -> str:
        """Of the parameters."""
        return self.device.type

    @property
    def dim(self) -> int:
        """The argument."""
        return int(self._arguments["dim"])

    @property
    def static_graph(self) -> bool:
        """The argument, or whether _set_static_graph() was called."""
        return bool(self._arguments["static_graph"])

    @property
    def find_unused_parameters(self) -> bool:
        """The argument."""
        return bool(self._arguments["find_unused_parameters"])

    @property
    def gradient_as_bucket_view(self) -> bool:
        """The argument."""
        return self._config.gradients_in_arena

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are broadcast after each synchronised backward."""
        return self._config.broadcast_buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """As broadcast_buffers."""
        return self._config.broadcast_buffers

    @property
    def bucket_bytes_cap(self) -> int:
        """torch.compile cuts a model into graphs of so many bytes. It insists on 1 MiB at least."""
        return max(self._config.bucket_cap_bytes, MIB)

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of parameters and buffers that are left alone."""
        return set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    @property
    def reducer(self) -> TorchReducer:
        """The members of torch's reducer that libraries call."""
        return TorchReducer(self)

    @property
    def logger(self) -> TorchLogger:
        """The members of torch's logger that libraries call."""
        return TorchLogger(self._get_ddp_logging_data())

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Leave parameters and buffers of these names alone when `module` is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """As static_graph=True. Before the first forward that trains, on every rank.

        Raises:
            ConfigError: The model has been trained already.
        """
        if self.static_graph:
            warnings.warn("static_graph is True already, no need to set it again.", stacklevel=2)
            return
        passes = self._passes
        if passes is not None and (passes.good_passes or passes.state.forwards or passes.state.is_armed):
            raise ConfigError(
                "_set_static_graph() should be called before training loop starts, and after wrapping.",
                where=passes.who,
                seen=f"{passes.good_passes} good synchronised backwards, {passes.state.forwards} forwards "
                "since the last one",
                hint="pass static_graph=True when wrapping, or call it right after that, on every rank",
            )
        self._arguments["static_graph"] = True
        self._config = replace(self._config, allow_unused=True, static_graph=True)
        if self._passes is not None:
            self._passes.use_config(self._config)
            self._passes.state.promises_static_graph = True  # the next pass tells those who have not

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

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing to do: times are not sampled.

        Raises:
            ValueError: It is less than 1.
        """
        if sample_rate < 1:
            raise ValueError(f"DDP runtime logging sample rate should be 1 or more, not {sample_rate}")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts about the wrapper under the names that torch gives them."""
        group: dist.ProcessGroup | None = self.process_group
        trainable = self._tensors.trainable
        return {
            "world_size": 1 if self._passes is None else self._passes.world_size,
            "rank": 0 if group is None else dist.get_rank(group),
            "backend_name": "paceline" if group is None else dist.get_backend(group),
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(str(device) for device in self.device_ids or ()),
            "bucket_cap_bytes": self._config.bucket_cap_bytes,
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "num_parameter_tensors": len(trainable),
            "total_parameter_size_bytes": sum(p.nbytes for p in trainable),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainable})),
        }


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

    def _set_static_graph(self) -> None:
        self._ddp._set_static_graph()

    def _check_reducer_finalized(self) -> None:
        self._ddp._check_reducer_finalized()


class TorchLogger:
    """The members of torch's logger that libraries call."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.strs_map = {name: fact for name, fact in facts.items() if isinstance(fact, str)}
        self.ints_map = {name: fact for name, fact in facts.items() if isinstance(fact, int)}

    def _get_ddp_logging_data(self) -> TorchLogger:
        return self

    def _set_static_graph(self) -> None:
        """Nothing is logged."""


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
