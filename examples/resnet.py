"""Trains a ResNet for CIFAR (He et al., 2015) on images of CIFAR's shape, which are generated from a seed.

    paceline run -n 2 examples/resnet.py
    torchrun --nproc-per-node 2 examples/resnet.py

What differs from the script for torch's DDP:

    - from torch.nn.parallel import DistributedDataParallel as DDP
    + from paceline.torch import DistributedDataParallel as DDP
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.torch import DistributedDataParallel as DDP


def synthetic_cifar(samples, seed):
    """Return images of 3 x 32 x 32 in ten classes: the pattern of the class plus noise."""
    patterns = torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=32, mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    noise = torch.randn(samples, 3, 32, 32, generator=generator)
    return TensorDataset(patterns[labels] + 3 * noise, labels)


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet(depth, width=16):
    """Return a ResNet of 6 * n + 2 layers: 8, 14, 20, ..."""
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, width * 2**stage, stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    correct = sum(
        (model(images).argmax(1) == labels).sum().item() for images, labels in DataLoader(data, 250)
    )
    model.train()
    return correct / len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=100, help="of all ranks together")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_data, test_data = synthetic_cifar(args.samples, seed=1), synthetic_cifar(1000, seed=2)
    sampler = DistributedSampler(train_data)
    loader = DataLoader(train_data, args.batch_size // world_size, sampler=sampler, drop_last=True)
    model = DDP(resnet(args.depth))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            correct = accuracy(model.module, test_data)
            print(f"epoch {epoch}  loss {loss.item():.4f}  test accuracy {correct:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
