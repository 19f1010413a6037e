"""The test device: its work runs late, and code that does not wait for it reads wrong values."""

from __future__ import annotations

import pytest
import torch

from tests import accelerator
from tests.accelerator import IS_CUDA, KIND, busy, no_waiting

pytestmark = [accelerator.needed, pytest.mark.skipif(IS_CUDA, reason="a GPU is there, and needs no stand-in")]


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def test_operators_are_those_of_the_cpu_and_run_later():
    x = torch.arange(6.0).reshape(2, 3)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).relu() * 2).sum()

    on_device = x.to(KIND)
    compute(on_device)  # torch imports a module for the first one
    busy(1500)
    behind = torch.Event(KIND)
    behind.record()
    y = compute(on_device)
    assert not behind.query()
    assert y.item() == compute(x).item()
    assert behind.query()


def test_a_stream_that_does_not_wait_reads_what_is_not_there():
    side = torch.Stream(KIND)
    busy(50)
    y = torch.ones(4, device=KIND) * 3
    with side:
        early = (y + 0).cpu()
    assert early.isnan().all()
    torch.accelerator.synchronize()
    side.wait_stream(current())
    with side:
        assert (y + 0).cpu().tolist() == [3.0] * 4


def test_an_event_lets_a_stream_wait():
    side = torch.Stream(KIND)
    busy(50)
    y = torch.ones(4, device=KIND) * 3
    done = torch.Event(KIND)
    done.record()
    assert not done.query()
    side.wait_event(done)
    with side:
        assert (y + 0).cpu().tolist() == [3.0] * 4
    assert done.query()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_reads_it(is_recorded):
    side = torch.Stream(KIND)
    y = torch.full((4,), 3.0, device=KIND)
    side.wait_stream(current())
    with side:
        busy(50)
        late = y + 0
    if is_recorded:
        y.record_stream(side)
    del y
    torch.empty(4, device=KIND)  # the stream that owned the memory gets it again
    current().synchronize()
    with side:
        found = late.cpu()
    assert found.tolist() == [3.0] * 4 if is_recorded else found.isnan().all()


def test_copies_to_pinned_memory_are_there_later():
    pinned, plain = torch.zeros(4, pin_memory=True), torch.zeros(4)
    assert pinned.is_pinned() and not plain.is_pinned()
    busy(50)
    y = torch.ones(4, device=KIND)
    pinned.copy_(y, non_blocking=True)
    assert pinned.tolist() == [0.0] * 4
    plain.copy_(y, non_blocking=True)  # waits
    assert plain.tolist() == pinned.tolist() == [1.0] * 4


def test_whatever_waits_can_be_made_to_raise():
    x = torch.ones(4, device=KIND)
    busy(50)
    with no_waiting():
        y = (x * 2).sum()
        busy(50)
        with pytest.raises(RuntimeError, match="the host waits"):
            y.item()
        with pytest.raises(RuntimeError, match="the host waits"):
            current().synchronize()
    assert y.item() == 8


def test_an_operator_that_fails_is_reported_by_a_later_call():
    table = torch.ones(3, 2, device=KIND)
    found = torch.nn.functional.embedding(torch.tensor([7], device=KIND), table)
    with pytest.raises(RuntimeError, match="an operator on the test device failed: index out of range"):
        found.cpu()
        torch.accelerator.synchronize()
