"""Ranks whose memory is watched from outside while they train."""

from __future__ import annotations

import gc

import torch
from torch import nn

from paceline.torch.bench.step import Step
from paceline.torch.bench.throughput import Training

_WIDTH, _LAYERS = 2048, 4
_WIDE_BYTES = 4 * _LAYERS * (_WIDTH * _WIDTH + _WIDTH)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 1), nn.Linear(1, _WIDTH))


class Memory(Step):
    """Trains four layers of 16 MiB on single samples: gradients dwarf activations."""

    def build(self) -> int:
        """Make the bare model; bytes of its gradients."""
        self._inputs, self._targets = torch.randn(2, 1, _WIDTH)
        self._use(_small())  # loads all the code that a step needs, so that it is not counted
        self._bare = wide()
        return _WIDE_BYTES

    def train(self, steps: int) -> None:
        """Wrap it and train."""
        self._use(self._bare)
        for _ in range(steps):
            self._step()

    def _use(self, module: nn.Module) -> None:
        self._module = self._wrap(module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._step()


class TrainingMemory(Training):
    """Trains the same layers with Adam; nothing of the model is there before `train`."""

    def build(self) -> int:
        """Load the code that a step needs; bytes of the parameters that are to be trained."""
        self._inputs, self._targets = torch.randn(2, 1, _WIDTH)
        self._use(_small())
        self._step()
        self._module = self._optimizer = None
        gc.collect()
        return _WIDE_BYTES

    def train(self, steps: int) -> None:
        """Make the model, wrap it and train."""
        self._use(wide())
        for _ in range(steps):
            self._step()
