"""The compression hooks: means and kept errors add up to the true means, with the same bits on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ModelMismatchError
from paceline.torch import DistributedDataParallel
from paceline.torch.compression import (
    Bf16Compression,
    EightBitCompression,
    Fp16Compression,
    bf16_hook,
    eight_bit_hook,
    fp16_hook,
)
from tests.harness import kept_ranks, ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group

KINDS = [(Fp16Compression, fp16_hook), (Bf16Compression, bf16_hook), (EightBitCompression, eight_bit_hook)]
# The largest rounding error, relative to a value or to the largest value of its block.
UNITS = {Fp16Compression: 2.0**-11, Bf16Compression: 2.0**-8, EightBitCompression: 1 / 254}

LARGEST = 0.3  # more than any rank's largest gradient


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 7))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net(x).pow(2).mean()


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def true_mean(net: nn.Module, step: int, weights: list[float]) -> torch.Tensor:
    """The mean of all ranks' gradients, computed in float64 in one process."""
    precise = copy.deepcopy(net).double()
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    for rank, weight in enumerate(weights):
        loss = loss_of(precise, batch(step, rank).double())
        total += weight * flat(torch.autograd.grad(loss, list(precise.parameters())))
    return total / sum(weights)


def kept(state: Any, net: nn.Module, weights: list[float]) -> torch.Tensor:
    """What the means lack because ranks keep it as error feedback, summed over ranks."""
    missing = flat(state.error_of(p) for p in net.parameters()) * weights[dist.get_rank()] / sum(weights)
    dist.all_reduce(missing)
    return missing


def assert_same_bits_everywhere(gradients: torch.Tensor) -> None:
    rows = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, gradients)
    assert all(torch.equal(row, gradients) for row in rows)


def check_sum_of_means(make: Any, hook: Any, rank: int, weights: list[float]) -> None:
    net = model()
    ddp = DistributedDataParallel(
        net, bucket_cap_mb=0.001
    )  # several buckets, with a new plan after a backward
    state = make()
    ddp.register_comm_hook(state, hook)
    received = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    true = torch.zeros_like(received)
    for step in range(8):
        ddp.zero_grad()
        with ddp.weight(weights[rank]):
            loss_of(ddp, batch(step, rank)).backward()
        gradients = flat(p.grad for p in net.parameters())
        assert_same_bits_everywhere(gradients)
        received += gradients
        true += true_mean(net, step, weights)
        assert_close(received + kept(state, net, weights), true, rtol=2e-6, atol=2e-7)
    missing = kept(state, net, weights).abs().max()
    assert 0 < missing < 2 * LARGEST * UNITS[make]  # the error of one step, not the sum of eight
    assert len(state._codes._buckets) > 1


@kept_ranks(2, group="gloo")
def test_what_is_received_and_what_is_kept_add_up_to_the_true_means(rank: int) -> None:
    for make, hook in KINDS:
        check_sum_of_means(make, hook, rank, [1.0, 1.0])


@needs_backend
@ranks(3, group=None)
def test_weighted_means_over_our_backend(rank: int) -> None:
    with torch_group(rank):
        for make, hook in KINDS:
            check_sum_of_means(make, hook, rank, [700.0, 0.5, 40.0])
            check_changing_weights(make, hook, rank)


def check_changing_weights(make: Any, hook: Any, rank: int) -> None:
    net = model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(make(), hook)
    tokens = [[700.0, 20.0, 300.0], [5.0, 0.0, 9.0], [0.0, 0.0, 4.0], [90.0, 80.0, 1.0], [3.0, 3.0, 3.0]]
    for step, weights in enumerate(tokens):
        ddp.zero_grad()
        with ddp.weight(weights[rank]):
            loss_of(ddp, batch(step, rank)).backward()
        gradients = flat(p.grad for p in net.parameters())
        assert_same_bits_everywhere(gradients)
        difference = (gradients - true_mean(net, step, weights)).abs().max()
        assert difference < 4 * LARGEST * UNITS[make]


