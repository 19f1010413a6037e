"""Trains a ResNet for CIFAR (He et al., 2015) on images of CIFAR's shape, which are generated from a seed.

    paceline run -n 2 examples/paddle_resnet.py
    python -m paddle.distributed.launch --nproc_per_node 2 examples/paddle_resnet.py

What differs from the script for paddle.DataParallel:

    + from paceline.paddle import DataParallel

    - model = paddle.DataParallel(resnet(args.depth))
    + model = DataParallel(resnet(args.depth))
"""

import argparse

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

from paceline.paddle import DataParallel


def synthetic_cifar(samples, seed):
    """Return images of 3 x 32 x 32 in ten classes: the pattern of the class plus noise."""
    patterns = np.random.default_rng(0).standard_normal((10, 3, 8, 8)).repeat(4, 2).repeat(4, 3)
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=samples)
    images = patterns[labels] + 3 * random.standard_normal((samples, 3, 32, 32))
    return TensorDataset([paddle.to_tensor(images, "float32"), paddle.to_tensor(labels)])


class Block(nn.Layer):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2D(inputs, outputs, 3, stride, padding=1, bias_attr=False)
        self.bn1 = nn.BatchNorm2D(outputs)
        self.conv2 = nn.Conv2D(outputs, outputs, 3, padding=1, bias_attr=False)
        self.bn2 = nn.BatchNorm2D(outputs)
        self.shortcut = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2D(inputs, outputs, 1, stride, bias_attr=False), nn.BatchNorm2D(outputs)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet(depth, width=16):
    """Return a ResNet of 6 * n + 2 layers: 8, 14, 20, ..."""
    layers = [nn.Conv2D(3, width, 3, padding=1, bias_attr=False), nn.BatchNorm2D(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, width * 2**stage, stride))
            channels = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(channels, 10))


@paddle.no_grad()
def accuracy(model, data):
    model.eval()
    correct = sum(
        int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(data, batch_size=250)
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

    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    paddle.seed(0)
    train_data, test_data = synthetic_cifar(args.samples, seed=1), synthetic_cifar(1000, seed=2)
    sampler = DistributedBatchSampler(train_data, args.batch_size // world_size, shuffle=True, drop_last=True)
    loader = DataLoader(train_data, batch_sampler=sampler)
    model = DataParallel(resnet(args.depth))
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.1, args.epochs * len(loader))
    optimizer = paddle.optimizer.Momentum(schedule, 0.9, parameters=model.parameters(), weight_decay=5e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            schedule.step()
        if rank == 0:
            correct = accuracy(model._layers, test_data)
            print(f"epoch {epoch}  loss {float(loss):.4f}  test accuracy {correct:.3f}")


if __name__ == "__main__":
    main()
