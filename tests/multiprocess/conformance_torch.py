"""The torch adapter of the conformance tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from paceline.torch import DistributedDataParallel, ShardedOptimizer
from tests.multiprocess.conformance_numpy import WIDTH, initial
from tests.multiprocess.packed_outputs import pack

STATISTIC = "*.running_mean"
DTYPES = ("float16", "bfloat16", "float64")
MEANS = ("float32", *DTYPES, "complex64", "complex128")  # that a process group can average
SPARSE = ("float32", "bfloat16")  # of sparse tables
CLEARS = (nn.Module.zero_grad, lambda model: model.zero_grad(set_to_none=False))


class Branches(nn.Module):
    """Uses the layer that the caller names; "both" adds the outputs of both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        if branch == "both":
            return self.left(x) + self.right(x)
        return getattr(self, branch)(x)


class _Trapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trap: Trap) -> torch.Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.trap.spring()
        return gradient, None


class Trap(nn.Module):
    """Its backward raises OSError while it is set."""

    is_set = False

    def spring(self) -> None:
        if self.is_set:
            raise OSError("in the backward of a trap")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Trapped.apply(x if x.requires_grad else x.requires_grad_(), self)


class Factors(nn.Module):
    """Returns sum(weight * x), where x is a number or one per column; the weight is 1 at first."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)
        self.weight = nn.Parameter(torch.ones(3, 40, dtype=self.dtype))

    def forward(self, x: float | np.ndarray) -> torch.Tensor:
        product = self.weight * torch.from_numpy(np.atleast_1d(x)).to(self.dtype)
        return (torch.view_as_real(product) if product.is_complex() else product).sum()


def network(width: int = WIDTH) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    if width != WIDTH:
        return model
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial()):
            parameter.copy_(torch.from_numpy(value.T.copy()))
    return model


def trapped() -> nn.Module:
    """The same network with traps: model[0] springs after all gradients, model[3] after those of layer 2."""
    first, tanh, second = network()
    return nn.Sequential(Trap(), first, tanh, Trap(), second)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def with_one_encoder() -> tuple[nn.Module, nn.Module]:
    """Two models that share their first layer; each call makes the same values."""
    encoder, heads = network(), [network()[2] for _ in range(2)]
    return tuple(nn.Sequential(encoder[0], nn.Tanh(), head) for head in heads)  # type: ignore[return-value]


class Packed(nn.Module):
    """The same network with its output in a dict, a dataclass, nested lists, or an opaque object."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = network(), how

    def forward(self, x: torch.Tensor) -> Any:
        return pack(self.inner(x), self.how)


def recomputed(wrapped: Any, x: np.ndarray, *, reentrant: bool) -> torch.Tensor:
    """The loss of a forward that backward recomputes (activation checkpointing)."""
    output = checkpoint(wrapped, tensor(x).requires_grad_(), use_reentrant=reentrant)
    return output.square().mean()


def slope(wrapped: Any, x: np.ndarray) -> torch.Tensor:
    """A penalty on the gradients of the input; it does not depend on the output itself."""
    given = tensor(x).requires_grad_()
    (found,) = torch.autograd.grad(wrapped(given).sum(), given, create_graph=True)
    return (found.square().sum(1) - 1).square().mean()


def without_gradients(how: str) -> Any:
    return {"no_grad": torch.no_grad, "inference": torch.inference_mode}[how]()


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def wrap(model: nn.Module, group: object, **options: Any) -> Any:
    return DistributedDataParallel(model, process_group=group, **options)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)


def loss(model: Any, x: np.ndarray, *arguments: str) -> torch.Tensor:
    return model(tensor(x), *arguments).square().mean()


def backward(*losses: torch.Tensor) -> None:
    for each in losses:
        each.backward()


def gradients(model: nn.Module) -> list[np.ndarray | None]:
    """Gradients in the layout of the numpy reference: weights are (in, out)."""
    return [None if p.grad is None else p.grad.numpy().T.copy() for p in model.parameters()]


def parameters(model: nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().T.copy() for p in model.parameters()]


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    """Complex numbers give their real part."""
    return tensor.detach().to(torch.complex128).real.numpy()


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return as_float64(tensor(x).to(getattr(torch, dtype)))


def resolution(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).eps)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.resolve_conj().contiguous().view(torch.uint8).numpy()


def table(count: int, width: int, dtype: str) -> nn.Module:
    """An embedding with a sparse gradient, which has the rows that were looked up."""
    return nn.Embedding(count, width, sparse=True, dtype=getattr(torch, dtype))


def rows(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.values()


def layers(count: int, width: int) -> nn.Module:
    """A sequence of linear layers, each with a square matrix and no bias.

    It is seeded, because a check that compares a few bits misses one difference in some thousands.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def nudge(parameter: nn.Parameter) -> None:
    """Add a millionth to the last element."""
    with torch.no_grad():
        parameter.view(-1)[-1] += 1e-6


def mean_hook(state: object, bucket: Any) -> Any:
    """Average the bucket, as the wrapper does without a hook."""
    return allreduce_hook(None, bucket)


def another_hook(state: object, bucket: Any) -> Any:
    return mean_hook(state, bucket)


def ready(value: object) -> torch.futures.Future[Any]:
    """A future that already has this value, as a hook returns it."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def freeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False)


def statistic(model: nn.Module) -> np.ndarray:
    return model[1].running_mean.numpy().copy()


def clear(model: nn.Module) -> None:
    model.zero_grad()


def clear_in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def step(model: nn.Module, lr: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad


class Refusing(torch.optim.SGD):
    """Raises ValueError in its step, "before" it writes anything or "after" it has written; None: never."""

    refuses: str | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Refusing.refuses == "after":
            super().step()
        if Refusing.refuses is not None:
            raise ValueError("no such step")
        super().step()


def sharded(model: nn.Module, lr: float, momentum: float, **options: Any) -> ShardedOptimizer:
    """A ShardedOptimizer over `Refusing`."""
    return ShardedOptimizer(model.parameters(), Refusing, lr=lr, momentum=momentum, **options)
