"""The state of a layer that is half written: an error at its `state_dict()`."""

from __future__ import annotations

from typing import Any

from paddle import nn

from paceline.sharding.shared_parameters import check_whole


class StateDictGuard:
    """See `paddle.nn.Layer.register_state_dict_hook`.

    Args:
        layer: Whose state is looked at; None: nobody's.
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
