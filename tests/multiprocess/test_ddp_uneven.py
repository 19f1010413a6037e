"""Ranks with different numbers of batches: no rank waits forever, and each batch counts once."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.testing import assert_close

from paceline.errors import ConfigError, DeadlineError, PeerLostError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import Branches, bits, gradients, mixed, two_layers

PATHS = ["group", "memory"]


def batches(count: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def sgd(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def reference(model: nn.Module, data: list[list[torch.Tensor]], divide_by: int | None = None) -> nn.Module:
    """Trains one process with the mean over the ranks that still have a batch in each step."""
    alone = copy.deepcopy(model).double()
    for step in range(max(map(len, data))):
        active = [rows[step] for rows in data if step < len(rows)]
        alone.zero_grad()
        for x in active:
            ((alone(x.double()) ** 2).mean() / (divide_by or len(active))).backward()
        sgd(alone)
    return alone


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, bits(model))
    assert all(row == gathered[0] for row in gathered)


def step(ddp: DistributedDataParallel, x: torch.Tensor) -> None:
    ddp.zero_grad()
    (ddp(x) ** 2).mean().backward()
    sgd(ddp.module)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(3, group="gloo")
def test_a_finished_rank_has_no_weight(rank: int, path: str, view: bool) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    # In the first epoch, rank 0 has no data, although its bucket order and buffers are broadcast.
    for counts, steps_along in [((0, 3, 1), False), ((2, 2, 2), False), ((3, 1, 0), True)]:
        data = [batches(count, r) for r, count in enumerate(counts)]
        expected = reference(model, data)
        for x in data[rank]:
            step(ddp, x)
        ddp.finish((lambda: sgd(model)) if steps_along else None)
        assert_same(model, expected)


ENDS = ["finished", "finished, stepping along", "join"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("end", ENDS)
@kept_ranks(2, group="gloo")
def test_backwards_without_data_leave_gradients_as_they_were(
    rank: int, path: str, view: bool, end: str
) -> None:
    """A loop that clears gradients after a step would otherwise add to the next epoch's first gradient."""
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    stepping = (lambda: sgd(model)) if end == "finished, stepping along" else None
    for clears, to_none in ((True, True), (True, False), (False, True)):
        counts = (1, 3) if to_none else (3, 1)
        data = [batches(count, r) for r, count in enumerate(counts)]
        expected = reference(model, data)
        model.zero_grad()
        kept = None
        with ddp.join(divide_by_initial_world_size=False) if end == "join" else contextlib.nullcontext():
            for x in data[rank]:
                if not clears:
                    model.zero_grad()
                (ddp(x) ** 2).mean().backward()
                sgd(model)
                if clears:
                    model.zero_grad(set_to_none=to_none)
            kept = gradients(model)
            of_last = [p.grad for p in model.parameters()]
        if end != "join":
            ddp.finish(stepping)
        assert_same(model, expected)
        for before, (name, now) in zip(of_last, gradients(model).items(), strict=True):
            parameter = model.get_parameter(name)
            assert parameter.grad is before
            assert (now is None) == (kept[name] is None)
            if now is not None:
                assert torch.equal(now, kept[name])
        if clears:  # the next epoch's first gradient
            x = torch.full((1, 4), 1.0 + rank)
            ddp(x).sum().backward()
            assert_close(model[2].bias.grad, torch.ones(2))


