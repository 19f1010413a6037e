"""The parameters and buffers of a wrapped module, and their changes since it was wrapped.

A module may change in any way, except that every trained parameter must be one whose gradient is averaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline import _core
from paceline.ddp.wrapper_arguments import WrapperArguments
from paceline.errors import ConfigError
from paceline.reducer.backward_errors import shorten
from paceline.reducer.buffer_policy import policy_of
from paceline.reducer.model_agreement import TensorDescription
from paceline.reducer.plan import ParameterSpec
from paceline.torch.model.config import DDPConfig
from paceline.torch.model.inner_tensors import (
    form,
    has_no_mean,
    inner_tensors,
    is_wrapper,
    plain_tensors,
    why_not_trained,
)

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "complex64": torch.complex64,  # reduced as pairs of real numbers
    "complex128": torch.complex128,
}
"""The dtypes of gradients that both kinds of reducer average."""


def _has_exchange_api() -> bool:
    try:
        return _core.hash_layouts([torch.empty(1)]) != 0
    except (AttributeError, ValueError):
        return False


HAS_EXCHANGE_API = _has_exchange_api()
"""Whether the core can read tensors directly: torch 2.10 or newer, if the core knows its function table."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Generated:
    """Replaces the snapshot of a module that sets computed tensors in place of its parameters.

    A hypernetwork does this in each forward. A snapshot would keep these tensors and their graph alive.
    """

    def is_unchanged(self) -> bool:
        return False