def gradients_of(ddp: Any, state: Any, hook: Any, rank: int) -> torch.Tensor:
    ddp.register_comm_hook(state, hook)
    loss_of(ddp, batch(0, rank)).backward()
    return flat(p.grad for p in ddp.module.parameters())


@needs_backend
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@kept_ranks(2, group=None)
def test_16_bit_hooks_match_torchs_up_to_rounding(rank: int) -> None:
    with torch_group(rank):
        for make, hook, theirs in (
            (Fp16Compression, fp16_hook, default_hooks.fp16_compress_hook),
            (Bf16Compression, bf16_hook, default_hooks.bf16_compress_hook),
        ):
            ours = gradients_of(DistributedDataParallel(model()), make(), hook, rank)
            other = gradients_of(DistributedDataParallel(model()), None, theirs, rank)
            true = true_mean(model(), 0, [1.0, 1.0])
            assert_close(ours, other, rtol=4 * UNITS[make], atol=1e-4 * float(true.abs().max()))
            assert (ours - true).norm() < (other - true).norm()  # rounded once, theirs twice


@kept_ranks(2, group="gloo")
def test_nonfinite_values_arrive_and_are_gone_in_the_next_step(rank: int) -> None:
    for make, hook in KINDS:
        state = make()
        ddp = DistributedDataParallel(nn.Linear(8, 2, bias=False), nonfinite="ignore")
        ddp.register_comm_hook(state, hook)
        bad = torch.ones(1, 8)
        if rank == 1:
            bad[0, 2], bad[0, 5] = float("nan"), float("inf")
        for x in (torch.full((1, 8), 0.7), bad, torch.ones(1, 8)):
            ddp.zero_grad()
            ddp(x).sum().backward()
            columns = [2, 5] if x is bad else []
            expected = torch.ones(2, 8, dtype=torch.bool)
            expected[:, columns] = False
            assert torch.equal(torch.isfinite(ddp.module.weight.grad), expected), make
            assert torch.isfinite(state.error_of(ddp.module.weight)).all()
        assert_close(ddp.module.weight.grad, torch.ones(2, 8), rtol=2 * UNITS[make], atol=2 * UNITS[make])


class Numbers(nn.Module):
    """A double-precision parameter, a complex one, one of bfloat16, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.double_ = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(4))
        self.complex_ = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_real(self.complex_ * torch.complex(x, 2 * x))
        return (self.double_ * x).sum() + turned.sum() + (self.short * x).sum()


@kept_ranks(2, group="gloo")
def test_other_kinds_of_parameters_and_wrong_ones(rank: int) -> None:
    for make, hook in KINDS:
        net = Numbers()
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        ddp.register_comm_hook(make(), hook)
        x = torch.tensor(1.0 + 2 * rank)
        ddp(x).backward()
        expected = torch.autograd.grad(net(torch.tensor(2.0)), [net.double_, net.complex_, net.short])
        found = [net.double_.grad, net.complex_.grad, net.short.grad]
        assert_close(found, list(expected), rtol=2 * UNITS[make], atol=0)
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(Fp16Compression(), bf16_hook)
    with pytest.raises(TypeError, match="an instance of Bf16Compression"):
        ddp(batch(0, rank)).sum().backward()
    kind, other = KINDS[rank]
    with pytest.raises(ModelMismatchError, match="communication hook differs"):
        DistributedDataParallel(model()).register_comm_hook(kind(), other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@kept_ranks(1, group="gloo", deadline_s=240)
def test_torchs_own_wrapper_is_refused(rank: int) -> None:
    theirs = TorchDDP(nn.Linear(2, 2))
    theirs.register_comm_hook(Fp16Compression(), untyped)
    with pytest.raises(TypeError, match="needs a bucket of paceline"):
        theirs(torch.ones(1, 2)).sum().backward()


def untyped(state: Any, bucket):  # type: ignore[no-untyped-def]
    return fp16_hook(state, bucket)
