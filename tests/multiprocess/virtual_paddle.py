"""Training with virtual ranks in Paddle; see virtual_torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator
from paddle.nn import functional as F
from paddle.utils import unique_name

from paceline.data import DistributedBatchSampler
from paceline.paddle import DataParallel
from paceline.paddle.internals import use_threads
from tests.multiprocess.virtual_orders import GLOBAL_BATCH, LENGTH, global_batches, number_of, tree


class Images(paddle.io.Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal((3, 8, 8)).astype(np.float32)


class Texts(Images):
    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 32, 12)


def cnn() -> nn.Layer:
    return nn.Sequential(
        nn.Conv2D(3, 6, 3), nn.BatchNorm2D(6), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(216, 5)
    )


class GPT(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(32, 16), nn.Embedding(12, 16)
        self.blocks = nn.LayerList(
            [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, normalize_before=True) for _ in range(2)]
        )
        self.head = nn.Linear(16, 32)
        self.register_buffer("mask", paddle.triu(paddle.full([12, 12], -1e9), 1))

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(x)


def loss_of_cnn(model: Callable[..., Any], images: paddle.Tensor) -> paddle.Tensor:
    noisy = images * (1 + 0.1 * float(np.random.rand())) + 0.1 * random.random()
    return F.cross_entropy(model(noisy), images.flatten(1).sum(1).astype("int64") % 5)


def loss_of_gpt(model: Callable[..., Any], tokens: paddle.Tensor) -> paddle.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


KINDS: dict[str, tuple[Callable[[], nn.Layer], Any, type[Images], Mapping[str, Any]]] = {
    "cnn": (cnn, loss_of_cnn, Images, {}),
    "averaged": (cnn, loss_of_cnn, Images, {"buffers": {"*": "average"}}),
    "gpt": (GPT, loss_of_gpt, Texts, {}),
    "views": (GPT, loss_of_gpt, Texts, {"gradient_as_bucket_view": True}),
}


def seed(number: int) -> None:
    paddle.seed(number)
    np.random.seed(number)
    random.seed(number)


class Run:
    """One process's."""

    def __init__(self, kind: str, rank: int, world_size: int, group: Any) -> None:
        make, self.loss_of, samples, options = KINDS[kind]
        seed(5)
        self._names = UniqueNameGenerator()  # as in a process of its own
        with unique_name.guard(self._names):
            model = make()
            seed(100 + rank)  # what comes must not depend on it
            self.ddp = DataParallel(model, group=group, virtual_ranks=8, **options)
            self.optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        self.sampler = DistributedBatchSampler(
            range(LENGTH),
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            global_batch_size=GLOBAL_BATCH,
            virtual_ranks=8,
        )
        self.loader = paddle.io.DataLoader(samples(), batch_sampler=self.sampler)
        for name in ("optimizer", "sampler"):
            self.ddp.register_state(name, getattr(self, name))

    def train(self, steps: int) -> str:
        """Make so many steps; a digest of all that they have changed."""
        made = 0
        while made < steps:
            for step in self.ddp.steps(self.loader, seed=3):
                for batch in step:
                    self.loss_of(self.ddp, batch[0] if isinstance(batch, (list, tuple)) else batch).backward()
                with unique_name.guard(self._names):
                    self.optimizer.step()
                self.optimizer.clear_grad()
                self.sampler.commit()
                made += 1
                if made == steps:
                    break
        return digest_of(self.ddp.module, self.optimizer)


def digest_of(model: nn.Layer, optimizer: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    for name, value in sorted(optimizer.state_dict().items()):
        if isinstance(value, paddle.Tensor):
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def by_hand(kind: str, steps: int) -> str:
    """The same with Paddle alone: eight micro-batches one after the other, and a tree that is written out."""
    make, loss_of, samples, options = KINDS[kind]
    seed(5)
    names = UniqueNameGenerator()
    with unique_name.guard(names):
        model, data = make(), samples()
        optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    state = model.state_dict()
    buffers = {name: each for name, each in state.items() if all(each is not one for one in trained)}
    threads = use_threads(1)
    for number, samples_of in zip(range(steps), global_batches()):
        before = {name: buffer.numpy() for name, buffer in buffers.items()}
        gradients, after = [], []
        for rank in range(8):
            for name, buffer in buffers.items():
                buffer.set_value(before[name])
            batch = paddle.to_tensor(np.stack([data[index] for index in samples_of[rank::8]]))
            key = number_of(3, number, "micro-batch", rank)
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            paddle.seed(key)
            loss_of(model, batch).backward()
            gradients.append([parameter.grad.numpy() for parameter in trained])
            after.append({name: buffer.numpy() for name, buffer in buffers.items()})
            optimizer.clear_grad(set_to_zero=False)
        for parameter, each in zip(trained, zip(*gradients)):
            parameter.grad = paddle.to_tensor(tree(*each) / np.float32(8))
        for name, buffer in buffers.items():
            values = [each[name] for each in after]
            buffer.set_value(tree(*values) / np.float32(8) if "buffers" in options else values[0])
        with unique_name.guard(names):
            optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    use_threads(threads)
    return digest_of(model, optimizer)


def save(state: dict[str, Any], path: Any) -> None:
    paddle.save(state, str(path))


def load(path: Any) -> Any:
    return paddle.load(str(path))