class ManagedTensors:
    """The tensors that DDP synchronises: trainable parameters (their gradients), frozen ones and buffers.

    Names in `module._ddp_params_and_buffers_to_ignore` are ignored, as in torch's DDP. They stay ignored if
    the name gets another tensor later, or the tensor another name.

    Attributes:
        sparse: Indices of trainable parameters with sparse gradients: of embeddings with sparse=True.
        delayed: Indices of delay_all_reduce_named_params.
        trigger: Index of param_to_hook_all_reduce.
        frozen_now: Indices of trainable parameters that were frozen at the last check in a forward.
    """

    def __init__(self, module: nn.Module, also_trained: Collection[str] = ()) -> None:
        self.ignored = ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        # Without tensors that a forward has computed and set in place of parameters.
        named = [(name, p) for name, p in module.named_parameters() if name not in ignored and p.is_leaf]
        self.all_parameters = dict(named)
        trained = [(name, p) for name, p in named if p.requires_grad or name in also_trained]
        self.names = [name for name, _ in trained]
        self.trainable = [p for _, p in trained]
        sparse = {
            id(child.weight)
            for child in module.modules()
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
        }
        self.sparse = {index for index, p in enumerate(self.trainable) if id(p) in sparse}
        self.frozen = [p for name, p in named if not p.requires_grad and name not in also_trained]
        self.delayed: set[int] = set()
        self.trigger: int | None = None
        self.frozen_now: frozenset[int] = frozenset()
        self._module = module
        held = (*module.named_parameters(), *module.named_buffers())
        # Kept alive, so that no other object can get the same id().
        self._ignored_tensors = {id(tensor): tensor for name, tensor in held if name in ignored}
        self._index_of = {id(p): index for index, p in enumerate(self.trainable)}
        self._current: _CurrentBuffers | None = None
        # The buffers that were last synchronised, whether through pointers, and the tensors to write to.
        self._places: tuple[Mapping[str, torch.Tensor], bool, Mapping[str, torch.Tensor]] | None = None
        self._take_structure()

    @property
    def all_names(self) -> list[str]:
        return self.names

    @property
    def all_trainable(self) -> list[nn.Parameter]:
        return self.trainable

    @property
    def is_on_host(self) -> bool:
        return self.device_kinds == {"cpu"}

    @property
    def device_kinds(self) -> set[str]:
        return {p.device.type for p in self.trainable}

    def specs(self, config: DDPConfig | None = None, *, whole: bool = False) -> list[ParameterSpec]:
        """The parameters for a plan; those with sparse gradients need no place in it.

        Args:
            config: Says in which dtype gradients are averaged; None: in that of each parameter.
            whole: Whether a complex number counts as one; else as two real ones.
        """
        reduce_dtype = None if config is None else config.reduce_dtype
        widens = config is not None and config.virtual_ranks is not None  # sums of 16 bits are float32
        specs = []
        for index, (name, p) in enumerate(zip(self.names, self.trainable)):
            dtype = p.dtype if p.is_complex() else reduce_dtype or p.dtype
            if widens and dtype.itemsize < 4:
                dtype = torch.float32
            numel = 0 if index in self.sparse else p.numel()
            if p.is_complex() and not whole:
                dtype, numel = dtype.to_real(), 2 * numel
            specs.append(ParameterSpec(name, numel, dtype_name(dtype), dtype.itemsize, str(p.device)))
        return specs

    def check_device(self, device: torch.device | None) -> None:
        kinds = {p.device.type for p in self.all_parameters.values()}
        if device is not None and kinds and device.type not in kinds:
            raise ConfigError(
                f"DistributedDataParallel: device_ids names {device}, where the module is not: it is on "
                f"{' and '.join(sorted(kinds))}.",
                hint="leave device_ids out; or move the module there before wrapping it",
            )

    def delay(self, arguments: dict[str, Any]) -> None:
        """Read the two arguments of delayed gradients.

        An iterator in `arguments` is replaced by a dictionary, because a copy of the wrapper reads it again.
        """
        name, trigger = "delay_all_reduce_named_params", arguments["param_to_hook_all_reduce"]
        delayed = WrapperArguments("DistributedDataParallel").delayed(
            arguments[name], trigger, known=self.all_parameters, trained=self.trainable
        )
        arguments[name] = delayed
        self.delayed = {index for index, name in enumerate(self.names) if delayed and name in delayed}
        self.trigger = next((index for index, p in enumerate(self.trainable) if p is trigger), None)

    def agreed_options(self) -> dict[str, str]:
        """The arguments of `delay`, which must be the same on all ranks."""
        return {
            "delay_all_reduce_named_params": ", ".join(self.names[index] for index in sorted(self.delayed)),
            "param_to_hook_all_reduce": "" if self.trigger is None else self.names[self.trigger],
        }

    def describe(self) -> tuple[tuple[TensorDescription, ...], tuple[TensorDescription, ...]]:
        parameters = tuple(
            description
            for name, p in self.all_parameters.items()
            for description in describe_tensors(name, p, requires_grad=id(p) in self._index_of)
        )
        return parameters, tuple(
            description
            for name, b in self.buffers.items()
            for description in describe_tensors(name, b, requires_grad=None)
        )

    def current_buffers(self) -> dict[str, torch.Tensor]:
        if self._current is None or not self._current.is_current():
            held = ((name, slots.get(key)) for name, slots, key in self._buffer_slots)
            buffers = {name: buffer for name, buffer in held if buffer is not None}
            self._current = _CurrentBuffers(buffers, None if self._is_scripted else self._slots)
        return self._current.buffers

    def buffer_slots(self) -> list[tuple[str, dict[str, Any]]]:
        return self._slots

    def snapshot(self, slots: list[dict[str, Any]]) -> _core.BufferSnapshot:
        example = self.trainable[0] if HAS_EXCHANGE_API else None
        return _core.BufferSnapshot(slots, self._statistics_by_slot, "_version", example)

    def find_new_buffers(self) -> None:
        self._take_structure()

    def is_unread(self, name: str) -> bool:
        owner = self._statistics.get(name)
        return owner is not None and owner.training

    def is_estimate(self, name: str) -> bool:
        owner = self._estimates.get(name)
        return owner is not None and owner.training

    def written_buffers(
        self, buffers: Mapping[str, torch.Tensor], changing: Iterable[str], *, through_pointers: bool
    ) -> WrittenBuffers | None:
        if through_pointers and not self._saved:  # most models have batch norms only, or no buffers
            return None
        known = self._places
        if known is None or known[0] is not buffers or known[1] != through_pointers:
            places = _places_of(buffers, self._saved if through_pointers else buffers.keys())
            known = self._places = buffers, through_pointers, places
        return WrittenBuffers(buffers, known[2], [name for name in changing if name in self._saved])

    def check_trainable(self) -> None:
        if not self.trainable:
            raise ConfigError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient.",
                seen=f"{len(self.all_parameters)} parameters, none with requires_grad=True",
                hint="call the module itself; or unfreeze parameters before wrapping it",
            )
        for name, tensor in (*self.all_parameters.items(), *self.buffers.items()):
            if hasattr(tensor, "device_mesh"):  # torch's DTensor, recognised without an import
                raise ConfigError(
                    f"DistributedDataParallel: '{name}' is a DTensor, of which each rank may hold a part.",
                    seen=f"placements {getattr(tensor, 'placements', '?')}",
                    likely="the model was parallelised (tensor parallelism, fully_shard) before",
                    hint="use fully_shard(), or replicate() of torch.distributed, with that",
                )
        for name, parameter in zip(self.names, self.trainable):
            if why := why_not_trained(parameter):
                raise ConfigError(
                    f"DistributedDataParallel can't average gradients of '{name}': {why}.",
                    expected="a dense tensor, or one whose class knows copy_() from and to such",
                    got=f"{type(parameter).__name__}, {parameter.dtype}, {parameter.layout}",
                    hint=f"freeze it, {name}.requires_grad_(False), before wrapping; or keep its values in a "
                    "dense parameter",
                )
            if (gradients := getattr(parameter, "grad_dtype", None)) not in (None, parameter.dtype):
                raise other_gradients(name, parameter.dtype, gradients)
            if dtype_name(parameter.dtype) not in DTYPES:
                raise ConfigError(
                    f"DistributedDataParallel: the dtype of '{name}' is not supported yet.",
                    expected=", ".join(DTYPES),
                    got=dtype_name(parameter.dtype),
                )

    def check_averaged(self, patterns: Mapping[str, str]) -> None:
        for name, buffer in self.buffers.items():
            if policy_of(name, patterns) == "average" and has_no_mean(buffer):
                raise ConfigError(
                    f"DistributedDataParallel: buffer '{name}' can't be averaged.",
                    expected="a dense tensor",
                    got=f"{type(buffer).__name__}, {buffer.dtype}, {buffer.layout}",
                    hint=f'buffers={{"{name}": "broadcast"}}, or "local", before the pattern that matches',
                )

    def is_trained_here(self, tensor: object) -> bool:
        return id(tensor) in self._index_of

    def are_trained(self) -> bool:
        """Whether the backward of the current forward may produce gradients to average.

        Returns:
            False where all parameters are frozen, or torch.func.functional_call runs the module with other
            tensors in place of all of them for a while.

        Raises:
            ConfigError: A parameter would be trained that no rank averages.
        """
        return self._is_trained if self._snapshot.is_unchanged() else self._look_again()

    def _look_again(self) -> bool:
        if not self._structure.is_unchanged():
            slots = (module._parameters.values() for module in self._module.modules())
            tensors = [tensor for slot in slots for tensor in slot if tensor is not None]
            is_whole = all(self._is_parameter(tensor) for tensor in tensors)
            if not is_whole and (_is_transforming() or not any(id(t) in self._index_of for t in tensors)):
                return False
            unknown = self._unknown_parameters()
            if unknown:
                raise self._changed(unknown)
            self._take_structure()
        elif any(p.requires_grad for p in self._untrained):
            raise self._changed(self._unknown_parameters())
        self._take_flags()
        return self._is_trained

    def _take_structure(self) -> None:
        modules = list(self._module.modules())
        # Walking the modules takes far longer than comparing the dictionaries in which they keep tensors.
        self._dicts: list[dict[str, Any]] = [m._parameters for m in modules]
        held_by_all = (tensor for slots in self._dicts for tensor in slots.values())
        self._is_generated = not all(tensor is None or self._is_parameter(tensor) for tensor in held_by_all)
        self._dicts += [m._modules for m in modules]
        self._structure = self._snapshot_of([], [])
        held = {id(p): p for _, p in self._managed()}
        self._present = [index for key, index in self._index_of.items() if key in held]
        self._untrained = [p for key, p in held.items() if key not in self._index_of]
        owned = [
            (name, _slots_of(owner), key)
            for name, owner, key in _owned_buffers(self._module)
            if not self._is_ignored(name, owner._buffers[key])
        ]
        all_owned = list(_owned_buffers(self._module))
        self._statistics = {name: owner for name, owner, key in all_owned if is_running_statistic(owner, key)}
        self._estimates = {name: owner for name, owner, key in all_owned if _is_power_iteration(owner, key)}
        named = list(self._module.named_modules())
        self._slots = [(f"{name}." if name else "", _dict_of(each)) for name, each in named]
        self._statistics_by_slot = [
            {key: each for key in held if is_running_statistic(each, key)}
            for (_, each), (_, held) in zip(named, self._slots, strict=True)
        ]
        self._is_scripted = not all(isinstance(each._buffers, dict) for _, each in named)
        self._current = self._places = None
        held_now = ((name, slots[key]) for name, slots, key in owned)
        self.buffers = {name: buffer for name, buffer in held_now if buffer is not None}
        self._buffer_slots = [(name, slots, key) for name, slots, key in owned if name in self.buffers]
        self._saved = frozenset(name for name in self.buffers if name not in self._statistics)
        self._take_flags()

    def _take_flags(self) -> None:
        flags = [p.requires_grad for p in self.trainable]
        self.frozen_now = frozenset(index for index, flag in enumerate(flags) if not flag)
        self._is_trained = any(flags[index] for index in self._present)
        trained = [p for p, flag in zip(self.trainable, flags) if flag]
        untrained = [p for p, flag in zip(self.trainable, flags) if not flag]
        self._snapshot = self._snapshot_of(trained, [*untrained, *self._untrained])

    def _snapshot_of(
        self, trained: Sequence[torch.Tensor], untrained: Sequence[torch.Tensor]
    ) -> _core.ModuleSnapshot | _Generated:
        if self._is_generated:
            return _Generated()
        return _core.ModuleSnapshot(self._dicts, "requires_grad", list(trained), list(untrained))

    def _managed(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = ((name, p) for name, p in self._module.named_parameters() if self._is_parameter(p))
        return ((name, p) for name, p in named if not self._is_ignored(name, p))

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        # torch.jit.load turns parameters into plain tensors.
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._index_of

    def _is_ignored(self, name: str, tensor: torch.Tensor | None) -> bool:
        return name in self.ignored or id(tensor) in self._ignored_tensors

    def _unknown_parameters(self) -> list[str]:
        return [name for name, p in self._managed() if p.requires_grad and id(p) not in self._index_of]

    def _changed(self, unknown: Sequence[str]) -> ConfigError:
        now, before = dict(self._module.named_parameters()), self.all_parameters
        changes = {
            "added": [name for name in unknown if name not in before],
            "replaced": [name for name in unknown if name in before and now[name] is not before[name]],
            "unfrozen": [name for name in unknown if name in before and now[name] is before[name]],
        }
        return ConfigError(
            "A wrapped model has parameters to train that it had not when it was wrapped.",
            seen="\n".join(f"{what}: {shorten(names)}" for what, names in changes.items() if names),
            expected="every parameter with requires_grad=True was there, and had it, when the model was "
            "wrapped: only their gradients are averaged",
            likely="the model was changed after DistributedDataParallel() had wrapped it",
            hint="make such changes first, then wrap; or wrap `ddp.module` again, on every rank",
        )


def _is_transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap) runs, whose gradients only its caller uses."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _owned_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, owner in module.named_modules():
        for key in owner._buffers.keys():  # noqa: SIM118  (a ScriptModule has no dictionary)
            yield f"{prefix}.{key}" if prefix else key, owner, key


