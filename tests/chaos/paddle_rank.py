"""Paddle's side of a rank: the model, and who averages its gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paceline.paddle import DataParallel
from tests.chaos.plans import Plan
from tests.chaos.rank import Array, uneven_batches
from tests.chaos.reference import LEARNING_RATE, MOMENTUM, batch, first_weights
from tests.chaos.strikes import Striker
from tests.differential.paddle_subjects import Groups

_FORMING_S = 60.0


class Model(nn.Layer):
    """Three layers with tanh between them, of which one rank's may be another."""

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


class PaddleTrainer:
    """Trains with Paceline in one of its ways; arguments as those of torch's."""

    def __init__(self, plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> None:
        warnings.simplefilter("default")
        self._plan, self._rank, self._job, self._folder = plan, rank, job, folder
        self._striker = striker
        self._model = Model(plan.job.width, striker)
        self._group: Any = None
        self._wrapped: Any = None

    def form(self) -> None:
        import paceline

        world_size, timeout_s = self._plan.job.world_size, self._plan.timeout_s
        if self._plan.job.way == "memory":
            self._group = paceline.init(
                rank=self._rank,
                world_size=world_size,
                job_id=self._job,
                timeout_s=timeout_s,
                forming_timeout_s=timeout_s if self._plan.fault.place == "start" else _FORMING_S,
            )
        else:
            Groups(self._rank, world_size, self._job, self._folder).paddle()

    def wrap(self) -> None:
        job = self._plan.job
        options: dict[str, Any] = {"gradient_as_bucket_view": job.style == "view"}
        if job.style == "tiny":
            options["bucket_cap_mb"] = 1e-6
        if job.way == "memory":
            options["group"] = self._group
        else:
            options["reduce_through"] = "group"
        self._wrapped = DataParallel(
            self._model, timeout_s=self._plan.timeout_s, nonfinite="raise", **options
        )
        self._optimizer = paddle.optimizer.Momentum(
            LEARNING_RATE, MOMENTUM, parameters=self._model.parameters()
        )

    def whole(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def batches(self, count: int, step: Any) -> Iterable[int]:
        return uneven_batches(count, self._wrapped, self._plan.job.style, step)

    def clear(self) -> None:
        self._optimizer.clear_grad()

    def forward(self, step: int, micro: int) -> paddle.Tensor:
        self._model.number = step
        inputs, targets = map(paddle.to_tensor, batch(self._rank, step, micro))
        return nn.functional.mse_loss(self._wrapped(inputs), targets)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        context: contextlib.AbstractContextManager[object] = self._wrapped.no_sync()
        return context

    def step(self) -> None:
        self._striker.at("in the step", self._model.number)
        self._optimizer.step()

    def weights(self) -> list[Array]:
        found = []
        for name in ("first", "middle", "last"):
            layer = getattr(self._model, name)
            found += [np.array(layer.weight), np.array(layer.bias)]
        return found


def make_trainer(plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> PaddleTrainer:
    """What `rank.py` runs."""
    return PaddleTrainer(plan, rank, job, folder, striker)
