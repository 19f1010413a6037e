"""torch's FSDP2 and DeviceMesh on the paceline backend."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness import ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group
from tests.multiprocess.torch_training import model, reference, train

pytestmark = needs_backend


@ranks(2, group=None)
def test_fsdp2_trains_like_one_process(rank):
    with torch_group(rank):
        mesh = init_device_mesh("cpu", (2,))
        net = model().double()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        train(fully_shard(net, mesh=mesh), rank, 2)
        torch.testing.assert_close([p.full_tensor().detach() for p in net.parameters()], reference(2))


@pytest.mark.skipif(torch.__version__ < "2.8", reason="torch before 2.8 cannot do hybrid sharding on a CPU")
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


def test_the_reference_learns():
    """Otherwise the comparisons above would show nothing."""
    before = [parameter.detach() for parameter in copy.deepcopy(model().double()).parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, reference(2), strict=True))
