"""`paceline.torch.empty`: tensors in the memory that ranks share."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import paceline.torch
from paceline.errors import ConfigError, MismatchError, RegionError
from tests.harness import ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group

pytestmark = needs_backend

SHAPES = [(), (0,), (3, 0, 2), (5, 7), (70_001,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int8, torch.bool]


@ranks(2, group=None)
def test_tensors_act_like_ordinary_ones_and_give_the_same_sums(rank):
    with torch_group(rank) as group:
        for shape in SHAPES:
            for dtype in DTYPES:
                tensor = paceline.torch.empty(*shape, dtype=dtype, group=group)
                assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
                assert tensor.is_cpu and not tensor.requires_grad and not tensor.any()
        assert paceline.torch.empty([2, 3]).shape == (2, 3)
        assert paceline.torch.empty(4).dtype is torch.get_default_dtype()
        generator = torch.Generator().manual_seed(rank)
        for count in (3, 1_000, 300_000):
            for dtype in (torch.float32, torch.bfloat16):
                ordinary = torch.randn(count, generator=generator).to(dtype)
                shared = paceline.torch.empty(count, dtype=dtype)
                shared.copy_(ordinary)
                for tensor in (ordinary, shared):
                    dist.all_reduce(tensor)
                assert torch.equal(ordinary, shared)
                parts = [torch.empty(0)] * 2
                for i, tensor in enumerate((ordinary, shared)):
                    parts[i] = torch.empty(2, count, dtype=dtype)
                    dist.all_gather(list(parts[i]), tensor)
                assert torch.equal(*parts)


@ranks(2, group=None)
def test_memory_is_freed_with_the_last_view(rank):
    with torch_group(rank):
        kept = paceline.torch.empty(10)[3:5]
        for step in range(200):  # of 16 MiB each: 3.1 GiB if no memory were freed
            tensor = paceline.torch.empty(1 << 22)
            tensor[step] = 1
        kept += rank
        dist.all_reduce(kept)
        assert kept.tolist() == [1, 1]
        with pytest.raises(RegionError):
            paceline.torch.empty(1 << 50)
        dist.barrier()  # the group still works


@ranks(2, group=None)
def test_it_is_a_collective_of_the_group(rank):
    with torch_group(rank):
        work = dist.all_reduce(before := torch.full((100_000,), 1.0), async_op=True)
        paceline.torch.empty(5)
        work.wait()
        assert before.unique().tolist() == [2]
        with pytest.raises(MismatchError, match="allocate"):
            paceline.torch.empty(5 + rank)
        ours, theirs = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
        tensor = paceline.torch.empty(2, group=ours).fill_(1)
        dist.all_reduce(tensor, group=ours)
        assert tensor.tolist() == [2, 2]
        with pytest.raises(ConfigError, match="gloo"):
            paceline.torch.empty(2, group=theirs)