class _ScriptSlots:
    """The buffers of a ScriptModule, with the methods of a dictionary that are needed here."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def get(self, key: str) -> torch.Tensor | None:
        return self[key] if key in self._held else None

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._held[key]
        return tensor


def _slots_of(owner: nn.Module) -> dict[str, torch.Tensor | None] | _ScriptSlots:
    held = owner._buffers
    return held if isinstance(held, dict) else _ScriptSlots(held)


def _dict_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of a module as a dictionary; for a ScriptModule a copy, because it has none."""
    held = module._buffers
    return held if isinstance(held, dict) else dict(held.items())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def other_gradients(name: str, own: torch.dtype, gradients: torch.dtype) -> ConfigError:
    """The error for a parameter whose `grad_dtype` differs from its own dtype."""
    return ConfigError(
        f"DistributedDataParallel cannot average gradients of {gradients} of '{name}', which is {own}.",
        expected=f"gradients of the parameter's own dtype, {own}",
        got=f"grad_dtype = {gradients}",
        hint=f"leave grad_dtype as it is, {own}; mixed_precision=_MixedPrecision(reduce_dtype={gradients}) "
        "averages gradients in that dtype",
    )


def describe_tensors(
    name: str, tensor: torch.Tensor, *, requires_grad: bool | None
) -> Iterator[TensorDescription]:
    """Describe a parameter or buffer, which all ranks must have alike, by its plain tensors."""
    what = form(tensor)
    for part_name, part in inner_tensors(name, tensor):
        dtype = dtype_name(part.dtype)
        yield TensorDescription(
            name=part_name,
            shape=tuple(part.shape),
            dtype=f"{dtype} ({what})" if what else dtype,
            device=part.device.type,
            strides=() if part.is_contiguous() else part.stride(),
            requires_grad=requires_grad,
        )


