"""The parameters and buffers of a wrapped module, and whether they are still those that were wrapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline import _core
from paceline.errors import ConfigError
from paceline.reducer.agreement import TensorDescription
from paceline.reducer.plan import ParameterSpec
from paceline.reducer.report import shorten
from paceline.torch.arena import DTYPES


class ManagedTensors:
    """What DDP keeps in step: trainable parameters (their gradients), frozen ones and buffers (their values).

    Names in `module._ddp_params_and_buffers_to_ignore` are left alone, as by torch's DDP.

    Attributes:
        sparse: Indices of trainable parameters whose gradients are sparse: of embeddings that say so.
        delayed: Indices of delay_all_reduce_named_params.
        trigger: Index of param_to_hook_all_reduce.
    """

    def __init__(self, module: nn.Module) -> None:
        self.ignored = ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        self.all_parameters = dict(named)
        self.names = [name for name, p in named if p.requires_grad]
        self.trainable = [p for _, p in named if p.requires_grad]
        sparse = {
            id(child.weight)
            for child in module.modules()
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
        }
        self.sparse = {index for index, p in enumerate(self.trainable) if id(p) in sparse}
        self.frozen = [p for _, p in named if not p.requires_grad]
        self.buffers = {name: b for name, b in module.named_buffers() if name not in ignored}
        self.delayed: set[int] = set()
        self.trigger: int | None = None
        self._module = module
        # Walking the modules takes far longer than comparing the dictionaries in which they keep things.
        self._slots = [m._parameters for m in module.modules()]
        children: list[dict[str, Any]] = [m._modules for m in module.modules()]
        self._snapshot = _core.ModuleSnapshot(
            [*self._slots, *children], "requires_grad", self.trainable, self.frozen
        )
        self._buffer_slots = [
            (name, owner._buffers, key) for name, owner, key in _owned_buffers(module) if name in self.buffers
        ]

    @property
    def device_kinds(self) -> set[str]:
        return {p.device.type for p in self.trainable}

    def specs(
        self, reduce_dtype: torch.dtype | None = None, *, complex_as_real: bool = True
    ) -> list[ParameterSpec]:
        """The parameters as a plan knows them; those with sparse gradients need no place in it.

        Args:
            reduce_dtype: In which real gradients are averaged; None: in their own.
            complex_as_real: Take a complex number for two real ones.
        """
        specs = []
        for index, (name, p) in enumerate(zip(self.names, self.trainable)):
            dtype = p.dtype if p.is_complex() else reduce_dtype or p.dtype
            numel = 0 if index in self.sparse else p.numel()
            if p.is_complex() and complex_as_real:
                dtype, numel = dtype.to_real(), 2 * numel
            specs.append(ParameterSpec(name, numel, dtype_name(dtype), dtype.itemsize, str(p.device)))
        return specs

    def check_device(self, device: torch.device | None) -> None:
        """Refuse device_ids of a kind that the module is not on."""
        kinds = {p.device.type for p in self.all_parameters.values()}
        if device is not None and kinds and device.type not in kinds:
            raise ConfigError(
                "DistributedDataParallel: device_ids names a device where the module is not.",
                seen=f"parameters on {', '.join(sorted(kinds))}",
                got=f"device_ids of kind {device.type}",
                hint="leave device_ids out; or move the module there before wrapping it",
            )

    def delay(self, arguments: Mapping[str, Any]) -> None:
        """Find the parameters that the wrapper's arguments name, or refuse strangers."""
        delayed, trigger = (
            arguments[name] for name in ("delay_all_reduce_named_params", "param_to_hook_all_reduce")
        )
        if (delayed is None) != (trigger is None):
            raise ConfigError(
                "DistributedDataParallel: delay_all_reduce_named_params and param_to_hook_all_reduce need to "
                "be set at the same time.",
                hint="both or neither; without, every gradient is averaged as soon as it is there",
            )
        named = dict(delayed or ())
        wrong = [name for name, p in named.items() if self.all_parameters.get(name) is not p]
        if wrong or (trigger is not None and all(p is not trigger for p in self.trainable)):
            raise ConfigError(
                "DistributedDataParallel: these are no parameters of the module.",
                got=f"delay_all_reduce_named_params: {shorten(wrong)}"
                if wrong
                else "param_to_hook_all_reduce",
                hint="pass (name, parameter) as module.named_parameters() gives them",
            )
        self.delayed = {index for index, name in enumerate(self.names) if name in named}
        self.trigger = next((index for index, p in enumerate(self.trainable) if p is trigger), None)

    def agreed_options(self) -> dict[str, str]:
        """What `delay` was told, as it must be on all ranks."""
        return {
            "delay_all_reduce_named_params": ", ".join(self.names[index] for index in sorted(self.delayed)),
            "param_to_hook_all_reduce": "" if self.trigger is None else self.names[self.trigger],
        }

    def describe(self) -> tuple[tuple[TensorDescription, ...], tuple[TensorDescription, ...]]:
        """Parameters and buffers, as they must be on all ranks."""
        parameters = tuple(
            _describe(name, p, requires_grad=p.requires_grad) for name, p in self.all_parameters.items()
        )
        return parameters, tuple(_describe(name, b, requires_grad=None) for name, b in self.buffers.items())

    def current_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the module has now: modules may replace theirs."""
        held = ((name, slots.get(key)) for name, slots, key in self._buffer_slots)
        return {name: buffer for name, buffer in held if buffer is not None}

    def check_trainable(self) -> None:
        """Refuse what cannot be averaged; on every rank alike, because all have the same parameters."""
        if not self.trainable:
            raise ConfigError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient.",
                seen=f"{len(self.all_parameters)} parameters, none with requires_grad=True",
                hint="call the module itself; or unfreeze parameters before wrapping it",
            )
        for name, parameter in zip(self.names, self.trainable):
            if hasattr(parameter, "device_mesh"):  # torch's DTensor, which need not be imported to be told
                raise ConfigError(
                    f"DistributedDataParallel: '{name}' is a DTensor, whose gradient it can't average.",
                    seen=f"placements {getattr(parameter, 'placements', '?')}",
                    likely="the model was parallelised (tensor parallelism, fully_shard) before",
                    hint="use fully_shard(), or replicate() of torch.distributed, with that",
                )
            if dtype_name(parameter.dtype) not in DTYPES:
                raise ConfigError(
                    f"DistributedDataParallel: the dtype of '{name}' is not supported yet.",
                    expected=", ".join(DTYPES),
                    got=dtype_name(parameter.dtype),
                )

    def check_unchanged(self) -> bool:
        """Raise if parameters were added, removed, replaced, frozen or unfrozen since the model was wrapped.

        Returns:
            False where torch.func.functional_call runs the module with other tensors for a while.
        """
        if self._snapshot.is_unchanged():
            return True
        tensors = [tensor for slot in self._slots for tensor in slot.values() if tensor is not None]
        if all(isinstance(tensor, nn.Parameter) for tensor in tensors):
            raise self._changed()
        return False

    def _changed(self) -> ConfigError:
        now = dict(self._module.named_parameters())
        before = self.all_parameters
        changes = {
            "added": [name for name in now if name not in before],
            "removed": [name for name in before if name not in now],
            "replaced": [name for name in now if name in before and now[name] is not before[name]],
            "frozen": [name for name, p in zip(self.names, self.trainable) if not p.requires_grad],
            "unfrozen": [name for name, p in before.items() if p.requires_grad and name not in self.names],
        }
        rows = [f"{what}: {shorten(names)}" for what, names in changes.items() if names]
        return ConfigError(
            "The parameters of a wrapped model have changed.",
            seen="\n".join(rows) or "a submodule was added, removed or replaced",
            likely="the model was changed after DistributedDataParallel() had wrapped it",
            hint="make such changes first, then wrap; or wrap `ddp.module` again, on every rank",
        )


def _owned_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Of each buffer its name, the submodule that holds it, and its name there."""
    for prefix, owner in module.named_modules():
        for key in owner._buffers:
            yield f"{prefix}.{key}" if prefix else key, owner, key


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(name: str, tensor: torch.Tensor, *, requires_grad: bool | None) -> TensorDescription:
    return TensorDescription(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        device=tensor.device.type,
        strides=() if tensor.is_contiguous() else tensor.stride(),
        requires_grad=requires_grad,
    )