@kept_ranks(2, group="gloo")
def test_finish_drops_accumulated_gradients_and_join_keeps_them(rank: int) -> None:
    """torch's Join keeps them, too; finish() is documented to drop them on every rank."""
    for end in ("finished", "join"):
        model = two_layers()
        ddp = DistributedDataParallel(model)
        with ddp.join() if end == "join" else contextlib.nullcontext():
            for x in batches(1 + rank, rank):
                step(ddp, x)
                model.zero_grad()
                with ddp.no_sync():
                    ddp(torch.ones(1, 4)).sum().backward()
        if end == "finished":
            ddp.finish()
        ddp(torch.ones(1, 4)).sum().backward()
        assert_close(model[2].bias.grad, torch.full((2,), 1.0 if end == "finished" else 2.0))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_come_from_the_ranks_that_have_data(rank: int, path: str) -> None:
    model = mixed()
    ddp = DistributedDataParallel(model, reduce_through=path)
    for _ in range(2 * rank):
        ddp(torch.randn(4, 1, 4, 4)).sum().backward()
    ddp.finish()
    assert model.norm.num_batches_tracked == 2
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, bits(model))
    assert gathered[0] == gathered[1]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_globally_unused_parameters_stay_unused_when_a_rank_has_finished(rank: int, path: str) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, reduce_through=path, find_unused_parameters=True)
    ddp(torch.ones(1, 3), "both").sum().backward()
    model.zero_grad()
    if rank == 0:
        ddp(torch.ones(1, 3), "left").sum().backward()
        assert_close(model.left.bias.grad, torch.ones(2))
        assert model.never.bias.grad is None and model.right.bias.grad is None
    ddp.finish()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_weights_and_finished_ranks_together(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    for _ in range(1 + rank):
        ddp.zero_grad()
        with ddp.weight(5):
            ddp(torch.full((1, 4), 1.0 + rank)).sum().backward()
    ddp.finish()
    assert_close(ddp.module[2].bias.grad, torch.ones(2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("divide_by_initial", [True, False])
@kept_ranks(2, group="gloo")
def test_join_divides_as_torchs_does(rank: int, path: str, divide_by_initial: bool) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path)
    for counts in [(4, 1), (1, 3), (2, 2)]:
        data = [batches(count, r) for r, count in enumerate(counts)]
        expected = reference(model, data, 2 if divide_by_initial else None)
        with ddp.join(divide_by_initial_world_size=divide_by_initial):
            for x in data[rank]:
                step(ddp, x)
        assert_same(model, expected)
    with ddp.join(enable=False):
        step(ddp, batches(1, rank)[0])
    if rank == 0:  # after the context, a forward waits for no rank
        ddp.eval()(torch.ones(1, 4))


class Counter(Joinable):
    """Another joinable beside the model; counts the active ranks in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        votes = torch.ones(1)
        dist.all_reduce(votes)
        self.count += votes

    def join_hook(self, **_: Any) -> JoinHook:
        class Hook(JoinHook):
            def main_hook(self) -> None:
                dist.all_reduce(torch.zeros(1))

        return Hook()

    join_device = torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@kept_ranks(2, group="gloo")
def test_join_with_another_joinable_and_no_sync(rank: int) -> None:
    ddp, counter = DistributedDataParallel(two_layers()), Counter()
    data = batches(2 + rank * 2, rank)
    with Join([ddp, counter]):
        for number, x in enumerate(data):
            if number % 2:
                (ddp(x) ** 2).mean().backward()
            else:
                with ddp.no_sync():
                    (ddp(x) ** 2).mean().backward()
            counter()
    assert counter.count == (4 if rank == 0 else 6)


@pytest.mark.parametrize("path", PATHS)
@ranks(3, group="gloo", dies={1: signal.SIGKILL})
def test_training_and_joined_ranks_name_a_killed_rank(rank: int, path: str) -> None:
    """Rank 0 waits in collectives of torch's Join, and rank 2 in its forward."""
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    with pytest.raises(PeerLostError) as caught, ddp.join():
        for number, x in enumerate(batches(1 if rank == 0 else 4, rank)):
            if rank == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(ddp, x)
    assert caught.value.lost == (1,)
    assert "ank 1" in str(caught.value)


@ranks(2, group="gloo", dies={1: signal.SIGKILL})
def test_collectives_outside_of_a_backward_name_a_killed_rank(rank: int) -> None:
    """Checked with sync_buffers() over the process group."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(model, reduce_through="group")
    ddp(torch.randn(3, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        ddp.sync_buffers()
    assert caught.value.lost == (1,)


@kept_ranks(2, group="gloo")
def test_early_termination_raises_everywhere(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    with pytest.raises(RuntimeError, match="exhausted"), ddp.join(throw_on_early_termination=True):
        for x in batches(1 + rank, rank):
            step(ddp, x)


@kept_ranks(2, group=None)
def test_a_process_group_of_paceline_can_finish_but_not_join(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    with pytest.raises(ConfigError, match=r"ddp\.finish\(\)"):
        ddp.join()
    for x in batches(1 + rank, rank):
        step(ddp, x)
    began = time.monotonic()
    ddp.finish()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("fault", ["forward too many", "backward skipped"])
@pytest.mark.parametrize("first", [0, 1])
@kept_ranks(2, group="gloo")
def test_a_rank_out_of_step_in_join_is_named(rank: int, fault: str, first: int) -> None:
    """Rank 1 waits in its next forward, rank 0 at the end of its backward; either may raise first."""
    model = two_layers()
    ddp = DistributedDataParallel(model, timeout_s=1.0 if rank == first else 60.0)
    assert ddp.gradient_path == "memory"
    with pytest.raises(DeadlineError) as caught, ddp.join():
        for number, x in enumerate(batches(3, rank)):
            loss = ddp(x).sum()
            if (rank, number) == (1, 1):
                if fault == "backward skipped":
                    continue
                loss = ddp(x).sum()
            loss.backward()
    error = caught.value
    assert error.late == (1,)
    assert "Rank 1 of 2 did not arrive" in error.summary
    at_end, in_forward = error.seen.splitlines()
    assert at_end.startswith("rank 0 ")
    assert at_end.endswith("waits at the end of a backward; in backward of iteration 2")
    assert in_forward.startswith("rank 1 ") and "waits in all_reduce(" in in_forward
    assert in_forward.endswith("in forward 2 of iteration 2")
