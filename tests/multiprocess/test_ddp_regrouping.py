"""A wrapped model that continues with another process group."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.testing import assert_close

from paceline import _core
from paceline.errors import ConfigError, DeadlineError, ModelMismatchError, PeerLostError
from paceline.torch import DistributedDataParallel
from tests.alive import syncs_alive
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import two_layers


def mean_of_ones(ddp: DistributedDataParallel, factor: float) -> torch.Tensor:
    """Returns a gradient that is the mean over ranks of `factor`."""
    ddp.zero_grad()
    (ddp(torch.ones(1, 4)).sum() * factor).backward()
    return ddp.module[2].bias.grad


@ranks(3, group="gloo", dies={2: signal.SIGKILL})
def test_ranks_may_leave_die_and_return(rank: int) -> None:
    pair = dist.new_group([0, 1])
    three, two = torch.full((2,), 2.0), torch.full((2,), 1.5)
    for options in ({"reduce_through": "group"}, {"gradient_as_bucket_view": True}, {}):
        ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=0.00001, **options)
        for _ in range(2):
            assert_close(mean_of_ones(ddp, 1.0 + rank), three)
        late = ddp(torch.ones(1, 4)).sum()
        ddp._update_process_group(pair)
        if rank < 2:
            assert ddp.process_group is pair
            with pytest.raises(ConfigError, match="has another process group now"):
                late.backward()
            del late
            ddp.zero_grad()
            assert syncs_alive() == 1
            for _ in range(2):
                assert_close(mean_of_ones(ddp, 1.0 + rank), two)
        ddp._update_process_group(dist.group.WORLD)
        assert_close(mean_of_ones(ddp, 1.0 + rank), three)
    ddp = DistributedDataParallel(two_layers(), timeout_s=20)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        mean_of_ones(ddp, 1.0 + rank)
    ddp._update_process_group(pair)
    for _ in range(2):
        assert_close(mean_of_ones(ddp, 1.0 + rank), two)
    ddp.register_comm_hook(pair, fp16_compress_hook)
    ddp._update_process_group(pair)
    assert ddp.gradient_path == "group"  # because the hook is still registered
    assert_close(mean_of_ones(ddp, 1.0 + rank), two)


def step(ddp: DistributedDataParallel, rank: int) -> None:
    mean_of_ones(ddp, 1.0 + rank)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= 0.1 * parameter.grad


@kept_ranks(3, group="gloo")
def test_ranks_with_different_histories_must_have_equal_weights(rank: int) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    ddp = DistributedDataParallel(two_layers())
    step(ddp, rank)
    ddp._update_process_group(pair if rank < 2 else alone)
    for _ in range(2):
        step(ddp, rank)
    with pytest.raises(
        ModelMismatchError, match=r"ranks 0-1: weights #1, good backward passes: 3\n"
    ) as caught:
        ddp._update_process_group(dist.group.WORLD)
    assert "rank 2: weights #2, trained alone" in str(caught.value)
    assert caught.value.good_backwards == (3, 3, None)
    for parameter in ddp.parameters():
        dist.broadcast(parameter.detach(), 0)
    assert ddp.module[2].bias.grad is not None
    ddp._update_process_group(dist.group.WORLD)
    assert ddp.module[2].bias.grad is None  # gradients that not all ranks have are dropped
    step(ddp, rank)
    ddp._update_process_group(dist.group.WORLD)
    assert ddp.module[2].bias.grad is not None  # the `BackwardSync` is the same, so gradients are kept
    assert_close(mean_of_ones(ddp, 1.0 + rank), torch.full((2,), 2.0))


@pytest.mark.parametrize("view", [False, True])
@ranks(3, group="gloo")
def test_ranks_agree_after_one_was_stopped_and_continue(rank: int, view: bool) -> None:
    """Rank 1 is stopped after it has claimed a chunk; its later writes reach no other rank's gradients.

    The short timeout is for that rank only: even on a busy machine, no other rank is late by that much.
    """
    pair = dist.new_group([0, 2])
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1000, bias=False)
    warm = DistributedDataParallel(two_layers(), gradient_as_bucket_view=view)  # so that all imports are done
    mean_of_ones(warm, 1.0)
    dist.barrier()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, timeout_s=4)
    dist.barrier()
    if rank == 1:
        _core.arm_fault(_core.fault_points().index("chunk_claimed"), _core.FAULT_ACTIONS["stop"], 1)
    good = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(DeadlineError):
        while True:  # until the deadline passes
            ddp.zero_grad()
            ddp(torch.full((1, 1000), 1.0 + rank)).sum().backward()
            good += 1
    if rank == 1:
        _core.disarm_fault()
    else:
        model.weight.grad.fill_(7.0)
        held = model.weight.grad
        dist.barrier(pair)
        if rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)
    numbers = [torch.zeros_like(good) for _ in range(3)]
    dist.all_gather(numbers, good)  # rank 1 has finished its late writes by now
    assert numbers[0] == numbers[1] == numbers[2]  # although rank 1 completed the missing chunk
    if rank == 1:
        return
    assert model.weight.grad is held and bool((held == 7.0).all())
    ddp._config = replace(ddp._config, timeout_s=None)
    ddp._update_process_group(pair)
    for _ in range(2):
        ddp.zero_grad(set_to_none=False)
        ddp(torch.full((1, 1000), 1.0 + rank)).sum().backward()
        assert_close(model.weight.grad, torch.full((1000, 1000), 2.0))
