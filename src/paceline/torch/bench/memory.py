"""A rank whose memory is watched from outside while it trains."""

from __future__ import annotations

import torch
from torch import nn

from paceline.torch.bench.step import Step


class Memory(Step):
    """Trains four layers of 16 MiB on single samples: gradients dwarf activations."""

    def build(self) -> int:
        """Make the bare model; bytes of its gradients."""
        self._inputs, self._targets = torch.randn(2, 1, 2048)
        # Loads all the code that a step needs, so that it is not counted.
        self._use(nn.Sequential(nn.Linear(2048, 1), nn.Linear(1, 2048)))
        torch.manual_seed(0)
        self._bare = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
        return sum(parameter.numel() * parameter.element_size() for parameter in self._bare.parameters())

    def train(self, steps: int) -> None:
        """Wrap it and train."""
        self._use(self._bare)
        for _ in range(steps):
            self._step()

    def _use(self, module: nn.Module) -> None:
        self._module = self._wrap(module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._step()
