"""An optimizer's step of large parameters: on every rank the whole of it, or a part on each."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from paceline.bench.on_numpy import time_calls
from paceline.torch.bench.all_reduce import form_group
from paceline.torch.bench.ways import make_optimizer, wrap

_LAYER = ((1024, 1000), (1000,))
_CHECKED_STEPS = 3


class OptimizerStep:
    """A rank of one way to make AdamW's steps; the gradients are there and stay.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        way: `whole`, on every rank; `zero`, torch's ZeroRedundancyOptimizer; `paceline`; or `one_model`,
            Paceline's on parameters that the ranks share.
        options: Further arguments of the optimizer that is sharded.
    """

    def __init__(self, rank: int, world_size: int, way: str, **options: Any) -> None:
        self._way = way
        self._options = options
        form_group("gloo", rank, world_size)

    def prepare(self, layers: int, fused: bool) -> dict[str, Any]:
        """Check a few steps of a small model, bit for bit, and make the large one.

        Args:
            layers: How many, with 1,025,000 parameters each.
            fused: Use torch's fused kernel.
        """
        expected, parameters = _parameters(2), _parameters(2)
        whole = torch.optim.AdamW(expected, lr=1e-3, fused=fused)
        optimizer = self._make(parameters, fused)
        for _ in range(_CHECKED_STEPS):
            whole.step()
            optimizer.step()
        if not all(one.equal(other) for one, other in zip(parameters, expected, strict=True)):
            raise ArithmeticError("other parameters than those of torch.optim.AdamW")
        del self.__dict__["_step"], optimizer, whole, expected
        parameters = _parameters(layers)
        self._step = self._make(parameters, fused).step
        self._step()
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.detach().numpy().tobytes())
        return {"parameters": sum(p.numel() for p in parameters), "digest": digest.hexdigest()}

    def time(self, iterations: int) -> float:
        """Seconds for `iterations` steps, after one that brings the ranks together."""
        return time_calls(self._step, iterations)

    def _make(self, parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        way, options = self._way, {"lr": 1e-3, "fused": fused, **self._options}
        if way == "one_model":
            self._model = wrap("paceline", nn.ParameterList(parameters), share_parameters=True)
            way = "paceline"
        optimizer = make_optimizer(way, parameters, torch.optim.AdamW, **options)
        self._step = optimizer.step
        return optimizer


def _parameters(layers: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in _LAYER * layers:
        parameter = nn.Parameter(torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        made.append(parameter)
    return made
