"""Training with virtual ranks, for the tests that compare numbers of processes; and the same by hand."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline.data import DistributedBatchSampler
from paceline.torch import DistributedDataParallel
from tests.multiprocess.virtual_orders import GLOBAL_BATCH, LENGTH, global_batches, number_of, tree


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal((3, 8, 8)).astype(np.float32)


class Texts(Images):
    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 32, 12)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(216, 5)
    )


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(32, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(12))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


def loss_of_cnn(model: Callable[..., Any], images: torch.Tensor) -> torch.Tensor:
    noisy = images * (1 + 0.1 * np.random.rand()) + 0.1 * random.random()
    return F.cross_entropy(model(noisy), images.flatten(1).sum(1).long() % 5)


def loss_of_gpt(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


KINDS: dict[str, tuple[Callable[[], nn.Module], Any, type[Images], Mapping[str, Any]]] = {
    "cnn": (cnn, loss_of_cnn, Images, {}),
    "averaged": (cnn, loss_of_cnn, Images, {"buffers": {"*": "average"}}),
    "gpt": (GPT, loss_of_gpt, Texts, {}),
    "views": (GPT, loss_of_gpt, Texts, {"gradient_as_bucket_view": True}),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


class Run:
    """One process's."""

    def __init__(self, kind: str, rank: int, world_size: int, group: Any, virtual_ranks: int = 8) -> None:
        make, self.loss_of, samples, options = KINDS[kind]
        seed(5)
        model = make()
        seed(100 + rank)  # what comes must not depend on it
        self.ddp = DistributedDataParallel(model, process_group=group, virtual_ranks=virtual_ranks, **options)
        self.optimizer = optim.AdamW(self.ddp.parameters(), lr=0.01)
        self.sampler = DistributedBatchSampler(
            range(LENGTH),
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            global_batch_size=GLOBAL_BATCH,
            virtual_ranks=virtual_ranks,
        )
        self.loader = DataLoader(samples(), batch_sampler=self.sampler)
        for name in ("optimizer", "sampler"):
            self.ddp.register_state(name, getattr(self, name))

    def train(self, steps: int) -> str:
        """Make so many steps; a digest of all that they have changed."""
        made = 0
        while made < steps:
            for step in self.ddp.steps(self.loader, seed=3):
                for batch in step:
                    self.loss_of(self.ddp, batch).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.sampler.commit()
                made += 1
                if made == steps:
                    break
        return self.digest()

    def digest(self) -> str:
        return digest_of(self.ddp.module, self.optimizer)


def digest_of(model: nn.Module, optimizer: optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            digest.update(f"{number} {name}".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def by_hand(kind: str, steps: int) -> str:
    """The same with torch alone: eight micro-batches one after the other, and a tree that is written out."""
    make, loss_of, samples, options = KINDS[kind]
    seed(5)
    model, data = make(), samples()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    buffers = dict(model.named_buffers())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number, samples_of in zip(range(steps), global_batches()):
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        gradients, after = [], []
        for rank in range(8):
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
            batch = torch.from_numpy(np.stack([data[index] for index in samples_of[rank::8]]))
            key = number_of(3, number, "micro-batch", rank)
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            torch.manual_seed(key)
            loss_of(model, batch).backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            after.append({name: buffer.clone() for name, buffer in buffers.items()})
            model.zero_grad(set_to_none=True)
        for parameter, each in zip(model.parameters(), zip(*gradients)):
            parameter.grad = tree(*each) / 8
        for name, buffer in buffers.items():
            is_averaged = "buffers" in options and buffer.is_floating_point()
            values = [each[name] for each in after]
            buffer.copy_(tree(*values) / 8 if is_averaged else values[0])
        optimizer.step()
        model.zero_grad(set_to_none=True)
    torch.set_num_threads(threads)
    return digest_of(model, optimizer)


def save(state: dict[str, Any], path: Any) -> None:
    torch.save(state, path)


def load(path: Any) -> Any:
    return torch.load(path, weights_only=True)
