"""Checks arguments that are torch objects: modules, devices, process groups.

`paceline.arguments` checks arguments that do not depend on the framework.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.arguments import Arguments
from paceline.collectives.group import Group
from paceline.errors import ConfigError
from paceline.torch.model.inner_tensors import inner_tensors


def checked_module(owner: str, module: Any, name: str = "module") -> nn.Module:
    hint = (
        "the module itself, and not its parameters; nn.ModuleList(...) of several modules; for a function, "
        "the module that it calls"
    )
    instance = Arguments(owner).instance
    return instance(name, module, nn.Module, what="a module", of="torch.nn.Module", hint=hint)


def check_materialised(owner: str, module: nn.Module) -> None:
    """Refuse a module with parameters or buffers that have no values in memory, except ignored names."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if name in ignored:
                continue
            if not is_lazy(tensor):
                meta = [part_name for part_name, part in inner_tensors(name, tensor) if part.is_meta]
                if not meta:
                    continue
                name = meta[0]
            hint = 'module.to_empty(device="cpu"), and initialise it'
            if is_lazy(tensor):
                hint = "call the module once, on a batch; its lazy layers learn their shapes from it"
            raise Arguments(owner).refuse(
                "module",
                module,
                "a module whose parameters and buffers have values",
                f"{hint}, before it is wrapped",
                got=f"{type(module).__name__}, of which {kind} '{name}' is "
                + ("lazy, and uninitialized" if is_lazy(tensor) else 'on the device "meta"'),
            )


def current_accelerator() -> torch.device | None:
    """The accelerator of this machine, or None, where torch 2.6 would raise."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def as_device(device: Any, name: str = "device", owner: str = "DistributedDataParallel") -> torch.device:
    """A device from its name, or from the number of an accelerator."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        accelerator = current_accelerator()
        with contextlib.suppress(RuntimeError):  # a negative number
            return torch.device("cuda" if accelerator is None else accelerator.type, device)
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(device)
    expected = "a device, its name, or the number of a GPU"
    hint = f'torch.device("cuda", local_rank), "cuda:0" or "cpu" as {name}'
    is_type = not isinstance(device, (int, str))
    raise Arguments(owner).refuse(name, device, expected, hint, is_type=is_type)


def check_devices(devices: Any, owner: str = "DistributedDataParallel") -> None:
    check, expected = Arguments(owner), "a list of devices, or None"
    if not isinstance(devices, (list, tuple, range)):
        hint = f"device_ids=[{devices!r}]" if isinstance(devices, (int, str)) else "device_ids=[local_rank]"
        raise check.refuse("device_ids", devices, expected, hint, is_type=True)
    try:
        for device in devices:
            as_device(device)
    except ConfigError:
        hint = 'numbers of GPUs, or their names, as "cuda:0"; "cpu"'
        raise check.refuse("device_ids", devices, expected, hint) from None


def checked_group(owner: str, group: Any, name: str = "process_group") -> dist.ProcessGroup | Group | None:
    if group is None or isinstance(group, (dist.ProcessGroup, Group)):
        return group
    expected = "a process group of torch, a paceline.Group, or None for the default group"
    hint = f"torch.distributed.new_group() makes one; leave {name} out for all ranks"
    if isinstance(group, str):
        hint = f'torch.distributed.init_process_group("{group}") first, and leave {name} out'
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        hint = "this rank is in no such group: call it on the ranks of the group only"
    raise Arguments(owner).refuse(name, group, expected, hint, is_type=True)
