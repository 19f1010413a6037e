"""Ranks whose samplers end at different times train like one process with the whole global batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import DistributedBatchSampler, DistributedSampler, EvaluationSampler
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import bits, two_layers

LENGTH = 13
# Global batches of 4 samples: rank 0 has 2, 2, 2, 1 and rank 1 has 2, 2, 2. Global batches of 3 samples: 2
# and 1 samples in each step, and then 1 on rank 0 alone.
STEPS = {"samples": (4, 3), "batches": (5, 4)}
EPOCHS = 2


def data() -> TensorDataset:
    return TensorDataset(torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(3)))


def loader_of(kind: str, world_size: int, rank: int) -> DataLoader[Any]:
    if kind == "samples":
        sampler = DistributedSampler(data(), world_size, rank, seed=1, pad=False)
        return DataLoader(data(), 4 // world_size, sampler=sampler)
    batches = DistributedBatchSampler(
        data(), None, world_size, rank, True, seed=1, pad=False, global_batch_size=3
    )
    return DataLoader(data(), batch_sampler=batches)


def sgd(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def one_process(model: nn.Module, kind: str) -> nn.Module:
    alone = copy.deepcopy(model).double()
    loader = loader_of(kind, 1, 0)
    for _ in range(EPOCHS):
        for (x,) in loader:
            alone.zero_grad()
            (alone(x.double()) ** 2).mean().backward()
            sgd(alone)
    return alone


@pytest.mark.parametrize("kind", ["samples", "batches"])
@kept_ranks(2, group="gloo")
def test_finish_and_iterate_end_an_epoch_without_padding(rank: int, kind: str) -> None:
    model = two_layers()
    expected = one_process(model, kind)
    ddp = DistributedDataParallel(model)
    loader = loader_of(kind, 2, rank)
    steps = 0
    for _ in range(EPOCHS):
        by_hand = kind == "samples"
        for (x,) in loader if by_hand else ddp.iterate(loader):
            ddp.zero_grad()
            with ddp.weight(len(x)):
                (ddp(x) ** 2).mean().backward()
            sgd(model)
            steps += 1
        if by_hand:
            ddp.finish()
    assert steps == EPOCHS * STEPS[kind][rank]
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    gathered: list[Any] = [None] * 2
    dist.all_gather_object(gathered, bits(model))
    assert gathered[0] == gathered[1]
    # Each prediction comes once, in order.
    sampler = EvaluationSampler(data())
    with torch.no_grad():
        rows = [ddp.module(x) for (x,) in DataLoader(data(), 2, sampler=sampler)]
        truth = model(data().tensors[0])
    assert_close(torch.from_numpy(sampler.gather(rows)), truth)


@kept_ranks(2, group="gloo")
def test_join_ends_an_epoch_without_padding(rank: int) -> None:
    model = two_layers()
    expected = one_process(model, "samples")
    ddp = DistributedDataParallel(model)
    loader = loader_of("samples", 2, rank)
    for _ in range(EPOCHS):
        with ddp.join(divide_by_initial_world_size=False):
            for (x,) in loader:
                ddp.zero_grad()
                with ddp.weight(len(x)):
                    (ddp(x) ** 2).mean().backward()
                sgd(model)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
