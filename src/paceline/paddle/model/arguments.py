"""Checks arguments of Paddle's own types (layers and groups), and Paddle's flags, before Paddle uses them."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from paceline.arguments import Arguments
from paceline.collectives.group import Group
from paceline.errors import ConfigError

_STRIDES = "FLAGS_use_stride_kernel"


def checked_layer(owner: str, layer: Any, name: str) -> nn.Layer:
    hint = "nn.LayerList(...) of several layers; for a function, the layer that it calls"
    layer_of: nn.Layer = Arguments(owner).instance(
        name, layer, nn.Layer, what="a layer", of="paddle.nn.Layer", hint=hint
    )
    return layer_of


def checked_group(owner: str, group: Any, name: str = "group") -> Any:
    if group is None or isinstance(group, Group) or hasattr(group, "nranks"):
        return group
    expected = "a paceline.Group, a group of paddle.distributed, or None"
    hint = f"paddle.distributed.new_group() makes one; leave {name} out for all ranks"
    raise Arguments(owner).refuse(name, group, expected, hint, is_type=True)


def check_views(owner: str) -> None:
    """Refuse Paddle's flag that makes view(), slices and reshape() copy: means would be written to the
    copies.
    """
    if not paddle.get_flags(_STRIDES)[_STRIDES]:
        raise ConfigError(
            f"{owner}: Paddle was told to make no views of memory ({_STRIDES}).",
            expected="true, which is Paddle's default",
            got="false: slices and reshape() copy, so gradients cannot lie where they are averaged",
            likely=f"{_STRIDES}=0 in the environment, or paddle.set_flags()",
            hint=f'leave the flag out; or paddle.set_flags({{"{_STRIDES}": True}}) before the model is made',
        )
