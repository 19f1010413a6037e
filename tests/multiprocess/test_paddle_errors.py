"""Models and processes with which no mean can be made are refused, by name and on every rank."""

from __future__ import annotations

import os

import paddle
import pytest
from paddle import nn

from paceline.errors import ConfigError, ForkedError, ModelMismatchError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    ranks,
    train,
    two_layers,
)


@ranks(2)
def test_different_models_are_refused_on_every_rank(group: object) -> None:
    with pytest.raises(ModelMismatchError, match=r"'0.weight'(?s:.*)rank 1: 0.weight, shape \(4, 6\)"):
        DataParallel(two_layers(5 + group.rank), group=group)
    with pytest.raises(ModelMismatchError, match="comm_buffer_size differs"):
        DataParallel(two_layers(), group=group, comm_buffer_size=1 + group.rank)
    model = two_layers()
    model[2].bias.stop_gradient = group.rank == 1
    with pytest.raises(ModelMismatchError, match=r"'2.bias': requires_grad differs"):
        DataParallel(model, group=group)


@ranks(2)
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


@ranks(2)
def test_a_forked_child_is_refused(group: object) -> None:
    wrapped = DataParallel(two_layers(), group=group)
    child = os.fork()
    if child == 0:
        try:
            wrapped(paddle.ones([1, 4]))
        except ForkedError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    train(wrapped, paddle.ones([1, 4]), steps=1)
