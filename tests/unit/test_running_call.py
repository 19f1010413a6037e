"""Which call of autograd runs a hook, read from the stack of torch's own functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.torch.passes.graphs import RunningCall, running_call


@pytest.fixture
def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def asked_in(call: Callable[[torch.Tensor], object], leaf: torch.Tensor) -> list[RunningCall]:
    """What a hook of a tensor made from `leaf` is told while `call` goes back through it."""
    told = []
    made = leaf * 2
    made.register_hook(lambda _: told.append(running_call()))
    call(made.sum())
    return told


def test_a_backward_of_all_is_told_from_one_of_some(leaf):
    assert asked_in(lambda loss: loss.backward(), leaf) == [RunningCall.BACKWARD]
    assert asked_in(lambda loss: loss.backward(inputs=[leaf]), leaf) == [RunningCall.BACKWARD_OF_SOME]
    assert asked_in(lambda loss: loss.backward(inputs=leaf), leaf) == [RunningCall.BACKWARD_OF_SOME]
    assert asked_in(lambda loss: torch.autograd.backward(loss), leaf) == [RunningCall.BACKWARD]
    assert asked_in(lambda loss: torch.autograd.grad(loss, leaf), leaf) == [RunningCall.GRAD]


def test_a_torch_that_makes_a_tuple_of_its_inputs_is_understood(leaf, monkeypatch):
    """As torch 2.6 does before it calls its engine: without inputs, the tuple is empty."""
    told = []

    def backward(inputs=None):
        inputs = () if inputs is None else tuple(inputs)
        told.append(running_call())

    monkeypatch.setattr(torch.autograd, "backward", backward)
    backward()
    backward(inputs=[leaf])
    assert told == [RunningCall.BACKWARD, RunningCall.BACKWARD_OF_SOME]
