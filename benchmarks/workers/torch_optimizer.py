"""An optimizer's step on large parameters: the whole step on each rank, or a sharded one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.workers.all_reduce import time_calls
from benchmarks.workers.torch_models import form_group, make_optimizer, wrap

_LAYER = ((1024, 1000), (1000,))
_CHECKED_STEPS = 3


class OptimizerStep:
    """A rank that makes steps of AdamW with fixed gradients.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        variant: `whole`, on every rank; `zero`, torch's ZeroRedundancyOptimizer; `paceline`; `one_model`,
            Paceline's on parameters that the ranks share; or `scatter`, on such parameters, where a rank gets
            only its shard of the gradients.
        options: Further arguments of the sharded optimizer.
    """

    def __init__(self, rank: int, world_size: int, variant: str, **options: Any) -> None:
        self._variant = variant
        self._options = options
        self._rank, self._world_size = rank, world_size
        form_group("gloo", rank, world_size)

    def prepare(self, layers: int, fused: bool, with_backward: bool = False) -> dict[str, Any]:
        """Check a few steps of a small model, bit for bit, and create the large one.

        Args:
            layers: Number of layers, with 1,025,000 parameters each.
            fused: Use torch's fused kernel.
            with_backward: Whether a step begins with zero_grad() and a backward that averages gradients.
        """
        for name in ("_step", "_model"):  # first free the memory of an earlier measurement
            self.__dict__.pop(name, None)
        _give_back()
        expected, parameters = _parameters(2), _parameters(2)
        whole = torch.optim.AdamW(expected, lr=1e-3, fused=fused)
        optimizer = self._make(parameters, fused, with_backward)
        if with_backward:
            mean = sum(range(1, self._world_size + 1)) / self._world_size
            for parameter in expected:
                parameter.grad = torch.full_like(parameter, mean)
        for _ in range(_CHECKED_STEPS):
            whole.step()
            self._step()
        if not all(one.equal(other) for one, other in zip(parameters, expected, strict=True)):
            raise ArithmeticError("other parameters than those of torch.optim.AdamW")
        self.__dict__.pop("_model", None)
        del self.__dict__["_step"], optimizer, whole, expected
        parameters = _parameters(layers, with_gradients=not with_backward)
        self._make(parameters, fused, with_backward)
        self._step()
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return {"parameters": sum(p.numel() for p in parameters), "digest": digest.hexdigest()}

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` steps, after one untimed step that synchronizes the ranks."""
        return time_calls(self._step, iterations)

    def _make(
        self, parameters: list[nn.Parameter], fused: bool, with_backward: bool
    ) -> torch.optim.Optimizer:
        variant, model = self._variant, _Sum(parameters)
        shares = variant in ("one_model", "scatter")
        if with_backward or shares:
            self._model = wrapped = self._wrap(model)
        options = {"lr": 1e-3, "fused": fused, **self._options}
        variant = "paceline" if shares else variant
        optimizer = make_optimizer(variant, parameters, torch.optim.AdamW, **options)
        self._step: Callable[..., Any] = optimizer.step
        if with_backward:
            factor = torch.tensor(1.0 + self._rank)

            def step() -> None:
                optimizer.zero_grad()
                wrapped(factor).backward()
                optimizer.step()

            self._step = step
        return optimizer

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._variant == "zero":
            return wrap("torch", model, gradient_as_bucket_view=True)
        return wrap(
            "paceline",
            model,
            share_parameters=self._variant in ("one_model", "scatter"),
            reduce="scatter" if self._variant == "scatter" else "mean",
            reduce_through=self._options.get("reduce_through", "auto"),
        )


class _Sum(nn.Module):
    """A model whose gradients are all the same number, computed at the speed of memory."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(parameters)

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.stack([(part * factor).sum() for part in self.parts]).sum()


def _parameters(layers: int, with_gradients: bool = True) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values, gradients = (
        [torch.randn(shape, generator=generator) for shape in _LAYER] for _ in ("values", "gradients")
    )
    made = []
    for layer in range(layers):
        for value, gradient in zip(values, gradients, strict=True):
            parameter = nn.Parameter(value + layer)
            parameter.grad = gradient / (1 + layer) if with_gradients else None
            made.append(parameter)
    return made


def _give_back() -> None:
    """Return the memory that malloc keeps to the system, because other cases need it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
