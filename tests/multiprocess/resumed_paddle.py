"""A training run with Paddle that can be stopped and resumed; see resumed_torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator
from paddle.utils import unique_name

from paceline.data import DistributedBatchSampler
from paceline.paddle import DataParallel, ShardedOptimizer

LENGTH, GLOBAL_BATCH, WIDTH = 28, 4, 6
RUNNING_MEAN = "*_mean"


class Samples(paddle.io.Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)


def seed(number: int) -> None:
    paddle.seed(number)
    np.random.seed(number)
    random.seed(number)


class Run:
    """One rank of the run."""

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
        # Names of layers and, from the first step on, of the optimizer's state are those of a new process.
        self._names = UniqueNameGenerator()
        with unique_name.guard(self._names):
            model = nn.Sequential(
                nn.Linear(WIDTH, width),
                nn.BatchNorm1D(width),
                nn.ReLU(),
                nn.Dropout(0.3),
                nn.Linear(width, 2),
            )
            self.ddp = DataParallel(model, group=group, **options)
            self.scheduler = paddle.optimizer.lr.StepDecay(0.05, 3, 0.5)
            if sharded:
                self.optimizer: Any = ShardedOptimizer(
                    model.parameters(),
                    paddle.optimizer.Adam,
                    group=group,
                    learning_rate=self.scheduler,
                )
            else:
                self.optimizer = paddle.optimizer.Adam(
                    learning_rate=self.scheduler, parameters=model.parameters()
                )
        self.sampler = DistributedBatchSampler(
            range(LENGTH),
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            global_batch_size=GLOBAL_BATCH,
        )
        self.loader = paddle.io.DataLoader(Samples(), batch_sampler=self.sampler, num_workers=workers)
        for name in ("optimizer", "scheduler", "sampler"):
            self.ddp.register_state(name, getattr(self, name))
        self._batches = self._forever()

    def _forever(self) -> Iterator[paddle.Tensor]:
        while True:
            yield from self.loader

    def step(self) -> float:
        batch = next(self._batches)
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        x = x * (1 + 0.1 * float(np.random.rand())) + 0.1 * random.random()
        loss = self.ddp(x).square().sum()
        loss.backward()
        with unique_name.guard(self._names):
            self.optimizer.step()
        self.optimizer.clear_grad()
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
        return self.ddp.module[1]._mean.numpy().copy()


def save(state: dict[str, Any], path: Path) -> None:
    paddle.save(state, str(path))


def load(path: Path) -> Any:
    return paddle.load(str(path))
