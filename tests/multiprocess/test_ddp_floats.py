"""paceline.torch: the same bits on all ranks, whatever one of them has told its processor about floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.test_group_floats import KINDS, delicate, enter

COUNT = 1000
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


class Product(nn.Module):
    """The gradient of its parameter is its input, bit for bit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COUNT, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * x) if x.is_complex() else self.weight * x


def inputs(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Every second one is subnormal, also of the 16-bit type with the range of float32."""
    return torch.from_numpy(delicate(rank, COUNT)).to(dtype)


def mean(dtype: torch.dtype) -> np.ndarray:
    """Rank 1 counts twice."""
    first, second = (inputs(rank, dtype).to(torch.complex128).real.numpy() for rank in range(2))
    return (first + 2 * second) / 3


def assert_same_bits(tensor: torch.Tensor) -> None:
    own = tensor.resolve_conj().view(torch.uint8)
    everybodys = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, own)
    for other in everybodys:
        assert torch.equal(own, other)


@pytest.mark.parametrize("floats", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@ranks(2, group="gloo")
def test_a_mean_of_another_engine_that_is_corrected_has_the_same_bits(rank, floats, dtype):
    ddp = DistributedDataParallel(Product(dtype), reduce_through="group")
    x, expected = inputs(rank, dtype), mean(dtype)
    if rank == 1:
        enter(floats)
    ddp.weight(rank + 1)  # 3 in all, where an equal share of each was expected: all ranks correct the sum
    ddp(x).sum().backward()
    gradient = ddp.module.weight.grad
    assert_same_bits(gradient)
    if rank == 0:
        got = gradient.to(torch.complex128).real.numpy()
        resolution = float(torch.finfo(dtype).eps) * 4
        np.testing.assert_allclose(got[1::2], expected[1::2], rtol=resolution, atol=1e-4 * resolution)


@ranks(2, group="gloo")
def test_a_large_mean_that_is_corrected_by_torchs_threads_has_the_same_bits(rank):
    if rank == 1:
        enter("flushed")
    torch.set_num_threads(2)  # begun only now, and with the floats of this thread
    ddp = DistributedDataParallel(nn.Linear(1000, 200, bias=False), reduce_through="group")
    ddp.weight(rank + 1)
    subnormal = 1e-39 if rank == 0 else 0.0
    (ddp(torch.ones(1, 1000)) * subnormal).sum().backward()
    gradient = ddp.module.weight.grad
    assert_same_bits(gradient)
    assert (gradient.view(torch.int32) != 0).all()


@pytest.mark.parametrize("floats", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2)
def test_the_mean_of_sparse_rows_has_the_same_bits(group, floats, dtype):
    table = nn.Embedding(3, COUNT, sparse=True, dtype=dtype)
    ddp = DistributedDataParallel(table, process_group=group)
    x = inputs(group.rank, dtype)
    if group.rank == 1:
        enter(floats)
    ddp.weight(1 + 0.1 * group.rank)  # the sum of the weights is rounded, too
    (ddp(torch.tensor([1])) * x).sum().backward()
    everybodys = group.all_gather(table.weight.grad.values().view(torch.uint8).numpy())
    np.testing.assert_array_equal(everybodys[0], everybodys[1])
