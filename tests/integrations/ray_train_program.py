"""Trains on two workers of Ray Train, with its `prepare_model`: with torch's DDP and with Paceline's.

python -m tests.integrations.ray_train_program FOLDER

Writes FOLDER/config-RANK.json from a run with `torch_config=PacelineConfig()`, FOLDER/RANK.json from the
example with torch's class replaced in the workers, and FOLDER/refused.txt.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.train.torch
import torch
import torch.nn.parallel.distributed  # its class is never replaced
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import ConfigError, PeerLostError
from paceline.integrations.ray_train import PacelineConfig
from paceline.rendezvous.secret import find_secret

EXAMPLE = Path(__file__).parents[2] / "examples" / "trainers" / "ray_digits.py"
EPOCHS = 4


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def trained(**arguments: Any) -> dict[str, Any]:
    """Train with the class in which `prepare_model` wraps; return the losses of this worker."""
    model = ray.train.torch.prepare_model(network(), parallel_strategy_kwargs=arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=made)
    data = TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=made))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    losses = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "wrapper": type(model).__module__}


def with_torchs_class() -> dict[str, Any]:
    """Train as Ray does without Paceline: `prepare_model` wraps in torch's class."""
    where = ray.train.torch.prepare_model.__module__
    theirs = torch.nn.parallel.distributed.DistributedDataParallel
    with mock.patch(f"{where}.DistributedDataParallel", theirs):
        return trained()


def error_of_another_rank() -> str:
    """The error of rank 0 when rank 1's function raises within Paceline's context; "" on rank 1."""
    model = ray.train.torch.prepare_model(network())
    if ray.train.get_context().get_world_rank() == 1:
        context = PacelineConfig().train_func_context()
        with contextlib.suppress(ValueError), context:
            raise ValueError("no such file: data.bin")
        return ""
    try:
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
    except PeerLostError as error:
        return str(error)
    return "it raised nothing"


def train(config: dict[str, Any]) -> None:
    found: dict[str, Any] = {"theirs": with_torchs_class(), "ours": trained()}
    found["arguments"] = trained(nonfinite="raise")
    key = find_secret().key.decode()
    found["secret"] = [key, key in repr(dict(os.environ))]
    found["raised"] = error_of_another_rank()
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"config-{rank}.json").write_text(json.dumps(found))


def what_refuses_the_first_version() -> str:
    try:
        with mock.patch.dict(os.environ, RAY_TRAIN_V2_ENABLED="0"):
            PacelineConfig()
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    (folder / "refused.txt").write_text(what_refuses_the_first_version())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        torch_config=PacelineConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray")),
    ).fit()
    sys.argv[1:] = ["--epochs", "1", "--ddp", "replaced", "--report", str(folder)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    ray.shutdown()


if __name__ == "__main__":
    main()
