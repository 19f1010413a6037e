"""Trains a small residual network on handwritten digits with timm's task, loader, optimizer and scheduler.

    paceline run -n 2 --replace-ddp examples/trainers/timm_digits.py
    paceline run -n 2 examples/trainers/timm_digits.py     # with torch's DDP, to compare

The script itself does not use Paceline: timm's task wraps the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_loader
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import distribute_bn, init_distributed_device, random_seed
from torch.utils.data import Dataset


class Digits(Dataset[Any]):
    """Images of 8 x 8 pixels for timm's loader, whose transform enlarges them."""

    transform: Any = None

    def __init__(self) -> None:
        images, self.labels = load_digits(return_X_y=True)
        self.images = (images * 15).astype(np.uint8).reshape(-1, 8, 8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = Image.fromarray(self.images[index]).convert("RGB")
        return self.transform(image), int(self.labels[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    job = SimpleNamespace(device="cpu")
    init_distributed_device(job)  # also forms the process group
    random_seed(0, 0)
    model = create_model("test_resnet", num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=args.epochs)
    task = ClassificationTask(model, verbose=False)
    if job.distributed:
        task.prepare_distributed()
    loader = create_loader(
        Digits(),
        (3, 32, 32),
        batch_size=32,
        is_training=True,
        no_aug=True,
        use_prefetcher=False,
        num_workers=0,
        distributed=job.distributed,
    )

    losses = []
    for epoch in range(epochs):
        if job.distributed:
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = task(images, labels)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if job.distributed:
            distribute_bn(task.trainable_module, job.world_size)
        scheduler.step(epoch + 1)
    wrapper = type(task.trainable_module).__module__
    if job.rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, wrapped by {wrapper}")
    if args.report:
        (args.report / f"{job.rank}.json").write_text(json.dumps({"losses": losses, "wrapper": wrapper}))
    if job.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
