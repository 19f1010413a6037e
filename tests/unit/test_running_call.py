"""The call of autograd that runs a hook, read from the stack of torch's own functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from queue import Queue
from threading import Event, Thread

import pytest
import torch

from paceline.torch.backward.graphs import RunningCall, running_call


@pytest.fixture
def leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def asked_in(call: Callable[[torch.Tensor], object], leaf: torch.Tensor) -> list[RunningCall]:
    """The result in a hook of a tensor made from `leaf` while `call` goes back through it."""
    found = []
    made = leaf * 2
    made.register_hook(lambda _: found.append(running_call()))
    call(made.sum())
    return found


def test_a_backward_of_all_is_distinguished_from_one_of_some(leaf):
    assert asked_in(lambda loss: loss.backward(), leaf) == [RunningCall.BACKWARD]
    assert asked_in(lambda loss: loss.backward(inputs=[leaf]), leaf) == [RunningCall.BACKWARD_OF_SOME]
    assert asked_in(lambda loss: loss.backward(inputs=leaf), leaf) == [RunningCall.BACKWARD_OF_SOME]
    assert asked_in(lambda loss: torch.autograd.backward(loss), leaf) == [RunningCall.BACKWARD]
    assert asked_in(lambda loss: torch.autograd.grad(loss, leaf), leaf) == [RunningCall.GRAD]


def test_a_torch_that_makes_a_tuple_of_its_inputs_is_understood(leaf, monkeypatch):
    """Like torch 2.6 before it calls its engine: without inputs, the tuple is empty."""
    found = []

    def backward(inputs=None):
        inputs = () if inputs is None else tuple(inputs)
        found.append(running_call())

    monkeypatch.setattr(torch.autograd, "backward", backward)
    backward()
    backward(inputs=[leaf])
    assert found == [RunningCall.BACKWARD, RunningCall.BACKWARD_OF_SOME]


def test_a_thread_that_only_runs_hooks_sees_the_call_that_waits_for_it(leaf):
    """Like autograd's threads, on a device. If threads wait in different calls, the result is unknown."""
    found: list[RunningCall] = []
    asking = Queue[Event]()

    def answer() -> None:
        while (done := asking.get()) is not None:
            found.append(running_call())
            done.set()

    def ask(_: object) -> None:
        done = Event()
        asking.put(done)
        assert done.wait(60)

    def back(call: Callable[[torch.Tensor], object], meanwhile: Callable[[object], None]) -> None:
        made = leaf * 2
        made.register_hook(meanwhile)
        call(made.sum())

    def run_beside(call: Callable[[torch.Tensor], object], _: object) -> None:
        beside = Thread(target=back, args=(call, ask))
        beside.start()
        beside.join(60)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    def grad(loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, leaf)

    thread = Thread(target=answer)
    thread.start()
    try:
        back(backward, ask)
        back(grad, ask)
        for other in (backward, grad):
            back(backward, functools.partial(run_beside, other))
    finally:
        asking.put(None)
        thread.join(60)
    assert found == [RunningCall.BACKWARD, RunningCall.GRAD, RunningCall.BACKWARD, RunningCall.UNKNOWN]
