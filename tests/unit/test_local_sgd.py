"""The options of local SGD, and its outer optimizer beside torch's SGD."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from paceline.errors import ConfigError, ConfigTypeError
from paceline.reducer.local_sgd.options import LocalSGD, outer_step
from paceline.reducer.local_sgd.outer_sync import ForwardModes


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": True}, "every"),
        ({"every": 2, "outer_lr": 0}, "outer_lr"),
        ({"every": 2, "outer_lr": float("nan")}, "outer_lr"),
        ({"every": 2, "outer_momentum": -0.1}, "outer_momentum"),
        ({"every": 2, "outer_momentum": 1}, "outer_momentum"),
        ({"every": 2, "nesterov": "yes"}, "nesterov"),
        ({"every": 2, "warmup_steps": -1}, "warmup_steps"),
        ({"every": 2, "between": "machines"}, "between"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, name):
    with pytest.raises(ConfigError, match=f"LocalSGD: {name}=") as caught:
        LocalSGD(**arguments)
    assert caught.value.argument == name


def test_options_are_plain_values():
    options = LocalSGD(np.int64(4), outer_lr=np.float32(0.5), warmup_steps=torch.tensor(3))
    assert options == LocalSGD(4, outer_lr=0.5, warmup_steps=3) == pickle.loads(pickle.dumps(options))
    assert type(options.every) is int and type(options.outer_lr) is float
    with pytest.raises(ConfigTypeError):
        LocalSGD("4")


@settings(max_examples=25)
@given(
    lr=st.floats(0.01, 2),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    gradients=st.lists(st.floats(-10, 10), min_size=1, max_size=5),
)
def test_outer_step_is_torchs_sgd(lr, momentum, nesterov, gradients):
    parameter = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    reference = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    options = LocalSGD(1, outer_lr=lr, outer_momentum=momentum, nesterov=nesterov)
    value, kept = np.array([2.0]), None
    for gradient in gradients:
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        reference.step()
        value, kept = outer_step(value, kept, np.array([gradient]), options)
        assert_allclose(value, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)
    assert (kept is None) == (momentum == 0)


def test_the_gradient_is_not_kept():
    gradient = np.array([1.0])
    _, momentum = outer_step(np.array([2.0]), None, gradient, LocalSGD(1))
    gradient[:] = 7
    assert momentum == [1.0]


def test_forwards_in_evaluation_mode_count_where_all_of_the_last_backward_were():
    modes = ForwardModes()
    assert not modes.is_of_all_ranks(is_training=False)
    assert modes.is_of_all_ranks(is_training=True)
    modes.end_backward()
    assert not modes.is_of_all_ranks(is_training=False)
    modes.end_backward()
    assert modes.is_of_all_ranks(is_training=False)
