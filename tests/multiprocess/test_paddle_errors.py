"""Models whose gradients cannot be averaged are refused, by name and on every rank."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn

from paceline.errors import ConfigError, ModelMismatchError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    kept_ranks,
    two_layers,
)


@kept_ranks(2)
def test_differing_arguments_are_reported_by_paddles_names(group: object) -> None:
    with pytest.raises(ModelMismatchError, match="comm_buffer_size differs"):
        DataParallel(two_layers(), group=group, comm_buffer_size=1 + group.rank)


@kept_ranks(2)
def test_models_that_cannot_be_wrapped_and_changes_after_wrapping(group: object) -> None:
    frozen = two_layers()
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    with pytest.raises(ConfigError, match="does not have any parameters to train"):
        DataParallel(frozen, group=group)
    model, x = two_layers(), paddle.ones([1, 4])
    model[0].bias.stop_gradient = True
    wrapped = DataParallel(model, group=group)
    model[0].bias.stop_gradient = False
    with pytest.raises(ConfigError, match=r"unfrozen: 0\.bias"):
        wrapped(x)
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    model.add_sublayer("3", nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"added: 3\.weight, 3\.bias"):
        wrapped(x)
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    model.to(dtype="float64")
    with pytest.raises(ConfigError, match=r"dense gradient of float32"):
        wrapped(x.astype("float64")).sum().backward()
