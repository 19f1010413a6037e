"""What training with virtual ranks does in torch; see virtual_training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline.torch import DistributedDataParallel

__all__ = ["DataLoader"]
_EPS = 1e-3  # so that what is zero but for rounding stays near zero
seed = torch.manual_seed


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


class Narrow(nn.Linear):
    """A linear layer with parameters of 16 bits, between activations of float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).float()


def half() -> nn.Module:
    """Layers of 16 bits, of either kind, and one of 32."""
    first, second = Narrow(192, 16, dtype=torch.bfloat16), Narrow(16, 16, dtype=torch.float16)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), nn.Linear(16, 5))


class Words(nn.Module):
    """A table whose gradient has the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.token(tokens))


class Mlp(nn.Module):
    """Layers by name, one that only some batches use, and a table with sparse gradients."""

    def __init__(self, layers: list[str], width: int, *, skips: bool, has_table: bool) -> None:
        super().__init__()
        make = {
            "linear": lambda: nn.Linear(width, width),
            "bfloat16": lambda: Narrow(width, width, dtype=torch.bfloat16),
            "float16": lambda: Narrow(width, width, dtype=torch.float16),
            "norm": lambda: nn.BatchNorm1d(width),
            "dropout": lambda: nn.Dropout(0.3),
            "tanh": nn.Tanh,
        }
        self.layers = nn.ModuleList(make[name]() for name in layers)
        self.extra = nn.Linear(width, width) if skips else None
        self.table = nn.Embedding(3, width, sparse=True) if has_table else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_extra = self.extra is not None and float(x.detach()[0, 0]) > 0
        if self.table is not None:
            x = x + self.table(x.detach()[:, 1].abs().long() % 3)
        for layer in self.layers:
            x = layer(x)
        return self.extra(x) if is_extra else x


mlp = Mlp
MODELS = {
    "cnn": (cnn, loss_of_cnn),
    "gpt": (GPT, loss_of_gpt),
    "half": (half, loss_of_cnn),
    "words": (Words, loss_of_gpt),
}


def names() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A new numbering of unnamed parameters, which torch has not."""
    return contextlib.nullcontext


def wrap(model: nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, **options)


def optimizer(model: nn.Module, kind: str = "adamw", *, clips: bool = False) -> optim.Optimizer:
    momentum = {"momentum": 0.9}.get(kind, 0.0)
    found = (
        optim.AdamW(model.parameters(), lr=0.01, eps=_EPS)
        if kind == "adamw"
        else optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    )
    if clips:
        found.register_step_pre_hook(lambda *_: _clip(model))
    return found


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)


def toggle(layer: nn.Module) -> None:
    """Freeze its parameters, or train them again."""
    for parameter in layer.parameters():
        parameter.requires_grad_(not parameter.requires_grad)


def state_of(optimizer: optim.Optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{number} {name}": value for number, state in states.items() for name, value in state.items()}


def zero_grad(optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()


def drop_gradients(optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def buffers(model: nn.Module) -> list[torch.Tensor]:
    return list(model.buffers())


def tensor(values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype=dtype)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Its values, those of 16 bits in float32."""
    return np.array((tensor.float() if tensor.itemsize == 2 else tensor).numpy())


def leaf(gradient: torch.Tensor) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """A copy of its values; of a sparse one, its rows and their values."""
    if not gradient.is_sparse:
        return array(gradient)
    return np.array(gradient._indices()[0].numpy()), array(gradient._values())


def give_rows(
    parameter: nn.Parameter, leaves: list[tuple[np.ndarray, np.ndarray, float]], total: float
) -> None:
    """Give it the sum of rows, each times its weight, divided by the total weight."""
    added = np.zeros(parameter.shape, np.float32)
    for rows, values, weight in leaves:
        own = np.zeros_like(added)
        np.add.at(own, rows, values)
        added += own * np.float32(weight)
    rows = np.unique(np.concatenate([rows for rows, _, _ in leaves]))
    mean = tensor(added[rows] / np.float32(total), parameter.dtype)
    where = torch.from_numpy(rows[None])
    with torch.sparse.check_sparse_tensor_invariants():
        parameter.grad = torch.sparse_coo_tensor(where, mean, parameter.shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write(buffer: torch.Tensor, value: np.ndarray) -> None:
    buffer.copy_(torch.from_numpy(value))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save(state: dict[str, Any], path: Any) -> None:
    torch.save(state, path)


def load(path: Any) -> Any:
    return torch.load(path, weights_only=True)
