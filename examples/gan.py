"""Trains a GAN whose generator learns to draw discs; both of its networks are wrapped.

    paceline run -n 2 examples/gan.py
    torchrun --nproc-per-node 2 examples/gan.py

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

LATENT = 16


def discs(samples, seed=0):
    """Return images of 1 x 16 x 16 between -1 and 1: a bright disc somewhere near the middle."""
    generator = torch.Generator().manual_seed(seed)
    x, y, radius = torch.rand(3, samples, 1, 1, generator=generator)
    pixels = torch.arange(16.0)
    distance = ((pixels[:, None] - 5.5 - 4 * y) ** 2 + (pixels - 5.5 - 4 * x) ** 2).sqrt()
    return torch.tanh(2 * (2 + 3 * radius - distance)).unsqueeze(1)


def generator_network(width=32):
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * width, 4, bias=False),  # 4 x 4
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),  # 8 x 8
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),  # 16 x 16
        nn.Tanh(),
    )


def discriminator_network(width=32):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 4 * 4, 1),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(discs(args.samples))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world_size, sampler=sampler, drop_last=True)
    G, D = DDP(generator_network()), DDP(discriminator_network())
    optimizer_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
    torch.manual_seed(rank)  # each rank draws its own noise

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = G(torch.randn(len(real), LATENT, 1, 1))

            optimizer_d.zero_grad()
            loss_d = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
            loss_d.backward()
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = F.softplus(-D(fake)).mean()
            loss_g.backward()
            optimizer_g.step()
        if rank == 0:
            error = (fake.mean(0) - data.tensors[0].mean(0)).abs().mean()
            losses = f"loss of D {loss_d.item():.3f}, of G {loss_g.item():.3f}"
            print(f"epoch {epoch}  {losses}  mean image off by {error.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
