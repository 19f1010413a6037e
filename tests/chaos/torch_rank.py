"""torch's side of a rank: the model, and its wrapper."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch's DDP imports it in its first forward: a second, in every fork
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.torch import DistributedDataParallel, backend
from tests.chaos.plans import Plan
from tests.chaos.rank import FORMING_S, Array, Trainer
from tests.chaos.reference import LEARNING_RATE, MOMENTUM, batch, first_weights
from tests.chaos.strikes import Striker
from tests.several_hosts import be_on_host, send_values


class Model(nn.Module):
    """Three layers with tanh between them; one rank's model may differ."""

    def __init__(self, width: int, striker: Striker) -> None:
        super().__init__()
        self._striker = striker
        self.step = -1
        change = striker.model_change()
        weights = first_weights(width)
        names = ["first", "middle", "last"]
        layers = {}
        for name, matrix, bias in zip(names, weights[::2], weights[1::2]):
            rows, columns = matrix.shape
            layers[name] = nn.Linear(rows + (change == "another shape" and name == "middle"), columns)
            if layers[name].in_features == rows:
                with torch.no_grad():
                    layers[name].weight.copy_(torch.from_numpy(matrix).t())
                    layers[name].bias.copy_(torch.from_numpy(bias))
        for name in names[::-1] if change == "another order" else names:
            self.add_module(name, layers[name])
        if change == "a layer more":
            self.more = nn.Linear(3, 3)
        if change == "another dtype":
            self.middle.double()
        if change == "a frozen weight":
            self.middle.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        self._striker.at("in forward", self.step)
        if hidden.requires_grad:
            step = self.step
            hidden.register_hook(lambda _: self._striker.at("in backward", step))
        hidden = torch.tanh(self.middle(hidden))
        if self._striker.changes("NaN", self.step):
            hidden = hidden * float("nan")
        out: torch.Tensor = self.last(hidden)
        return out


class TorchTrainer(Trainer):
    """Trains with one variant of Paceline, or with torch's own DDP."""

    def __init__(self, plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> None:
        torch.set_num_threads(1)
        warnings.simplefilter("default")
        super().__init__(plan, rank, job, folder, striker)
        self._model = Model(plan.job.width, striker)
        self._group: Any = None

    def form(self) -> None:
        job, timeout_s = self.plan.job, self.plan.timeout_s
        if job.launcher:
            if job.way != "environment":
                dist.init_process_group("gloo", timeout=timedelta(seconds=FORMING_S))
            return
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(self.rank))
        os.environ.update(LOCAL_WORLD_SIZE=str(job.world_size), PACELINE_JOB_ID=self.job)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        if job.way == "memory":
            self._group = self.group_in_memory()
        elif job.way != "environment":
            # Twice the time-out, so that the wrapper is the first to give up: torch's own calls report a late
            # rank in torch's words.
            store = dist.FileStore(str(self.folder / "store"), job.world_size)
            timeout = timedelta(seconds=2 * timeout_s)
            if job.way == "backend":
                backend.register()
            name = "paceline" if job.way == "backend" else "gloo"
            dist.init_process_group(
                name, store=store, rank=self.rank, world_size=job.world_size, timeout=timeout
            )

    def wrap(self) -> None:
        job, timeout_s = self.plan.job, self.plan.timeout_s
        options: dict[str, Any] = {"gradient_as_bucket_view": job.style == "view"}
        if job.style == "tiny":
            options["bucket_cap_mb"] = 1e-6
        if job.way == "torch":
            self.wrapped = TorchDDP(self._model, **options)
        else:
            is_alone = job.way in ("gloo", "backend", "hosts alone") and not job.launcher
            through = "group" if is_alone else "auto"
            if (number := job.host_of(self.rank)) is not None:
                be_on_host(number)
                send_values(of_small_models=job.style == "view")
            self.wrapped = DistributedDataParallel(
                self._model,
                process_group=self._group,
                timeout_s=timeout_s,
                nonfinite="raise",
                reduce_through=through,
                **options,
            )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._optimizer.register_step_pre_hook(lambda *_: self.striker.at("in the step", self._model.step))

    def clear(self) -> None:
        self._optimizer.zero_grad()

    def forward(self, step: int, micro: int) -> torch.Tensor:
        self._model.step = step
        inputs, targets = map(torch.from_numpy, batch(self.rank, step, micro))
        return nn.functional.mse_loss(self.wrapped(inputs), targets)

    def step(self) -> None:
        self._optimizer.step()

    def evaluate(self, step: int) -> None:
        inputs, _ = map(torch.from_numpy, batch(self.rank, step, 0))
        self._model.step = -1
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(inputs)
            self.striker.at("in evaluation", step)
        self.wrapped.train()
        self._model.step = step

    def save(self, path: Path, strike: Callable[[], None]) -> None:
        state = {"model": self.wrapped.state_dict(), "optimizer": self._optimizer.state_dict()}
        strike()
        torch.save(state, path)

    def weights(self) -> list[Array]:
        found = []
        for name in ("first", "middle", "last"):
            layer = getattr(self._model, name)
            found += [np.array(layer.weight.detach().t()), np.array(layer.bias.detach())]
        return found


def make_trainer(plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> TorchTrainer:
    """The trainer that `rank.py` runs."""
    return TorchTrainer(plan, rank, job, folder, striker)


def destroy() -> None:
    """The end of a script after training."""
    if dist.is_initialized():
        dist.destroy_process_group()
