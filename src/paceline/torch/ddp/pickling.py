"""Copies of a wrapped model by pickle or deepcopy, for an average of weights or for further training.

A copy is connected to no other rank until it is trained. So a single rank may make it, save it, load it and
evaluate it. Its first forward in training mode connects it, and is collective. With local SGD, each rank's
copy continues with its own parameters and the state of the outer optimizer.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.torch.backward.graphs import GRAD, running_call, tensors_in
from paceline.torch.model.parameters import ManagedTensors

if TYPE_CHECKING:
    from paceline.torch.ddp.torch_names import TorchNames

# Attributes that connect a model to other ranks, or belong to its own tensors. As in torch, communication
# hooks are not copied: their state often holds a process group.
_CONNECTIONS = (
    "_peers",
    "_backward_sync",
    "_outer_sync",
    "_warmup",
    "_tensors",
    "_joining",
    "_join_config",
    "_comm_hook",
    "_builtin_hook",
    "_on_drop",
    "_are_hooks_removed",
    "_error_note",
    "_storage",
    "_registered",
    "_virtual",
    "device_mesh",
)


def state_of(ddp: TorchNames) -> dict[str, Any]:
    """The state that a copy of a wrapper gets, for `__getstate__`."""
    state = {name: value for name, value in ddp.__dict__.items() if name not in _CONNECTIONS}
    state["_earlier_steps"] = ddp._earlier_steps + ddp.num_good_passes  # no second warm-up of local SGD
    state["_trained_names"] = tuple(ddp._tensors.names)  # some may be frozen now
    if ddp._outer_sync is not None:
        state["_carried"] = ddp._outer_sync.carried()
    return state


def restore(ddp: TorchNames, state: dict[str, Any]) -> None:
    nn.Module.__setstate__(ddp, state)  # type: ignore[no-untyped-call]
    ddp._is_connected = False
    ddp._peers = ddp._backward_sync = ddp._joining = ddp._join_config = None
    ddp._tensors = ManagedTensors(ddp.module, ddp.__dict__.pop("_trained_names", ()))
    ddp._tensors.delay(ddp._arguments)


def copy_of(ddp: TorchNames, memo: dict[int, Any]) -> Any:
    twin = type(ddp).__new__(type(ddp))
    memo[id(ddp)] = twin
    twin.__setstate__(copy.deepcopy(ddp.__getstate__(), memo))
    twin._peers = ddp._peers
    if "device_mesh" in ddp.__dict__:
        twin.device_mesh = ddp.device_mesh
    return twin


def refuse_backward(output: object) -> None:
    """Raise in a backward of these outputs, which would change only this rank's copy."""
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None:
            tensor.register_hook(_raise_not_connected)  # type: ignore[no-untyped-call]


def _raise_not_connected(_: torch.Tensor) -> None:
    if running_call() is GRAD:
        return
    raise ConfigError(
        "This wrapper is connected to no other rank.",
        seen="a backward of a forward in evaluation mode",
        likely="a copy of a wrapped model, that was meant for evaluation, is trained; or "
        "_remove_autograd_hooks() was called",
        hint="run a copy's first forward in training mode, on every rank: that connects it; or use `.module`",
    )
