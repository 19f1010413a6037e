"""Programs of `exchanges.py`, with torch: one rank under Paceline, and all of them in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel, SyncBatchNorm
from tests.differential.exchanges import (
    TIMEOUT_S,
    WIDTH,
    Outcome,
    batch,
    coefficients,
    expected_refusal,
    values,
)
from tests.differential.programs import Program

LR = 0.05


class Net(nn.Module):
    """Some layers."""

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.specs = layers
        self.layers = nn.ModuleList([_layer(spec) for spec in layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for spec, layer in zip(self.specs, self.layers):
            recomputed = spec.get("recomputed")
            if recomputed is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=recomputed == "reentrant")
        return x


def _layer(spec: dict[str, Any]) -> nn.Module:
    if spec["kind"] == "linear":
        return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    if spec["kind"] == "mix":
        return Mix()
    if spec["kind"] == "norm":
        return nn.BatchNorm1d(WIDTH, affine=spec["affine"], dtype=torch.float64)
    return nn.Tanh()


def _nets(program: Program) -> tuple[list[Net], Net]:
    """The models that are wrapped, with their values, and the one that is not."""
    layers, cut = program["layers"], program["cut"]
    nets = [Net(layers)] if cut is None else [Net(layers[:cut]), Net(layers[cut:])]
    parameters = [parameter for net in nets for parameter in net.parameters()]
    with torch.no_grad():
        for parameter, value in zip(parameters, values(program), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return nets, Net(program["outside"])


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(gradient)


class Mix(nn.Module):
    """Adds a function of all ranks' rows.

    Attributes:
        sum: A function of the sum of the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sum: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * torch.tanh(self.sum(x.sum(0)))


def _mix_by(nets: Iterable[nn.Module], function: Any) -> None:
    for net in nets:
        for module in net.modules():
            if isinstance(module, Mix):
                module.sum = function


def _freeze(nets: list[Any], step: dict[str, Any]) -> None:
    for net in nets[1:]:
        net.requires_grad_(not step.get("freezes", False))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def _plain(output: torch.Tensor) -> torch.Tensor:
    bounded = torch.tanh(output)
    return (bounded - 0.3).pow(2).sum() / max(1, len(output)) + bounded.pow(3).sum() / 7


def _contrast(output: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
    return torch.tanh(output @ everything.T).square().mean()


def _slope(output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(torch.tanh(output).sum(), x, create_graph=True)
    return slope


def _penalty(slope: torch.Tensor) -> torch.Tensor:
    return (slope.pow(2).sum(1) - 1).pow(2).sum() / max(1, len(slope))


def _gradients(parameters: list[nn.Parameter]) -> list[Any]:
    return [torch.zeros_like(p).numpy() if p.grad is None else p.grad.numpy().copy() for p in parameters]


class Rank:
    """One rank, with Paceline."""

    def __init__(self, rank: int, world_size: int, job: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def run(self, program: Program) -> list[Outcome]:
        self.given = 1.0
        nets, outside = _nets(program)
        options: dict[str, Any] = {"weight": lambda *_: self.given} if program["by_function"] else {}
        options |= {"reduce_through": program["path"], "find_unused_parameters": True}
        self.wrappers = [
            DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net), **options) for net in nets
        ]
        self.outside = SyncBatchNorm.convert_sync_batchnorm(outside)
        parameters = [parameter for wrapper in self.wrappers for parameter in wrapper.parameters()]
        outcomes: list[Outcome] = []
        for number, step in enumerate(program["steps"]):
            for parameter in parameters:
                parameter.grad = None
            _freeze(self.wrappers, step)
            _mix_by(self.wrappers, _SumOverRanks.apply if step["mixes"] else _Nothing.apply)
            try:
                for micro in range(len(step["micros"])):
                    self._micro_batch(program, number, micro)
            except ConfigError as error:
                outcomes.append(("refused", str(error)))
                continue
            outcomes.append(("gradients", _gradients(parameters)))
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter -= LR * parameter.grad
        return outcomes

    def _micro_batch(self, program: Program, number: int, micro: int) -> None:
        step = program["steps"][number]
        weights = step["micros"][micro]["weights"]
        given, how = None if weights is None else weights[self.rank], step["given"]
        if given is not None and program["by_function"]:
            self.given, given = given, None
        with contextlib.ExitStack() as scopes:
            for wrapper in self.wrappers:
                if micro < len(step["micros"]) - 1:
                    scopes.enter_context(wrapper.no_sync())
                if given is not None and how == "around all":
                    scopes.enter_context(wrapper.weight(given))
                elif given is not None and how == "before forward":
                    wrapper.weight(given)
            x = torch.from_numpy(batch(program, number, micro)[self.rank])
            x.requires_grad_(step["needs"][self.rank])
            output = x
            for net in (*self.wrappers, self.outside):
                output = net(output)
            loss = _contrast(output, _Gather.apply(output)) if step["loss"] == "gather" else _plain(output)
            if step["loss"] == "penalty":
                loss = loss + _penalty(_slope(output, x))
            for wrapper in self.wrappers if given is not None else ():
                if how == "around backward":
                    scopes.enter_context(wrapper.weight(given))
                elif how == "after forward":
                    wrapper.weight(given)
            loss.backward()


def reference(program: Program) -> list[Outcome]:
    """The gradients of each step, in one process."""
    torch.set_num_threads(1)
    nets, outside = _nets(program)
    parameters = [parameter for net in nets for parameter in net.parameters()]
    outcomes: list[Outcome] = []
    for number, step in enumerate(program["steps"]):
        for parameter in parameters:
            parameter.grad = None
        _freeze(nets, step)
        _mix_by(nets, torch.clone if step["mixes"] else torch.zeros_like)
        for micro, row in enumerate(coefficients(step, program["ranks"])):
            parts = batch(program, number, micro)
            x = torch.cat([torch.from_numpy(part) for part in parts]).requires_grad_()
            whole = x
            for net in (*nets, outside):
                whole = net(whole)
            sizes = [len(part) for part in parts]
            slopes = _slope(whole, x).split(sizes) if step["loss"] == "penalty" else [None] * len(sizes)
            terms = []
            for output, slope, share in zip(whole.split(sizes), slopes, row):
                if not share:
                    continue
                loss = _contrast(output, whole) if step["loss"] == "gather" else _plain(output)
                terms.append(share * (loss if slope is None else loss + _penalty(slope)))
            if terms:
                torch.stack(terms).sum().backward()
        outcomes.append(("gradients", _gradients(parameters)))
        with torch.no_grad():
            for parameter in parameters if not expected_refusal(program, step) else ():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
    return outcomes
