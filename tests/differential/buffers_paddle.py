"""Programs of `buffers.py`, with Paddle: ranks under Paceline, and both ranks in one process without it.

The rule for Paddle: each rank computes with its own buffers, as under Paddle's class, and after each averaged
backward all have rank 0's. A write on some ranks only is reported once, by a warning on every rank.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from paddle import nn

from tests.differential.programs import Program
from tests.multiprocess.paddle_models import join_paddle

WIDTH = 3
LR = 0.05
Seen = list[tuple[str, list[np.ndarray | None]]]
"""One entry after each operation: the kind of values, and the values."""
WARNED = "a warning"


class Writer(nn.Layer):
    """Adds a running mean to its input, and counts its calls."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("mean", paddle.zeros([WIDTH]), persistable=spec["is_persistent"])
        self.register_buffer("count", paddle.zeros([], "int64"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        reads = self.spec["reads"]
        if reads == "before":
            x = x + 0.3 * self.mean.clone()
        if self.training or self.spec["in_eval"]:
            with contextlib.nullcontext() if self.spec["with_grad"] else paddle.no_grad():
                self._write(x.detach())
        return x + 0.3 * self.mean.clone() if reads == "after" else x

    def _write(self, x: paddle.Tensor) -> None:
        way = self.spec["way"]
        now = 0.5 * self.mean + 0.5 * x.mean(0)
        if way == "reassigned":
            self.mean, self.count = now, self.count + 1
            return
        self.count.add_(paddle.ones([], "int64"))
        if way == "data":
            self.mean.data = now
        elif way == "index":
            for place in range(WIDTH):
                self.mean[place] = now[place]
        elif way == "out":
            paddle.assign(now, self.mean)
        elif way == "set":
            self.mean.copy_(now, True)
        elif way == "detached":
            self.mean.detach().copy_(now, True)
        else:
            self.mean.set_value(now)
            if way == "twice":
                self.mean.scale_(0.9, 0.1)


def network(program: Program) -> nn.Sequential:
    paddle.seed(program["seed"])
    layers: list[nn.Layer] = [nn.Linear(WIDTH, WIDTH)]
    for spec in program["layers"]:
        layers.append(nn.BatchNorm1D(WIDTH) if spec["kind"] == "norm" else Writer(spec))
        layers.append(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


def buffers_of(net: nn.Layer) -> list[paddle.Tensor]:
    """Buffers, and running statistics, which are parameters in Paddle."""
    norms = [layer for layer in net if isinstance(layer, nn.BatchNorm1D)]
    return [each for norm in norms for each in (norm._mean, norm._variance)] + list(net.buffers())


def trained(net: nn.Layer) -> list[paddle.Tensor]:
    return [p for p in net.parameters() if not p.stop_gradient]


class Rank:
    """One rank's run.

    Args:
        rank: Its number.
        program: A result of `buffers.generate`.
        wrap: Wraps a model; None: in one process, where means and buffers are exchanged between two steps.
    """

    def __init__(self, rank: int, program: Program, wrap: Any) -> None:
        self.rank, self.program = rank, program
        self.net = network(program)
        self.wrapped = self.net if wrap is None else wrap(self.net)
        self.is_alone = wrap is None
        self.seen: Seen = []
        self._optimizer = paddle.optimizer.SGD(LR, parameters=trained(self.net))
        self._numbers = np.random.default_rng([program["seed"], rank])

    def _loss(self, model: nn.Layer) -> paddle.Tensor:
        x = self._numbers.standard_normal((4, WIDTH)).astype(np.float32)
        return model(paddle.to_tensor(x)).square().mean()

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.is_alone else self.wrapped.no_sync()

    def run(self) -> Iterator[None]:
        """Stops after each backward that is averaged."""
        last = self.program["ends_apart"]
        ops = [*self.program["ops"]]
        if last is not None:
            ops.append({"op": "apart", "who": last})
            if self.program["ends_with_evaluation"]:
                ops.append({"op": "evaluate", "who": "all", "with_grad": False})
            ops.append({"op": "step"})
        for op in ops:
            self._optimizer.clear_grad()
            what = op["op"]
            if what == "step":
                self._loss(self.wrapped).backward()
                yield
                self.seen.append(("gradients", [_array(p.grad) for p in trained(self.net)]))
                self._optimizer.step()
            elif what == "micro":
                with self._no_sync():
                    self._loss(self.wrapped).backward()
                self._loss(self.wrapped).backward()
                yield
            elif what == "two":
                (self._loss(self.wrapped) + self._loss(self.wrapped)).backward()
                yield
            elif what == "lost":  # a forward without a backward
                self._loss(self.wrapped)
                self._loss(self.wrapped).backward()
                yield
            elif what in ("evaluate", "inner"):
                self._evaluate(op, self.net if what == "inner" else self.wrapped)
            elif what == "train":
                with paddle.no_grad():
                    self._loss(self.wrapped)
            elif what == "write":
                for buffer in self.net.buffers():
                    buffer.fill_(2)
            elif what == "apart":
                for buffer in self.net.buffers() if self.rank == op["who"] else ():
                    buffer.add_(paddle.ones_like(buffer))
            elif op["who"] in ("all", f"rank {self.rank}"):  # its present values
                self.net.set_state_dict(copy.deepcopy(self.net.state_dict()))
            self.seen.append(("buffers", [_array(buffer) for buffer in buffers_of(self.net)]))

    def _evaluate(self, op: dict[str, Any], model: nn.Layer) -> None:
        model.eval()
        if op["who"] == "all" or self.rank == 0:
            with paddle.set_grad_enabled(op["with_grad"]):
                self._loss(model)
        model.train()


def run(rank: int, program: Program) -> Seen:
    """The values that this rank sees under Paceline; at the end whether it was warned."""
    from paceline.paddle import DataParallel

    join_paddle(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = Rank(rank, program, lambda net: DataParallel(net, **program["options"]))
        for _ in one.run():
            pass
    messages = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    if any("was written between two steps" in text for text in messages):
        one.seen.append((WARNED, []))
    return one.seen


def run_alone(rank: int, program: Program) -> list[Seen]:
    """The values of both ranks if means, and rank 0's buffers, are exchanged by hand."""
    both = [Rank(number, program, None) for number in range(2)]
    for _ in zip(*(one.run() for one in both), strict=True):
        for pair in zip(*(trained(one.net) for one in both), strict=True):
            if all(p.grad is not None for p in pair):
                mean = (pair[0].grad + pair[1].grad) / 2
                for p in pair:
                    p.grad.set_value(mean)
        for root, other in zip(*(buffers_of(one.net) for one in both), strict=True):
            other.set_value(root)
    return [one.seen for one in both]


def _array(tensor: paddle.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else np.array(tensor.numpy())
