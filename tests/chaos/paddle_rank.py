"""Paddle's side of a rank: the model, and its wrapper."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paceline.paddle import DataParallel
from tests.chaos.plans import Plan
from tests.chaos.rank import Array, Trainer
from tests.chaos.reference import LEARNING_RATE, MOMENTUM, batch, first_weights
from tests.chaos.strikes import Striker
from tests.differential.paddle_subjects import Groups
from tests.several_hosts import be_on_host


class Model(nn.Layer):
    """Three layers with tanh between them; one rank's model may differ."""

    def __init__(self, width: int, striker: Striker) -> None:
        super().__init__()
        self._striker = striker
        self.number = -1
        change = striker.model_change()
        weights = first_weights(width)
        names = ["first", "middle", "last"]
        layers = {}
        for name, matrix, bias in zip(names, weights[::2], weights[1::2]):
            rows, columns = matrix.shape
            more = int(change == "another shape" and name == "middle")
            layers[name] = nn.Linear(rows + more, columns)
            if not more:
                layers[name].weight.set_value(matrix)
                layers[name].bias.set_value(bias)
        for name in names[::-1] if change == "another order" else names:
            self.add_sublayer(name, layers[name])
        if change == "a layer more":
            self.more = nn.Linear(3, 3)
        if change == "a frozen weight":
            self.middle.weight.stop_gradient = True

    def forward(self, inputs: paddle.Tensor) -> paddle.Tensor:
        hidden = paddle.tanh(self.first(inputs))
        self._striker.at("in forward", self.number)
        if not hidden.stop_gradient:
            number = self.number
            hidden.register_hook(lambda _: self._striker.at("in backward", number))
        hidden = paddle.tanh(self.middle(hidden))
        if self._striker.changes("NaN", self.number):
            hidden = hidden * float("nan")
        return self.last(hidden)


class PaddleTrainer(Trainer):
    """Trains with one variant of Paceline."""

    def __init__(self, plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> None:
        warnings.simplefilter("default")
        super().__init__(plan, rank, job, folder, striker)
        self._model = Model(plan.job.width, striker)
        self._group: Any = None

    def form(self) -> None:
        if self.plan.job.way == "memory":
            self._group = self.group_in_memory()
        else:
            world_size = self.plan.job.world_size
            Groups(self.rank, world_size, self.job, self.folder).paddle()
            # Paddle waits forever for a rank that dies while others still form the group.
            (self.folder / f"formed-{self.rank}").touch()
            while not all((self.folder / f"formed-{rank}").exists() for rank in range(world_size)):
                time.sleep(0.005)

    def wrap(self) -> None:
        job = self.plan.job
        options: dict[str, Any] = {"gradient_as_bucket_view": job.style == "view"}
        if job.style == "tiny":
            options["bucket_cap_mb"] = 1e-6
        if job.way == "memory":
            options["group"] = self._group
        elif job.way != "hosts":
            options["reduce_through"] = "group"
        if (number := job.host_of(self.rank)) is not None:
            be_on_host(number)
        self.wrapped = DataParallel(self._model, timeout_s=self.plan.timeout_s, nonfinite="raise", **options)
        self._optimizer = paddle.optimizer.Momentum(
            LEARNING_RATE, MOMENTUM, parameters=self._model.parameters()
        )

    def clear(self) -> None:
        self._optimizer.clear_grad()

    def forward(self, step: int, micro: int) -> paddle.Tensor:
        self._model.number = step
        inputs, targets = map(paddle.to_tensor, batch(self.rank, step, micro))
        return nn.functional.mse_loss(self.wrapped(inputs), targets)

    def step(self) -> None:
        self.striker.at("in the step", self._model.number)
        self._optimizer.step()

    def evaluate(self, step: int) -> None:
        inputs, _ = map(paddle.to_tensor, batch(self.rank, step, 0))
        self._model.number = -1
        self.wrapped.eval()
        with paddle.no_grad():
            self.wrapped(inputs)
            self.striker.at("in evaluation", step)
        self.wrapped.train()
        self._model.number = step

    def save(self, path: Path, strike: Callable[[], None]) -> None:
        state = {"model": self.wrapped.state_dict(), "optimizer": self._optimizer.state_dict()}
        strike()
        paddle.save(state, str(path))

    def weights(self) -> list[Array]:
        found = []
        for name in ("first", "middle", "last"):
            layer = getattr(self._model, name)
            found += [np.array(layer.weight), np.array(layer.bias)]
        return found


def make_trainer(plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> PaddleTrainer:
    """The trainer that `rank.py` runs."""
    return PaddleTrainer(plan, rank, job, folder, striker)