def is_running_statistic(owner: nn.Module, key: str) -> bool:
    """Whether a buffer is one of a batch norm, or an instance norm.

    In training mode, the layer saves these buffers for backward but does not read them there, so writing to
    them makes no graph invalid. The layer itself writes to them in each forward without a new version. In
    evaluation mode backward reads them, but usually no forward in training mode has changed them meanwhile.
    """
    if key not in _STATISTICS:
        return False
    if isinstance(owner, torch.jit.ScriptModule):  # its class is not that of the original module
        name: str = getattr(owner, "original_name", "")
        return name.startswith(("BatchNorm", "SyncBatchNorm", "InstanceNorm"))
    return isinstance(owner, _NormBase)


def _is_power_iteration(owner: nn.Module, key: str) -> bool:
    """Whether a buffer belongs to a spectral norm, which estimates the largest singular value of a weight.

    In training mode the norm writes the buffer whenever the weight is computed.
    """
    if isinstance(owner, _SpectralNorm):
        return key in ("_u", "_v")
    hooks = [each for each in owner._forward_pre_hooks.values() if isinstance(each, SpectralNorm)]
    return any(key in (f"{each.name}_u", f"{each.name}_v") for each in hooks)


class _CurrentBuffers:
    """The buffers of the modules at the last query, and a check whether they are still the same."""

    def __init__(self, buffers: dict[str, torch.Tensor], slots: list[tuple[str, Any]] | None) -> None:
        self.buffers = buffers
        self._tensors = list(buffers.values())
        # The inner tensors of a tensor may be replaced.
        is_plain = HAS_EXCHANGE_API and plain_tensors(self._tensors) is self._tensors
        self._layouts = _core.hash_layouts(self._tensors) if is_plain and slots is not None else 0
        dicts = [held for _, held in slots] if slots is not None and self._layouts else []
        self._snapshot = _core.ModuleSnapshot(dicts, "requires_grad", [], [])

    def is_current(self) -> bool:
        is_known = self._layouts and self._snapshot.is_unchanged()
        return bool(is_known) and _core.hash_layouts(self._tensors) == self._layouts


