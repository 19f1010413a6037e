"""The training of two ranks with Lightning: each case with its own strategy and with Paceline's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import PacelineStrategy


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=made)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=made))


class Regression(LightningModule):
    """The module of all cases, some of which override parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        found = nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(found.item())
        return found

    def training_step(self, batch: Any, number: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        self.log("validation", nn.functional.mse_loss(self.model(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Alternating(Regression):
    """Manual optimization: two optimizers and two backwards in a step, all within the wrapper's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss((inputs, targets)))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        halves = self.model[:2], self.model[2:]
        return [torch.optim.SGD(half.parameters(), lr=0.05) for half in halves]


class Partly(Regression):
    """Has parameters that only every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 2)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.loss(batch)
        return loss + self.extra(batch[0]).square().mean() if number % 2 else loss


def fit(kind: type[Regression], strategy: Any, **options: Any) -> dict[str, Any]:
    seed_everything(3)
    model = kind()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    wrapper: list[str] = []
    model.on_train_start = lambda: wrapper.append(type(trainer.strategy.model).__module__)
    loader = DataLoader(data(), batch_size=8, shuffle=True)
    trainer.fit(model, loader, DataLoader(data(), batch_size=8))
    validation = float(trainer.callback_metrics["validation"])
    return {
        "losses": model.losses,
        "wrapper": wrapper[0],
        "validation": validation,
        "running": model.model[1].running_mean.tolist(),
    }


def fabric(strategy: Any) -> dict[str, Any]:
    seed_everything(3)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    module = Regression().model
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=8, shuffle=True))
    losses = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=5.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "wrapper": type(model._forward_module).__module__}


CASES: dict[str, Callable[[str], dict[str, Any]]] = {
    "automatic": lambda name: fit(Regression, name),
    "accumulated": lambda name: fit(Regression, name, accumulate_grad_batches=3, gradient_clip_val=5.0),
    "by hand": lambda name: fit(Alternating, f"{name}_find_unused_parameters_true"),
    "partly": lambda name: fit(Partly, f"{name}_find_unused_parameters_true"),
    "fabric": fabric,
}


def main() -> None:
    found: dict[str, Any] = {}
    for case, run in CASES.items():
        found[case] = {name: run(name) for name in ("ddp", "paceline")}
    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        return fp16_compress_hook(None, bucket)

    found["hook"] = {
        "ddp": fit(Regression, DDPStrategy(ddp_comm_hook=hook)) | {"calls": len(calls)},
        "paceline": fit(Regression, PacelineStrategy(ddp_comm_hook=hook)) | {"calls": len(calls)},
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
