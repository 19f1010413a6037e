"""torch's own DDP, FSDP2, DeviceMesh and functional collectives on the paceline backend."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.harness import ranks
from tests.multiprocess.torch_groups import torch_group

STEPS, ROWS = 3, 4
# Renamed in torch 2.13.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 1))


def batch(step: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS * world_size, 10, generator=generator, dtype=torch.float64)


def train(net: nn.Module, rank: int | None, world_size: int) -> None:
    """`rank` None: one process with the whole batch."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        rows = batch(step, world_size)
        net(rows if rank is None else rows[rank * ROWS :][:ROWS]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(world_size: int) -> list[torch.Tensor]:
    train(net := model().double(), None, world_size)
    return [parameter.detach() for parameter in net.parameters()]


@ranks(2, group=None)
def test_stock_ddp_trains_as_one_process_does(rank):
    with torch_group(rank):
        net = model().double()
        train(DistributedDataParallel(net, bucket_cap_mb=0.002), rank, 2)
        ours = [parameter.detach() for parameter in net.parameters()]
        torch.testing.assert_close(ours, reference(2))
        dist.all_gather_object(everybodys := [None, None], ours)
        assert all(torch.equal(a, b) for a, b in zip(*everybodys, strict=True))


@ranks(2, group=None)
def test_fsdp2_trains_as_one_process_does(rank):
    with torch_group(rank):
        mesh = init_device_mesh("cpu", (2,))
        net = model().double()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        train(fully_shard(net, mesh=mesh), rank, 2)
        torch.testing.assert_close([p.full_tensor().detach() for p in net.parameters()], reference(2))


@ranks(4, group=None)
def test_device_mesh_of_two_by_two(rank):
    with torch_group(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        for name, expected in (("rows", 2 * (rank % 2) + 2), ("columns", 4 * (rank // 2) + 1)):
            dist.all_reduce(tensor := torch.full((3,), float(rank)), group=mesh.get_group(name))
            assert tensor.tolist() == [expected] * 3
        matrix = torch.arange(64, dtype=torch.float64).view(8, 8)
        sharded = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
        torch.testing.assert_close((sharded @ sharded).full_tensor(), matrix @ matrix)

        # Hybrid: sharded over columns, replicated over rows.
        net = fully_shard(model().double(), mesh=mesh)
        train(net, rank, 4)
        torch.testing.assert_close([p.full_tensor().detach() for p in net.parameters()], reference(4))


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


def test_the_reference_learns():
    """Or the comparisons above would say nothing."""
    before = [parameter.detach() for parameter in copy.deepcopy(model().double()).parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, reference(2), strict=True))
