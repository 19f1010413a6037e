"""Programs of `exchanges.py`, with Paddle: one rank under Paceline, and all of them in one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

import paceline
from paceline.errors import ConfigError
from paceline.paddle import DataParallel, SyncBatchNorm
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


class Net(nn.Layer):
    """Some layers."""

    def __init__(self, layers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.specs = layers
        self.layers = nn.LayerList([_layer(spec) for spec in layers])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for spec, layer in zip(self.specs, self.layers):
            recomputed = spec.get("recomputed")
            if recomputed is None:
                x = layer(x)
            else:
                x = recompute(layer, x, use_reentrant=recomputed == "reentrant")
        return x


class Mix(nn.Layer):
    """Adds a function of all ranks' rows.

    Attributes:
        sum: A function of the sum of the rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sum: Any = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + 0.3 * paddle.tanh(self.sum(x.sum(0)))


def _mix_by(nets: Iterable[nn.Layer], function: Any) -> None:
    for net in nets:
        for layer in net.sublayers():
            if isinstance(layer, Mix):
                layer.sum = function


def _layer(spec: dict[str, Any]) -> nn.Layer:
    if spec["kind"] == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if spec["kind"] == "mix":
        return Mix()
    if spec["kind"] == "norm":
        attributes = None if spec["affine"] else False
        return nn.BatchNorm1D(WIDTH, weight_attr=attributes, bias_attr=attributes)
    return nn.Tanh()


def _trained(layers: list[nn.Layer]) -> list[Any]:
    return [each for layer in layers for each in layer.parameters() if not each.stop_gradient]


def _nets(program: Program) -> tuple[list[Net], Net]:
    """The models that are wrapped, with their values, and the one that is not."""
    paddle.set_default_dtype("float64")
    layers, cut = program["layers"], program["cut"]
    nets = [Net(layers)] if cut is None else [Net(layers[:cut]), Net(layers[cut:])]
    for parameter, value in zip(_trained(nets), values(program), strict=True):
        parameter.set_value(value)
    return nets, Net(program["outside"])


def _plain(output: paddle.Tensor) -> paddle.Tensor:
    bounded = paddle.tanh(output)
    return ((bounded - 0.3) ** 2).sum() / max(1, output.shape[0]) + (bounded**3).sum() / 7


def _contrast(output: paddle.Tensor, everything: paddle.Tensor) -> paddle.Tensor:
    return (paddle.tanh(output.matmul(everything.t())) ** 2).mean()


def _freeze(parameters: list[Any], step: dict[str, Any]) -> None:
    for parameter in parameters:
        parameter.stop_gradient = step.get("freezes", False)


def _gradients(parameters: list[Any]) -> list[Any]:
    return [np.zeros(p.shape) if p.grad is None else p.grad.numpy().copy() for p in parameters]


def _descend(parameters: list[Any]) -> None:
    with paddle.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                paddle.assign(parameter - LR * parameter.grad, parameter)


def _clear(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.clear_gradient(set_to_zero=False)


class Rank:
    """One rank, with Paceline."""

    def __init__(self, rank: int, world_size: int, job: str, folder: Path) -> None:
        self.rank = rank
        self.group = paceline.init(rank=rank, world_size=world_size, job_id=job, timeout_s=TIMEOUT_S)
        self.gather, self.sum = _gather_over(self.group), _sum_over(self.group)

    def run(self, program: Program) -> list[Outcome]:
        self.given = 1.0
        nets, outside = _nets(program)
        options: dict[str, Any] = {"weight": lambda *_: self.given} if program["by_function"] else {}
        convert = functools.partial(SyncBatchNorm.convert_sync_batchnorm, process_group=self.group)
        options |= {"group": self.group, "find_unused_parameters": True}
        self.wrappers = [DataParallel(convert(net), **options) for net in nets]
        self.outside = convert(outside)
        parameters, second = _trained(self.wrappers), _trained(self.wrappers[1:])
        outcomes: list[Outcome] = []
        for number, step in enumerate(program["steps"]):
            _clear(parameters)
            _freeze(second, step)
            _mix_by(self.wrappers, self.sum.apply if step["mixes"] else _Nothing.apply)
            try:
                for micro in range(len(step["micros"])):
                    self._micro_batch(program, number, micro)
            except ConfigError as error:
                outcomes.append(("refused", str(error)))
                continue
            outcomes.append(("gradients", _gradients(parameters)))
            _descend(parameters)
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
            own = batch(program, number, micro)[self.rank]
            output = paddle.to_tensor(own, stop_gradient=not step["needs"][self.rank])
            for net in (*self.wrappers, self.outside):
                output = net(output)
            is_gathered = step["loss"] == "gather"
            loss = _contrast(output, self.gather.apply(output)) if is_gathered else _plain(output)
            for wrapper in self.wrappers if given is not None else ():
                if how == "around backward":
                    scopes.enter_context(wrapper.weight(given))
                elif how == "after forward":
                    wrapper.weight(given)
            loss.backward()


def _sum_over(group: Any) -> Any:
    class Sum(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return _summed(group, x)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return _summed(group, gradient)

    return Sum


def _summed(group: Any, x: paddle.Tensor) -> paddle.Tensor:
    total = np.array(x.numpy())
    group.all_reduce(total)
    return paddle.to_tensor(total)


class _Nothing(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return paddle.zeros_like(gradient)


def _gather_over(group: Any) -> Any:
    class Gather(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.to_tensor(np.concatenate(group.all_gather(x.numpy())))

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            total = np.ascontiguousarray(gradient.numpy())
            group.all_reduce(total)
            return paddle.to_tensor(np.split(total, group.world_size)[group.rank])

    return Gather


def reference(program: Program) -> list[Outcome]:
    """The gradients of each step, in one process."""
    nets, outside = _nets(program)
    parameters, second = _trained(nets), _trained(nets[1:])
    outcomes: list[Outcome] = []
    for number, step in enumerate(program["steps"]):
        _clear(parameters)
        _freeze(second, step)
        _mix_by(nets, paddle.assign if step["mixes"] else paddle.zeros_like)
        for micro, row in enumerate(coefficients(step, program["ranks"])):
            parts = batch(program, number, micro)
            whole = paddle.to_tensor(np.concatenate(parts), stop_gradient=False)
            for net in (*nets, outside):
                whole = net(whole)
            ends = np.cumsum([len(part) for part in parts]).tolist()
            terms = []
            for end, part, share in zip(ends, parts, row):
                if not share or not len(part):
                    continue
                output = whole[end - len(part) : end]
                loss = _contrast(output, whole) if step["loss"] == "gather" else _plain(output)
                terms.append(share * loss)
            if terms:
                sum(terms).backward()
        outcomes.append(("gradients", _gradients(parameters)))
        if not expected_refusal(program, step):
            _descend(parameters)
    return outcomes
