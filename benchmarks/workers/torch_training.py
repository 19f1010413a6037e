"""Training with Adam on a batch that is divided among all ranks, by one process or several.

A step is what users write: zero_grad(), forward, loss, backward(), Adam. Before anything is timed, a few
steps are compared with a training by one process.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers.torch_models import (
    WHOLE_BATCHES,
    WIDE_BYTES,
    WIDE_INPUTS,
    Batch,
    form_group,
    make_optimizer,
    narrow,
    wide,
    wrap,
)
from benchmarks.workers.torch_step import digest_of

_CHECKED_STEPS = 3
_CHECKED_RATE = 1e-4
# So small that thousands of steps on one batch hardly change the model: no gradient becomes so small that the
# processor computes with it more slowly.
_TIMED_RATE = 1e-7
# Relative to the norm of the change in three steps. Adam divides each gradient by its size, so if that is
# almost zero, the order of a sum may decide the sign of a change.
_TOLERANCE = 0.02


class Training:
    """A rank of a training.

    Args:
        rank: This rank.
        world_size: The number of processes.
        wrapper: See `wrap`.
        optimizer: See `make_optimizer`.
        averages: Whether the ranks train together; otherwise each trains alone.
        parts: The number of parts of the batch, of which a rank gets one; 0: the number of processes.
        threads: The number of threads of this process; 0: as the environment sets it.
        options: Further arguments of the wrapper.
        optimizer_options: Further arguments of the optimizer.
    """

    _module: nn.Module | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _in_optimizer_s = 0.0
    _steps = 0
    _waited_before_s = 0.0

    def __init__(
        self,
        rank: int,
        world_size: int,
        wrapper: str = "none",
        optimizer: str = "whole",
        averages: bool = True,
        parts: int = 0,
        threads: int = 0,
        options: Mapping[str, Any] | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._parts = parts or world_size
        self._part = rank % self._parts
        self._averages = averages and world_size > 1
        self._wrapper, self._variant, self._options = wrapper, optimizer, dict(options or {})
        self._optimizer_options = dict(optimizer_options or {})
        if self._averages:
            form_group("gloo", rank, world_size)

    def prepare(self, model: str, fused: bool) -> dict[str, Any]:
        """Wrap a model, check the first steps, and get ready for more.

        Args:
            model: A key of `WHOLE_BATCHES`.
            fused: Use torch's fused Adam.
        """
        self._module = self._optimizer = None  # free the memory before the next model takes some
        plan = WHOLE_BATCHES[model]
        whole = plan.batch_of(0)
        self._inputs, self._targets = _part(whole, self._part, self._parts)
        module = plan.seeded()
        first = [parameter.detach().clone() for parameter in module.parameters()]
        self._use(module, fused=fused)
        for _ in range(_CHECKED_STEPS):
            self._step()
        parts = range(self._parts) if self._averages or self._parts == 1 else [self._part]
        expected = _trained(plan.seeded(), [_part(whole, part, self._parts) for part in parts])
        _check_close(list(module.parameters()), expected, first)
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = _TIMED_RATE
        self._step()
        self._begin_counting()
        return {
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "samples": len(whole[0]),
            "digest": digest_of(list(module.parameters())),
        }

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` steps, after one untimed step that synchronizes the ranks."""
        self._step()
        start = time.perf_counter()
        for _ in range(iterations):
            self._step()
        return time.perf_counter() - start

    def parts_of_step(self) -> dict[str, float | None]:
        """Return the mean seconds per step, since `prepare`, in the optimizer and in waiting for other ranks.

        The latter is only known for Paceline, and only within backward; a sharded optimizer waits, too.
        """
        steps, waited_s = max(1, self._steps), self._waited_s()
        return {
            "optimizer_s": self._in_optimizer_s / steps,
            "waited_s": None if waited_s is None else (waited_s - self._waited_before_s) / steps,
        }

    def _use(self, module: nn.Module, fused: bool = False) -> None:
        self._module = wrap(self._wrapper, module, **self._options)
        options = {"lr": _CHECKED_RATE, "fused": fused, **self._optimizer_options}
        self._optimizer = make_optimizer(self._variant, module.parameters(), torch.optim.Adam, **options)

    def _step(self) -> None:
        assert self._module is not None and self._optimizer is not None
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self._module(self._inputs), self._targets))
        begin = time.perf_counter()
        self._optimizer.step()
        self._in_optimizer_s += time.perf_counter() - begin
        self._steps += 1

    def _begin_counting(self) -> None:
        self._in_optimizer_s, self._steps = 0.0, 0
        self._waited_before_s = self._waited_s() or 0.0

    def _waited_s(self) -> float | None:
        if self._wrapper != "paceline":
            return None
        stats: Any = self._module.stats()  # type: ignore[union-attr,operator]
        return float(stats.waited_s)


class TrainingMemory(Training):
    """Trains `wide()` with Adam. `train` creates the model, so that the measurement includes all of it."""

    def build(self) -> int:
        """Load the code that a step needs; return the bytes of the parameters of `wide()`."""
        self._inputs, self._targets = torch.randn(WIDE_INPUTS)
        self._use(narrow())
        self._step()
        self._module = self._optimizer = None
        gc.collect()
        return WIDE_BYTES

    def train(self, steps: int) -> None:
        """Create the model, wrap it and train."""
        self._use(wide())
        for _ in range(steps):
            self._step()


def _part(whole: Batch, part: int, parts: int) -> Batch:
    inputs, targets = whole
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def _trained(module: nn.Module, parts: list[Batch]) -> list[Tensor]:
    """Return the parameters after the first steps, computed by one process from each rank's part in turn."""
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=_CHECKED_RATE)
    for _ in range(_CHECKED_STEPS):
        optimizer.zero_grad()
        for inputs, targets in parts:
            torch.autograd.backward(nn.functional.mse_loss(module(inputs), targets) / len(parts))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def _check_close(got: list[nn.Parameter], expected: list[Tensor], first: list[Tensor]) -> None:
    changed = _length([want - before for want, before in zip(expected, first, strict=True)])
    off = _length([one.detach() - want for one, want in zip(got, expected, strict=True)])
    if not off <= _TOLERANCE * changed:
        raise ArithmeticError(
            f"after {_CHECKED_STEPS} steps the parameters are off by {off / changed:.3g} of what the steps "
            "change, compared with a training by one process"
        )


def _length(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
