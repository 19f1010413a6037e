"""Trains a small network on handwritten digits with Lightning's Trainer.

    paceline run -n 2 examples/trainers/lightning_digits.py     # or, with Lightning's own launcher:
    python examples/trainers/lightning_digits.py
    python examples/trainers/lightning_digits.py --strategy ddp # with torch's DDP, to compare

Only the import and the name of the strategy are for Paceline.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.integrations.lightning  # noqa: F401  registers the strategy "paceline"


class Digits(LightningModule):
    """A network of two layers that keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="paceline")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches for each step of the optimizer")
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers")

    seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = Digits()
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    wrappers: list[str] = []
    model.on_train_start = lambda: wrappers.append(type(trainer.strategy.model).__module__)
    trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        print(f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}, wrapped by {wrappers[0]}")
    if args.report:
        report = {"losses": model.losses, "wrapper": wrappers[0]}
        (args.report / f"{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
