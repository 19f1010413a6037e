"""`share()` for inference, and Paddle's types for parameters that the ranks of a host share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import paddle
from paddle import nn

from paceline.arguments import Arguments
from paceline.paddle import internals
from paceline.paddle.communicator.find_peers import find_peers, known_exchange
from paceline.paddle.model.arguments import check_views, checked_group, checked_layer
from paceline.paddle.model.parameters import describe_tensor
from paceline.paddle.ops import OPS
from paceline.reducer.model_agreement import ModelDescription, check_agreement, reporting_to_peers
from paceline.sharding import shared_parameters
from paceline.sharding.move_to_shared_memory import share_to_read
from paceline.sharding.shared_parameters import check_whole

_Layer = TypeVar("_Layer", bound=Any)  # Paddle's class is Any to mypy
SharedStorage = shared_parameters.SharedStorage[paddle.Tensor]


class StateDictGuard:
    def __init__(self, layer: nn.Layer | None) -> None:
        self._layer = layer

    def __call__(self, destination: dict[str, Any]) -> None:
        if self._layer is not None:
            check_whole(f"{type(self._layer).__name__}.state_dict", self._layer.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictGuard:
        """A copy of a layer has its own parameters, which this guard does not check."""
        return StateDictGuard(None)

    def __reduce__(self) -> tuple[type[StateDictGuard], tuple[None]]:
        return StateDictGuard, (None,)


def share(layers: _Layer, group: Any = None, *, timeout_s: float | timedelta | None = None) -> _Layer:
    """Share one copy of a model between all ranks of a host, for inference; returns the same layer.

    Collective: every rank passes a model of the same structure, and afterwards all have rank 0's parameters,
    running statistics and buffers, which take memory once. They are read-only: a write in place raises
    ConfigError and is undone, so call `eval()` on models whose forward changes statistics (BatchNorm). The
    memory is freed with the last process that holds the model, even if rank 0 has ended before.
    `copy.deepcopy(layers)` gives a process a model of its own. A single process shares nothing.

    Args:
        layers: The model, on the CPU.
        group: A group of paddle.distributed, or a `paceline.Group`, of ranks of one host. None: the default
            group of paddle.distributed, or one formed from the launcher's environment.
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the group's own time-out.

    Raises:
        ConfigError: The ranks are on several hosts, or a parameter can't be shared; the message names it.
        RegionError: There is not enough memory; the message shows how much there is and is needed.
        ModelMismatchError: The ranks have different models; the message names the first difference.

    Example:
        `paceline run -n 4 serve.py` starts four processes, and the machine holds one model of 2 GB:

        >>> model = paceline.paddle.share(load_model())
        >>> model.eval()
        >>> with paddle.no_grad():
        ...     answer = model(request)
    """
    with reporting_to_peers(lambda: known_exchange(group)):
        checked_layer("share", layers, "layers")
        checked_group("share", group)
        seconds = Arguments("share").optional_seconds("timeout_s", timeout_s)
        peers = find_peers(group, seconds, owner="share")
        if peers is not None:
            check_views("share")
    if peers is None:
        return layers
    parameters: dict[str, paddle.Tensor] = dict(layers.named_parameters())
    named = [(name, b) for name, b in layers.named_buffers() if isinstance(b, paddle.Tensor)]
    buffers = {name: b for name, b in named if internals.has_memory(b)}
    description = ModelDescription(_described(parameters), _described(buffers), {}, doing="share the model")
    check_agreement(description, peers.exchange, peers.timeout_s)
    share_to_read("share", layers, parameters | buffers, peers, OPS)
    return layers


def _described(tensors: dict[str, paddle.Tensor]) -> tuple[Any, ...]:
    return tuple(describe_tensor(name, tensor, None) for name, tensor in tensors.items())
