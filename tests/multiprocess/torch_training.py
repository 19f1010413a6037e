"""A small model, trained by one process or by several, for tests that compare the two."""

from __future__ import annotations

import torch
from torch import nn

STEPS, ROWS = 3, 4


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
