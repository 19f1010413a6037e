"""torch's DDP, functional collectives and sub-groups on the paceline backend."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import paceline.torch as ours
from paceline.errors import ConfigError, PeerLostError
from tests.harness import ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group
from tests.multiprocess.torch_training import model, reference, train

pytestmark = needs_backend

# Renamed in torch 2.13.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@ranks(2, group=None)
def test_stock_ddp_trains_like_one_process(rank):
    with torch_group(rank):
        net = model().double()
        train(DistributedDataParallel(net, bucket_cap_mb=0.002), rank, 2)
        found = [parameter.detach() for parameter in net.parameters()]
        torch.testing.assert_close(found, reference(2))
        dist.all_gather_object(by_rank := [None, None], found)
        assert all(torch.equal(a, b) for a, b in zip(*by_rank, strict=True))


@ranks(2, group=None, dies={1: signal.SIGKILL})
def test_stock_ddp_raises_when_a_rank_is_killed(rank):
    with torch_group(rank):
        net = DistributedDataParallel(model())
        net(torch.ones(1, 10)).sum().backward()
        loss = net(torch.ones(1, 10)).sum()
        if rank == 1:
            signal.raise_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="Rank 1 of 2 died"):
            loss.backward()


@ranks(3, group=None, dies={1: signal.SIGKILL})
def test_pacelines_ddp_over_the_backend_names_a_killed_rank(rank):
    with torch_group(rank):
        net = ours.DistributedDataParallel(model(), reduce_through="group")
        net(torch.ones(1, 10)).sum().backward()
        loss = net(torch.ones(1, 10)).sum()
        if rank == 1:
            signal.raise_signal(signal.SIGKILL)
        with pytest.raises(PeerLostError, match="Rank 1 of 3 died") as caught:
            loss.backward()
        assert caught.value.lost == (1,)
        assert f"rank {rank} of 3, " in caught.value.where and "paceline process group" in caught.value.where


@ranks(3, group=None)
def test_functional_collectives_and_subgroups(rank):
    with torch_group(rank) as world:
        assert functional.all_reduce(torch.ones(3), "sum", world).tolist() == [3, 3, 3]
        assert _all_gather(torch.full((2,), float(rank)), 0, world).tolist() == [
            0,
            0,
            1,
            1,
            2,
            2,
        ]
        assert _reduce_scatter(torch.ones(6), "avg", 0, world).tolist() == [1, 1]
        assert functional.broadcast(torch.full((2,), float(rank)), 2, world).tolist() == [2, 2]
        swapped = functional.all_to_all_single(torch.full((3,), float(rank)), None, None, world)
        assert swapped.tolist() == [0, 1, 2]

        outer = dist.new_group([2, 0])
        inner = dist.new_group([1])
        group = inner if rank == 1 else outer
        dist.all_reduce(tensor := torch.ones(2), group=group)
        assert tensor.tolist() == ([1, 1] if rank == 1 else [2, 2])
        assert dist.get_backend(group) == "paceline" and dist.get_rank(group) == (0, 0, 1)[rank]
        assert dist.get_process_group_ranks(group) == ([1] if rank == 1 else [0, 2])


@ranks(2, group=None)
def test_coalesced_calls(rank):
    with torch_group(rank):
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as coalesced:
            tensors = [torch.full((3,), float(rank + i)) for i in range(4)]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
        coalesced.wait()
        assert [t.unique().item() for t in tensors] == [1, 3, 5, 7]
        with dist.distributed_c10d._coalescing_manager(
            device=torch.device("cpu"), async_ops=True
        ) as coalesced:
            dist.all_gather(
                gathered := [torch.zeros(1), torch.zeros(1)], torch.full((1,), float(rank)), async_op=True
            )
        coalesced.wait()
        assert [t.item() for t in gathered] == [0, 1]


@ranks(2, group=None)
def test_other_devices_get_their_own_backend(rank):
    """Without a GPU, the backend for its tensors is made, and connects the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        with torch_group(rank, "cpu:paceline,cuda:gloo") as group:
            assert [device.type for device in group._device_types] == ["cpu", "cuda"]
            for make in (dist.all_reduce, lambda t: dist.reduce_scatter(t, [t.clone(), t.clone()])):
                make(tensor := torch.ones(2))
                assert tensor.tolist() == [2, 2]
            with pytest.raises(ConfigError, match="no backend for meta tensors"):
                dist.all_reduce(torch.ones(2, device="meta"))
            backend = group._get_backend(torch.device("cuda"))
            assert isinstance(backend, dist.ProcessGroupGloo)
            backend.allreduce([tensor]).wait()
            assert tensor.tolist() == [4, 4]


@ranks(2, group=None)
def test_ranks_of_a_process_group_share_how_long_they_worked(rank):
    dist.init_process_group("paceline")
    ddp = ours.DistributedDataParallel(torch.nn.Linear(4, 4), reduce_through="group")
    for _ in range(4):
        ddp(torch.ones(1, 4)).sum().backward()
    stats = ddp.stats()
    assert stats.path == "group"
    assert len(stats.worked_s) == 2 and all(seconds > 0 for seconds in stats.worked_s)
    assert sum(stats.times_last) in (2, 3) and len(stats.held_up_s) == 2
    rows = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(rows, torch.tensor(stats.worked_s, dtype=torch.float64))
    assert rows[0].tolist() == rows[1].tolist()
    dist.destroy_process_group()
