"""The programs of Paddle's own DataParallel tests, with small models: run with any wrapper, or with none.

Each program is a model, its data and how it is trained. docs/coming-from-paddle.md says which of Paddle's
tests it stands for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

STEPS = 5
ROWS = 4  # of both ranks


class Words(nn.Layer):
    """An embedding and a projection. `idle` gets no gradient; with `is_cut`, only the bias gets one."""

    def __init__(self, sparse: bool = False, is_cut: bool = False, dtype: str = "float32") -> None:
        super().__init__(dtype=dtype)
        self.table = nn.Embedding(30, 6, sparse=sparse)
        self.project, self.bias = self.create_parameter([6, 30]), self.create_parameter([30], is_bias=True)
        self.idle = self.create_parameter([30])
        self._is_cut = is_cut

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        words = rows.astype("int64") % 30
        logits = paddle.matmul(self.table(words[:, :-1]), self.project)
        logits.stop_gradient = self._is_cut
        return F.cross_entropy((logits + self.bias).reshape([-1, 30]), words[:, 1:].reshape([-1, 1]))


class UsesNothing(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        return paddle.to_tensor([0.0])


class SharesWhatIsUnused(nn.Layer):
    """`bias` is another name of a parameter of the unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(10, 5), nn.Linear(10, 10)
        self.bias = self.unused.bias

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        return self.used(rows).square().mean()


class Forks(nn.Layer):
    """Uses one of two branches: the same one on all ranks (`differs=False`), or another one on each rank."""

    def __init__(self, rank: int | None, differs: bool, with_idle: bool = False) -> None:
        super().__init__()
        self.ways = nn.LayerList([nn.Linear(10, 6), nn.Linear(10, 6)])
        self.head = nn.Linear(6, 2)
        if with_idle:
            self.idle = nn.Linear(3, 3)
        self._rank, self._differs, self._step = rank or 0, differs, 0

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        way = (self._step + self._rank * self._differs) % 2
        self._step += 1
        return self.head(self.ways[way](rows)).square().mean()


class Pictures(nn.Layer):
    """Convolutions, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2D(1, 3, 2), nn.ReLU(), nn.MaxPool2D(2, 1))
        self.head = nn.Linear(6, 3)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        features = self.features(rows[:, :8].reshape([-1, 1, 2, 4]).tile([1, 1, 2, 1]))
        return F.cross_entropy(self.head(features.flatten(1)[:, :6]), (rows[:, :1] > 0).astype("int64"))


class Attends(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 1)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.block(rows[:, :8].reshape([-1, 1, 8]).tile([1, 3, 1]))).square().mean()


class Tanh(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> paddle.Tensor:
        (y,) = ctx.saved_tensor()
        return dy * (1 - y.square())


class OfUsers(nn.Layer):
    """A user-defined operation between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 6), nn.Linear(6, 2)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        return self.second(Tanh.apply(self.first(rows))).square().mean()


class Chain(nn.Layer):
    def __init__(self, with_idle: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 5), nn.Linear(5, 2))
        if with_idle:
            self.idle = nn.Linear(3, 3)

    def forward(self, rows: paddle.Tensor) -> paddle.Tensor:
        return self.layers(rows).square().mean()


@dataclass(frozen=True)
class Program:
    """A model and how it is trained.

    Attributes:
        build: Makes the model of a rank; None stands for one process without ranks.
        finds_unused: The value of find_unused_parameters.
        syncs_every: Every so many backwards one is synchronised; the others are in no_sync().
        accumulates: Gradients are never cleared.
        is_even: Both ranks have equally many rows and use the same branch, so one process gives the same.
        dtype: The dtype of the model.
    """

    build: Callable[[int | None], nn.Layer]
    finds_unused: bool = False
    syncs_every: int = 1
    accumulates: bool = False
    is_even: bool = True
    dtype: str = "float32"


def _of_words(**options: Any) -> Callable[[int | None], nn.Layer]:
    return lambda rank: Words(**options)


PROGRAMS = {
    "unused": Program(_of_words(is_cut=True)),
    "nothing used": Program(lambda rank: UsesNothing()),
    "shared and unused": Program(lambda rank: SharesWhatIsUnused()),
    "sparse": Program(_of_words(sparse=True)),
    "sparse, float64": Program(_of_words(sparse=True, dtype="float64"), dtype="float64"),
    "sparse, other lengths": Program(_of_words(sparse=True), is_even=False),
    "same way": Program(lambda rank: Forks(rank, differs=False), finds_unused=True),
    "another way on each rank": Program(
        lambda rank: Forks(rank, differs=True), finds_unused=True, is_even=False
    ),
    "find_unused, accumulated": Program(
        lambda rank: Forks(rank, differs=True), finds_unused=True, accumulates=True, is_even=False
    ),
    "no_sync": Program(lambda rank: Chain(), syncs_every=3),
    "no_sync, unused": Program(lambda rank: Chain(with_idle=True), syncs_every=3, finds_unused=True),
    "no_sync, unused, not allowed": Program(lambda rank: Chain(with_idle=True), syncs_every=3),
    "no_sync, other ways": Program(
        lambda rank: Forks(rank, differs=True), syncs_every=3, finds_unused=True, is_even=False
    ),
    "pictures": Program(lambda rank: Pictures()),
    "pictures, accumulated": Program(lambda rank: Pictures(), accumulates=True),
    "transformer": Program(lambda rank: Attends()),
    "transformer, accumulated": Program(lambda rank: Attends(), accumulates=True),
    "of users": Program(lambda rank: OfUsers()),
}


def rows_of(program: Program, step: int, rank: int | None) -> paddle.Tensor:
    """A rank's rows of one step; None: the rows of both ranks."""
    rng = np.random.default_rng(step)
    rows = np.abs(rng.standard_normal((ROWS, 10))) * 9
    if rank is not None:
        rows = rows[rank::2] if program.is_even else (rows[:1] if rank == 0 else rows[1:])
    return paddle.to_tensor(
        (rows / (1 if isinstance(program.build(rank), Words) else 9)).astype(program.dtype)
    )


def run(
    program: Program, wrap: Callable[..., Any] | None, rank: int | None
) -> tuple[list[float], Sequence[nn.Layer]]:
    """Train, and return the loss of each step and the parameters."""
    paddle.seed(90)
    paddle.set_default_dtype(program.dtype)
    try:
        model = program.build(rank)
        initial = np.random.default_rng(1)
        for parameter in model.parameters():
            parameter.set_value(initial.uniform(-0.3, 0.3, parameter.shape).astype(program.dtype))
        wrapped: Any = model if wrap is None else wrap(model, find_unused_parameters=program.finds_unused)
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        losses = []
        for step in range(STEPS + 1):
            is_last = step % program.syncs_every == program.syncs_every - 1
            is_local = wrap is not None and not is_last
            with wrapped.no_sync() if is_local else contextlib.nullcontext():
                loss = wrapped(rows_of(program, step, rank))
                loss.backward()
            losses.append(float(loss.sum()))
            if is_last:
                optimizer.step()
                if not program.accumulates:
                    optimizer.clear_grad()
    finally:
        paddle.set_default_dtype("float32")
    return losses, list(model.parameters())
