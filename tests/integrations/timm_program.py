"""Trains on two ranks with timm as its training script does, with torch's DDP and with Paceline's."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import (
    ModelEmaV3,
    NativeScaler,
    distribute_bn,
    init_distributed_device,
    random_seed,
    reduce_tensor,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP  # the name in timm's script
from torch.utils.data import Dataset

import paceline.torch

SIZE, CLASSES, EPOCHS = 32, 4, 3


class Images(Dataset[Any]):
    """Noise with a bright quarter, which is the class."""

    transform: Any = None

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 90, (SIZE, SIZE, 3), dtype=np.uint8)
        label = index % CLASSES
        down, right = divmod(label, 2)
        half = SIZE // 2
        pixels[down * half : (down + 1) * half, right * half : (right + 1) * half] += 150
        return self.transform(Image.fromarray(pixels)), label


class Script:
    """Wraps the model and keeps its average as timm's script did in earlier versions."""

    averages_statistics = False

    def __init__(self, model: nn.Module) -> None:
        self.average = ModelEmaV3(model, decay=0.9)
        self.wrapped = NativeDDP(model, broadcast_buffers=True)

    def loss(self, images: Any, labels: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.wrapped(images), labels)

    def update(self) -> None:
        self.average.update(self.wrapped.module)


class Task:
    """Lets timm's task wrap the model, as timm's script does in the newest versions."""

    averages_statistics = True

    def __init__(self, model: nn.Module) -> None:
        self.task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
        self.average = self.task.setup_ema(decay=0.9)
        self.task.prepare_distributed()
        self.wrapped = self.task.trainable_module

    def loss(self, images: Any, labels: Any) -> torch.Tensor:
        return self.task(images, labels)["loss"]

    def update(self) -> None:
        self.task.update_ema()


def train(kind: type[Script | Task], device: SimpleNamespace) -> dict[str, Any]:
    random_seed(3, 0)
    model = create_model("test_resnet", num_classes=CLASSES)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=EPOCHS)
    scaler = NativeScaler(device="cpu")
    loader = create_loader(
        Images(), (3, SIZE, SIZE), 8, is_training=True, no_aug=True, use_prefetcher=False, num_workers=0,
        distributed=device.distributed,
    )  # fmt: skip
    trained = kind(model)
    losses, means = [], []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = trained.loss(images, labels)
            optimizer.zero_grad()
            scaler(loss, optimizer, clip_grad=1.0, parameters=trained.wrapped.parameters())
            trained.update()
            losses.append(loss.item())
            means.append(reduce_tensor(loss.detach(), device.world_size).item())
        distribute_bn(trained.wrapped, device.world_size, reduce=kind.averages_statistics)
        scheduler.step(epoch + 1)
    statistics = torch.cat([each for name, each in model.named_buffers() if "running" in name])
    average = torch.cat([each.flatten() for each in trained.average.module.parameters()])
    return {
        "losses": losses,
        "means": means,
        "wrapper": type(trained.wrapped).__module__,
        "statistics": statistics.tolist(),
        "average": average.norm().item(),
    }


def main() -> None:
    device = SimpleNamespace(device="cpu")
    init_distributed_device(device)
    found = {}
    for name, kind in (("script", Script), ("task", Task)):
        for is_ours in (False, True):
            with paceline.torch.replace_ddp() if is_ours else nullcontext():
                found.setdefault(name, []).append(train(kind, device))
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
