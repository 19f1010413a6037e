"""One training step of a model: alone, in torch's DistributedDataParallel, and in Paceline's.

A step is what users write: zero_grad(), forward, loss, backward(), SGD. Gradients are checked before
anything is timed, against the mean over all ranks' batches computed here without any communication.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.bench.on_numpy import time_calls
from paceline.torch.bench.all_reduce import form_group
from paceline.torch.bench.models import MODELS, Model
from paceline.torch.bench.ways import wrap


class Step:
    """A rank of one way to train.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        way: `alone`, without the other ranks; `torch` or `paceline`.
        options: Further arguments of the DDPs.
    """

    BY_ITSELF: ClassVar[tuple[str, ...]] = ("alone",)

    def __init__(self, rank: int, world_size: int, way: str, **options: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._way = way
        self._options = options
        self._averages = way not in self.BY_ITSELF
        if self._averages:
            form_group("gloo", rank, world_size)

    def prepare(self, model: str) -> dict[str, Any]:
        """Build and wrap the model and check one backward pass; says what it is and its gradients' digest."""
        plan = MODELS[model]
        self._module = self._wrap(plan.seeded())
        self._inputs, self._targets = plan.batch_of(self._rank)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._backward()
        gradients = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
        ranks = list(range(self._world_size)) if self._averages else [self._rank]
        _check_close(gradients, plan, ranks)
        return {
            "parameters": sum(parameter.numel() for parameter in self._module.parameters()),
            "tensors": len(gradients),
            "gradient_digest": digest_of(gradients),
        }

    def time(self, iterations: int) -> float:
        """Seconds for `iterations` steps, after one that brings the ranks together."""
        return time_calls(self._step, iterations)

    def _wrap(self, module: nn.Module) -> nn.Module:
        return wrap("none" if self._way == "alone" else self._way, module, **self._options)

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self._module(self._inputs), self._targets))

    def _step(self) -> None:
        self._backward()
        self._optimizer.step()


def _check_close(gradients: list[Tensor], plan: Model, ranks: list[int]) -> None:
    """Raise unless `gradients` are the mean over `ranks`, up to float32's rounding."""
    module = plan.seeded()
    for rank in ranks:
        inputs, targets = plan.batch_of(rank)
        torch.autograd.backward(nn.functional.mse_loss(module(inputs), targets) / len(ranks))
    expected = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    names = [name for name, _ in module.named_parameters()]
    for name, got, want in zip(names, gradients, expected, strict=True):
        scale = want.abs().max().item()
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-4 * scale + 1e-7):
            worst = (got - want).abs().max().item()
            raise ArithmeticError(f"wrong gradient of {name}: off by {worst:.3g} of {scale:.3g}")


def digest_of(gradients: list[Tensor]) -> str:
    """A hash of their bits."""
    digest = hashlib.sha256()
    for gradient in gradients:
        digest.update(gradient.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
