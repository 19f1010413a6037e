"""Arguments that are Paddle's own things: layers and groups. Checked before Paddle sees them.

What is of no framework is checked in `paceline.arguments`.
"""

from __future__ import annotations

from typing import Any

from paddle import nn

from paceline.arguments import Arguments
from paceline.collectives.group import Group


def checked_layer(owner: str, layer: Any, name: str) -> nn.Layer:
    """A layer, made already.

    Raises:
        ConfigError: It is none.
    """
    hint = "nn.LayerList(...) of several layers; for a function, the layer that it calls"
    layer_of: nn.Layer = Arguments(owner).instance(
        name, layer, nn.Layer, what="a layer", of="paddle.nn.Layer", hint=hint
    )
    return layer_of


def checked_group(owner: str, group: Any, name: str = "group") -> Any:
    """A group of processes, or None.

    Raises:
        ConfigError: It is none; the name of a backend is none, either.
    """
    if group is None or isinstance(group, Group) or hasattr(group, "nranks"):
        return group
    expected = "a paceline.Group, a group of paddle.distributed, or None"
    hint = f"paddle.distributed.new_group() makes one; leave {name} out for all ranks"
    raise Arguments(owner).refuse(name, group, expected, hint, is_type=True)
