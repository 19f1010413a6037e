"""The Paddle adapter of the conformance tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paceline.paddle import DataParallel, ShardedOptimizer
from tests.multiprocess.conformance_numpy import WIDTH, initial
from tests.multiprocess.packed_outputs import pack
from tests.multiprocess.paddle_models import drop_grad

STATISTIC = "*._mean"
DTYPES = ("bfloat16", "float64")  # Paddle has no kernels for float16 on the CPU
MEANS = ("float32", *DTYPES)  # that a process group can average
SPARSE = ("float32",)  # of sparse tables
CLEARS = (
    nn.Layer.clear_gradients,
    lambda model: model.clear_gradients(set_to_zero=False),
    lambda model: [p.clear_grad() for p in model.parameters()],
    lambda model: [drop_grad(p) for p in model.parameters()],
)


class Branches(nn.Layer):
    """Uses the layer that the caller names; "both" adds the outputs of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: paddle.Tensor, branch: str) -> paddle.Tensor:
        if branch == "both":
            return self.left(x) + self.right(x)
        return getattr(self, branch)(x)


class _Trapped(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, trap: Trap) -> paddle.Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        ctx.trap.spring()
        return gradient


class Trap(nn.Layer):
    """Its backward raises while it is set; Paddle turns the RuntimeError into an OSError."""

    is_set = False

    def spring(self) -> None:
        if self.is_set:
            raise RuntimeError("in the backward of a trap")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x.stop_gradient = False
        return _Trapped.apply(x, self)


class Factors(nn.Layer):
    """Returns sum(weight * x), where x is a number or one per column; the weight is 1 at first."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype
        one = nn.initializer.Constant(1.0)
        self.weight = paddle.create_parameter([3, 40], dtype, default_initializer=one)

    def forward(self, x: float | np.ndarray) -> paddle.Tensor:
        return (self.weight * paddle.to_tensor(np.atleast_1d(x)).astype(self.dtype)).sum()


def network(width: int = WIDTH) -> nn.Layer:
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    if width != WIDTH:
        return model
    for parameter, value in zip(model.parameters(), initial()):
        parameter.set_value(value)
    return model


def trapped() -> nn.Layer:
    """The same network with traps: model[0] springs after all gradients, model[3] after those of layer 2."""
    first, tanh, second = network()
    return nn.Sequential(Trap(), first, tanh, Trap(), second)


def normalised() -> nn.Layer:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1D(3))


def with_one_encoder() -> tuple[nn.Layer, nn.Layer]:
    """Two models that share their first layer; each call makes the same values."""
    encoder, heads = network(), [network()[2] for _ in range(2)]
    return tuple(nn.Sequential(encoder[0], nn.Tanh(), head) for head in heads)  # type: ignore[return-value]


class Packed(nn.Layer):
    """The same network with its output in a dict, a dataclass, nested lists, or an opaque object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = network(), how

    def forward(self, x: paddle.Tensor) -> Any:
        return pack(self.inner(x), self.how)


def recomputed(wrapped: Any, x: np.ndarray, *, reentrant: bool) -> paddle.Tensor:
    """The loss of a forward that backward recomputes (activation checkpointing)."""
    given = paddle.to_tensor(x, stop_gradient=False)
    return recompute(wrapped, given, use_reentrant=reentrant).square().mean()


def slope(wrapped: Any, x: np.ndarray) -> paddle.Tensor:
    """A penalty on the gradients of the input; it does not depend on the output itself."""
    given = paddle.to_tensor(x, stop_gradient=False)
    (found,) = paddle.grad([wrapped(given).sum()], [given], create_graph=True)
    return (found.square().sum(1) - 1).square().mean()


def without_gradients(how: str) -> Any:
    return paddle.no_grad()


def sequence(*layers: nn.Layer) -> nn.Layer:
    return nn.Sequential(*layers)


def wrap(model: nn.Layer, group: object, **options: Any) -> Any:
    return DataParallel(model, group=group, **options)


def tensor(x: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(x)


def loss(model: Any, x: np.ndarray, *arguments: str) -> paddle.Tensor:
    return model(tensor(x), *arguments).square().mean()


def backward(*losses: paddle.Tensor) -> None:
    for each in losses:
        each.backward()


def gradients(model: nn.Layer) -> list[np.ndarray | None]:
    return [None if p.grad is None else p.grad.numpy() for p in model.parameters() if not p.stop_gradient]


def parameters(model: nn.Layer) -> list[np.ndarray]:
    return [p.numpy() for p in model.parameters() if not p.stop_gradient]


def as_float64(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float64").numpy()


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return as_float64(tensor(x).astype(dtype))


def resolution(dtype: str) -> float:
    return float(paddle.finfo(dtype).eps)


def bits(tensor: paddle.Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy()).view(np.uint8)


def table(count: int, width: int, dtype: str) -> nn.Layer:
    """An embedding with a sparse gradient, which has the rows that were looked up."""
    assert dtype == paddle.get_default_dtype()
    return nn.Embedding(count, width, sparse=True)


def rows(gradient: paddle.Tensor) -> paddle.Tensor:
    return paddle.to_tensor(np.array(gradient.get_selected_rows().get_tensor()))


def layers(count: int, width: int) -> nn.Layer:
    """A sequence of linear layers, each with a square matrix and no bias.

    It is seeded, because a check that compares a few bits misses one difference in some thousands.
    """
    paddle.seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias_attr=False) for _ in range(count)))


def nudge(parameter: paddle.Tensor) -> None:
    """Add a millionth to the last element."""
    value = parameter.numpy()
    value.flat[-1] += 1e-6
    parameter.set_value(value)


def mean_hook(state: object, bucket: Any) -> Any:
    """Average the bucket, as the wrapper does without a hook."""
    return bucket.all_reduce(bucket.buffer()).then(lambda total: total.value() / bucket.world_size)


def another_hook(state: object, bucket: Any) -> Any:
    return mean_hook(state, bucket)


class ready:
    """A future that already has this value, as a hook may return it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def wait(self) -> object:
        return self._value


def freeze(parameter: paddle.Tensor) -> None:
    parameter.stop_gradient = True


def statistic(model: nn.Layer) -> np.ndarray:
    return model[1]._mean.numpy()


def clear(model: nn.Layer) -> None:
    model.clear_gradients()


def clear_in_place(model: nn.Layer) -> None:
    model.clear_gradients()


def step(model: nn.Layer, lr: float = 0.1) -> None:
    for parameter in model.parameters():
        parameter.set_value(parameter - lr * parameter.grad)


class Refusing(paddle.optimizer.Momentum):
    """Raises ValueError in its step, "before" it writes anything or "after" it has written; None: never."""

    refuses: str | None = None

    def step(self) -> None:
        if Refusing.refuses == "after":
            super().step()
        if Refusing.refuses is not None:
            raise ValueError("no such step")
        super().step()


def sharded(model: nn.Layer, lr: float, momentum: float, **options: Any) -> ShardedOptimizer:
    """A ShardedOptimizer over `Refusing`."""
    return ShardedOptimizer(model.parameters(), Refusing, learning_rate=lr, momentum=momentum, **options)
