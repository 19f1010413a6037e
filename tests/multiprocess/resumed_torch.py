"""A training run with torch that can be stopped and resumed, for tests of training states and checkpoints."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from paceline.data import DistributedBatchSampler
from paceline.torch import DistributedDataParallel, ShardedOptimizer

LENGTH, GLOBAL_BATCH, WIDTH = 28, 4, 6  # seven steps an epoch
RUNNING_MEAN = "*running_mean"


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


class Run:
    """One rank of the run. It draws dropout from torch, and noise on its input from numpy and Python."""

    def __init__(
        self,
        world_size: int,
        rank: int,
        group: Any,
        *,
        sharded: bool = False,
        workers: int = 0,
        width: int = 16,
        **options: Any,
    ) -> None:
        model = nn.Sequential(
            nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2)
        )
        self.ddp = DistributedDataParallel(model, process_group=group, **options)
        if sharded:
            self.optimizer: Any = ShardedOptimizer(
                self.ddp.parameters(), optim.Adam, process_group=group, lr=0.05
            )
        else:
            self.optimizer = optim.Adam(self.ddp.parameters(), lr=0.05)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.sampler = DistributedBatchSampler(
            range(LENGTH),
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            global_batch_size=GLOBAL_BATCH,
        )
        self.loader = DataLoader(
            Samples(), batch_sampler=self.sampler, num_workers=workers, generator=torch.Generator()
        )
        for name in ("optimizer", "scheduler", "sampler"):
            self.ddp.register_state(name, getattr(self, name))
        self._batches = self._forever()

    def _forever(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def step(self) -> float:
        x = next(self._batches) * (1 + 0.1 * np.random.rand()) + 0.1 * random.random()
        loss = self.ddp(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.commit()
        return float(loss.detach())

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def digest(self) -> str:
        """SHA-256 of all values of the model."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.ddp.module.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def statistic(self) -> np.ndarray:
        return self.ddp.module[1].running_mean.numpy().copy()


def save(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)
