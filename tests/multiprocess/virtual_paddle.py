"""What training with virtual ranks does in Paddle; see virtual_training."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
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
from paceline.paddle.internals import give_rows as put_rows
from paceline.paddle.internals import use_threads

__all__ = ["DataLoader"]
_EPS = 1e-3  # so that what is zero but for rounding stays near zero
seed = paddle.seed


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


class Narrow(nn.Linear):
    """A linear layer of bfloat16, cast because Paddle multiplies no such matrices on a CPU."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.to(dtype="bfloat16")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.linear(x, self.weight.cast("float32"), self.bias.cast("float32"))


def half() -> nn.Layer:
    """A layer of 16 bits, and one of 32. Paddle has no optimizer for float16 on a CPU."""
    return nn.Sequential(nn.Flatten(), Narrow(192, 16), nn.Tanh(), nn.Linear(16, 5))


class Words(nn.Layer):
    """A table whose gradient has the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(32, 16, sparse=True), nn.Linear(16, 32)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.token(tokens))


class Mlp(nn.Layer):
    """Layers by name, one that only some batches use, and a table with sparse gradients."""

    def __init__(self, layers: list[str], width: int, *, skips: bool, has_table: bool) -> None:
        super().__init__()
        make = {
            "linear": lambda: nn.Linear(width, width),
            "bfloat16": lambda: Narrow(width, width),
            "norm": lambda: nn.BatchNorm1D(width),
            "dropout": lambda: nn.Dropout(0.3),
            "tanh": nn.Tanh,
        }
        self.layers = nn.LayerList([make[name]() for name in layers])
        self.extra = nn.Linear(width, width) if skips else None
        self.table = nn.Embedding(3, width, sparse=True) if has_table else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        is_extra = self.extra is not None and float(x.detach()[0, 0]) > 0
        if self.table is not None:
            x = x + self.table(x.detach()[:, 1].abs().astype("int64") % 3)
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
    """A new numbering of unnamed parameters, as in a process of its own."""
    return functools.partial(unique_name.guard, UniqueNameGenerator())


def wrap(model: nn.Layer, group: Any, **options: Any) -> DataParallel:
    return DataParallel(model, group=group, **options)


def optimizer(model: nn.Layer, kind: str = "adamw", *, clips: bool = False) -> Any:
    warnings.filterwarnings("ignore", "Accumulating with FP16/BF16")  # which is what is tested
    options = {"parameters": model.parameters(), "grad_clip": nn.ClipGradByGlobalNorm(0.3) if clips else None}
    if kind == "adamw":
        return paddle.optimizer.AdamW(0.01, epsilon=_EPS, **options)
    if kind == "momentum":
        return paddle.optimizer.Momentum(0.05, 0.9, **options)
    return paddle.optimizer.SGD(0.05, **options)


def toggle(layer: nn.Layer) -> None:
    """Freeze its parameters, or train them again."""
    for parameter in layer.parameters():
        parameter.stop_gradient = not parameter.stop_gradient


def state_of(optimizer: Any) -> dict[str, paddle.Tensor]:
    state = {**optimizer._accumulators_holder, **optimizer.state_dict()}  # with what no step has used yet
    return {name: value for name, value in state.items() if isinstance(value, paddle.Tensor)}


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


def tensor(values: np.ndarray, dtype: paddle.dtype | None = None) -> paddle.Tensor:
    return paddle.to_tensor(values).cast(dtype or str(values.dtype))


def array(tensor: paddle.Tensor) -> np.ndarray:
    """Its values, those of 16 bits in float32."""
    return np.array((tensor.cast("float32") if tensor.element_size() == 2 else tensor).numpy())


def leaf(gradient: paddle.Tensor) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """A copy of its values; of a sparse one, its rows and their values."""
    if not gradient.is_selected_rows():
        return array(gradient)
    selected = gradient.get_selected_rows()
    return np.array(selected.rows()), np.array(selected.get_tensor())


def give_rows(
    parameter: paddle.Tensor, leaves: list[tuple[np.ndarray, np.ndarray, float]], total: float
) -> None:
    """Give it all rows, each times its part of the total weight."""
    rows = np.concatenate([rows for rows, _, _ in leaves])
    mean = np.concatenate([values * np.float32(weight / total) for _, values, weight in leaves])
    put_rows(parameter, rows.tolist(), mean)


def bits(tensor: paddle.Tensor) -> bytes:
    return tensor.numpy().tobytes()


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
