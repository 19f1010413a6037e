"""What training with virtual ranks does in Paddle; see virtual_training."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.unique_name import UniqueNameGenerator
from paddle.io import DataLoader
from paddle.nn import functional as F
from paddle.utils import unique_name

from paceline.paddle import DataParallel
from paceline.paddle.internals import use_threads

__all__ = ["DataLoader"]
seed = paddle.seed
tensor = paddle.to_tensor


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


MODELS = {"cnn": (cnn, loss_of_cnn), "gpt": (GPT, loss_of_gpt)}


def names() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A new numbering of unnamed parameters, as in a process of its own."""
    return functools.partial(unique_name.guard, UniqueNameGenerator())


def wrap(model: nn.Layer, group: Any, **options: Any) -> DataParallel:
    return DataParallel(model, group=group, **options)


def optimizer(model: nn.Layer) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters())


def state_of(optimizer: Any) -> dict[str, paddle.Tensor]:
    return {name: value for name, value in optimizer.state_dict().items() if isinstance(value, paddle.Tensor)}


def zero_grad(optimizer: Any) -> None:
    optimizer.clear_grad()


def drop_gradients(optimizer: Any) -> None:
    optimizer.clear_grad(set_to_zero=False)


def trained(model: nn.Layer) -> list[paddle.Tensor]:
    return [parameter for parameter in model.parameters() if not parameter.stop_gradient]


def buffers(model: nn.Layer) -> list[paddle.Tensor]:
    """With the statistics of batch normalisation, which are parameters here."""
    ours = trained(model)
    return [each for each in model.state_dict().values() if all(each is not one for one in ours)]


def write(buffer: paddle.Tensor, value: np.ndarray) -> None:
    buffer.set_value(value)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = use_threads(1)
    yield
    use_threads(threads)


def save(state: dict[str, Any], path: Any) -> None:
    paddle.save(state, str(path))


def load(path: Any) -> Any:
    return paddle.load(str(path))
