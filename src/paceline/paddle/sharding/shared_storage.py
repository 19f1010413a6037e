"""Paddle's parameters in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import nn

from paceline.paddle import internals
from paceline.paddle.sharding.ops import OPS
from paceline.reducer.peers import Ranks
from paceline.sharding import moving, shared_parameters
from paceline.sharding.shared_parameters import check_whole

SharedStorage = shared_parameters.SharedStorage[paddle.Tensor]


def refuse_strange(owner: str, layer: nn.Layer, tensors: Mapping[str, paddle.Tensor], peers: Ranks) -> None:
    """Refuse tensors of a layer that can't be shared: see `paceline.sharding.moving`. Collective."""
    rescaled = [
        (f"'{name}' has a max_norm", child.weight)
        for name, child in layer.named_sublayers(include_self=True)
        if isinstance(child, nn.Embedding) and internals.has_max_norm(child)
    ]
    moving.refuse_strange(owner, tensors, _why_not_shared, rescaled, peers, OPS)


def _why_not_shared(name: str, tensor: paddle.Tensor) -> str | None:
    leave = "set parameter.no_sync = True; or train without sharing parameters"
    if not tensor.is_dense():
        return f"'{name}' is no dense tensor\n{leave}"
    if not tensor.place.is_cpu_place():
        hint = 'paddle.set_device("cpu") before the model is built'
        return f"'{name}' is on {tensor.place}, and not in the memory of the host\n{hint}"
    if not tensor.is_contiguous():
        return f"the elements of '{name}' do not lie one after the other\n{leave}"
    return None


class StateDictGuard:
    """See `paddle.nn.Layer.register_state_dict_hook`.

    Args:
        layer: Whose state is looked at; None: no layer's.
    """

    def __init__(self, layer: nn.Layer | None) -> None:
        self._layer = layer

    def __call__(self, destination: dict[str, Any]) -> None:
        """Let the state pass.

        Raises:
            TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
        """
        if self._layer is not None:
            check_whole(f"{type(self._layer).__name__}.state_dict", self._layer.parameters())

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictGuard:
        """A copy of a layer has parameters of its own, of which nothing is known."""
        return StateDictGuard(None)

    def __reduce__(self) -> tuple[type[StateDictGuard], tuple[None]]:
        return StateDictGuard, (None,)
