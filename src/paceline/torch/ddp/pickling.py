"""Copies of a wrapped model: pickled, loaded, deep-copied, for an average of weights as for more training.

The one idea: a copy is connected to no other rank until it is trained. So one rank alone may make it, save
it, load it and evaluate it; the first forward in training mode connects it, and that is collective.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.torch.ddp.compatible import TorchNames
from paceline.torch.model.parameters import ManagedTensors
from paceline.torch.passes.graphs import RunningCall, running_call, tensors_in

if TYPE_CHECKING:
    from paceline.torch.link.peers import Peers

# What connects a model to other ranks, or belongs to its own tensors. As in torch, communication hooks are
# not copied: their state often holds a process group.
_CONNECTIONS = (
    "_peers",
    "_passes",
    "_tensors",
    "_joining",
    "_join_config",
    "_comm_hook",
    "_builtin_hook",
    "_on_drop",
    "_are_hooks_removed",
    "_error_note",
    "device_mesh",
)


class Copies(TorchNames):
    """The part of `DistributedDataParallel` that makes copies of it.

    Attributes:
        _is_connected: False for a copy that has not been trained yet.
        _peers: The ranks; None for a copy that does not know them yet.
    """

    _is_connected: bool
    _peers: Peers | None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _CONNECTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self._is_connected = False
        self._peers = self._passes = self._joining = self._join_config = None
        self._tensors = ManagedTensors(self.module)
        self._tensors.delay(self._arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._peers = self._peers  # a copy in this process trains with the same ranks
        if "device_mesh" in self.__dict__:
            twin.device_mesh = self.device_mesh
        return twin

    def _refuse_backward(self, output: object) -> None:
        """Let no backward of these outputs change this rank's copy alone."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(_raise_not_connected)  # type: ignore[no-untyped-call]


def _raise_not_connected(_: torch.Tensor) -> None:
    if running_call() is RunningCall.GRAD:
        return
    raise ConfigError(
        "This wrapper is connected to no other rank.",
        seen="a backward of a forward in evaluation mode",
        likely="a copy of a wrapped model, that was meant for evaluation, is trained; or "
        "_remove_autograd_hooks() was called",
        hint="run a copy's first forward in training mode, on every rank: that connects it; or use `.module`",
    )
