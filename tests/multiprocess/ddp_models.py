"""Small models, data and references for the tests of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Mixed(nn.Module):
    """Convolution, batch norm, a frozen layer, a double-precision head, and a parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.shared = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(48, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = self.shared(self.shared(x.flatten(2)) + self.frozen(x.flatten(2)))
        return self.head(x.flatten(1).double())


class Branches(nn.Module):
    """Uses the layer that the caller names; the third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)
        self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        outputs = {"left": lambda: self.left(x), "right": lambda: self.right(x)}
        if branch == "both":
            return self.left(x) + self.right(x)
        if branch == "none":
            return x * 1
        return outputs[branch]()


class Blocked(torch.autograd.Function):
    """Its backward returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def two_layers(width: int = 5) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def mixed() -> Mixed:
    torch.manual_seed(1)
    return Mixed()


def share(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return tensor.chunk(world_size)[rank]


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def train(model: nn.Module, x: torch.Tensor, steps: int = 3, *, set_to_none: bool = True) -> None:
    """A few steps of plain SGD on the mean of the squared outputs.

    Without a torch optimizer: the first one of a process makes torch import its compiler, for seconds.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    for step in range(steps):
        model.zero_grad(set_to_none=set_to_none)
        (model(x + 0.1 * step) ** 2).mean().backward()
        with torch.no_grad():
            for parameter in trainable:
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad


def bits(module: nn.Module) -> list[bytes]:
    """All parameters and buffers, as bytes."""
    return [value.detach().numpy().tobytes() for value in module.state_dict().values()]