class WrittenBuffers:
    """Buffers that are about to be written to, some of which autograd may have saved for a later backward.

    Autograd detects a changed tensor by its version. So a buffer gets a new version only if its bits have
    changed: then autograd raises only if a saved value has really changed. On a device a buffer always gets a
    new version, because comparing the bits would wait for the device.

    Attributes:
        places: The tensors to write to, by name.
    """

    def __init__(
        self, buffers: Mapping[str, torch.Tensor], places: Mapping[str, torch.Tensor], watched: Iterable[str]
    ) -> None:
        self.places = places
        watched = {name: buffers[name] for name in watched if name in buffers}
        on_host = {name: buffer for name, buffer in watched.items() if buffer.is_cpu}
        self._watched_names, self._watched = list(on_host), list(on_host.values())
        self._others = [buffer for buffer in watched.values() if not buffer.is_cpu]
        self._before = _hashes(self._watched)

    def end(self) -> dict[str, int]:
        after = _hashes(self._watched)
        changed = [b for b, old, new in zip(self._watched, self._before, after) if old != new]
        if changed or self._others:
            torch.autograd.graph.increment_version([*changed, *self._others])
        return {n: h for n, b, h in zip(self._watched_names, self._watched, after) if not is_wrapper(b)}


def _places_of(buffers: Mapping[str, torch.Tensor], counting: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors on the memory of the buffers; writes to those in `counting` give no buffer a new version."""
    # A wrapper's own version does not count writes to its inner tensors.
    return {
        name: buffer.data if name in counting and not is_wrapper(buffer) else buffer
        for name, buffer in buffers.items()
    }


def _hashes(buffers: Sequence[torch.Tensor]) -> list[int]:
    counts, whole = [], []
    for buffer in buffers:
        parts = [part.detach().contiguous() for part in plain_tensors([buffer])]
        counts.append(len(parts))
        whole += parts
    hashes = iter(_core.hash_all([each.data_ptr() for each in whole], [each.nbytes for each in whole]))
    # For several inner tensors, one hash that changes if any of theirs does.
    return [next(hashes) if count == 1 else hash(tuple(itertools.islice(hashes, count))) for count in counts]
