"""From a model's data to a Paddle layer. Every layer maps [batch, WIDTH] to [batch, WIDTH].

The layers cover the ways in which a parameter's gradient is made: through views, shared memory, several uses,
recomputation, rows only, a PyLayer. See `LAYERS` for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from tests.device import paddle as device
from tests.differential.walk import Traps

WIDTH = 4


class Batch:
    """The arguments of one forward besides its input.

    Attributes:
        rank: Of the process, or the simulated one.
        number: How many forwards this rank has made before.
        rows: For embeddings, one of each sample.
        weight: The weight of the forward, in programs whose forwards have weights.
        runs: How often layers have run that backward may recompute.
    """

    def __init__(self, rank: int, number: int, rows: paddle.Tensor, weight: float = 1.0) -> None:
        self.rank = rank
        self.number = number
        self.rows = rows
        self.weight = weight
        self.runs = 0


class Linear(nn.Layer):
    """y = tanh(x W + b) + x / 2."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias_attr=None if spec.get("bias", True) else False)

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return paddle.tanh(self.linear(x)) + 0.5 * x


_SHAPES: dict[str, list[int]] = {
    "plain": [1, WIDTH],
    "reshape": [1, 2, WIDTH // 2],
    "flatten": [2, WIDTH // 2],
    "t": [WIDTH, 1],
    "expand": [1, WIDTH],
    "concat": [WIDTH // 2],
    "chunk": [2, WIDTH],
    "select": [2, WIDTH],
    "cut": [WIDTH + 3],
}


class Add(nn.Layer):
    """Adds a parameter behind a view: its gradient may share memory with that of x."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.view = spec.get("view", "plain")
        shape = _SHAPES.get(self.view, [WIDTH])
        halves = {"concat": 2, "stack": 2}.get(self.view, 1)
        self.parts = nn.ParameterList([self.create_parameter(shape) for _ in range(halves)])

    def term(self, x: paddle.Tensor) -> paddle.Tensor:
        p = self.parts[0]
        ways = {
            "unsqueeze": lambda: p.unsqueeze(0),
            "reshape": lambda: p.reshape([1, WIDTH]),
            "flatten": lambda: p.flatten().unsqueeze(0),
            "t": lambda: p.t(),
            "expand": lambda: p.expand([x.shape[0], WIDTH]),
            "concat": lambda: paddle.concat(list(self.parts)).reshape([1, WIDTH]),
            "stack": lambda: paddle.stack(list(self.parts)).sum(0, keepdim=True),
            "chunk": lambda: paddle.subtract(*p.chunk(2)),
            "select": lambda: p[1].unsqueeze(0) + p[0],
            "cut": lambda: p[2 : 2 + WIDTH].reshape([1, WIDTH]),
        }
        return ways.get(self.view, lambda: p)()

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x + self.term(x)


class Scale(nn.Layer):
    """x * p."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.factor = self.create_parameter([WIDTH])

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x * self.factor


class Table(nn.Layer):
    """x + the mean of a parameter's rows: it may have any number of rows, so its shape may change."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.rows = self.create_parameter([spec.get("rows", 3), WIDTH])

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x + self.rows.sum(0) / max(1, self.rows.shape[0]) * paddle.tanh(x)


class Embedding(nn.Layer):
    """x + rows of an embedding; its gradient may be sparse, though not in the reference."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=bool(spec.get("sparse")) and not net.simulates)

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x + 0.3 * self.table(batch.rows)


class Buffer(nn.Layer):
    """A running mean, updated in training forwards and used in all; `replaces`: by a new tensor each time."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.replaces = spec.get("replaces", False)
        self.register_buffer("mean", paddle.zeros([WIDTH]))
        self.register_buffer("count", paddle.zeros([], "int64"))

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        y = x + 0.3 * self.mean.clone()
        if self.training:
            with paddle.no_grad():
                mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
                if self.replaces:
                    self.mean, self.count = mean, self.count + 1
                else:
                    self.mean.set_value(mean)
                    self.count.set_value(self.count + 1)
        return y


class Complex(nn.Layer):
    """x times a value made from a parameter through complex numbers, of which it holds both components."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.view = spec.get("view", "real")
        self.pairs = self.create_parameter([WIDTH, 2])

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        whole = paddle.as_complex(self.pairs)
        ways = {
            "real": lambda: whole.real(),
            "imag": lambda: whole.conj().imag(),
            "product": lambda: (whole * whole.conj()).real(),
            "square": lambda: paddle.as_real(whole * whole).sum(-1),
            "abs": lambda: (whole + 2.0).abs(),
        }
        return x + 0.3 * x * ways[self.view]()


class Norm(nn.Layer):
    """Batch normalisation; its running statistics are parameters that are not trained."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(WIDTH, epsilon=0.5)

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return 0.5 * x + self.norm(x)


class _Added(paddle.autograd.PyLayer):
    """x + p; its backward returns the incoming gradient's memory as the gradient of p.

    `shares`: as the gradients of both. Where the gradient of p is accumulated, Paddle adds in place on the
    CPU, and so changes the gradient of x; on a device it does not. The reference runs on the CPU, so beside a
    device it copies.
    """

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, p: paddle.Tensor, shares: bool) -> paddle.Tensor:
        ctx.shares = shares
        ctx.rows, ctx.trains = x.shape[0], not x.stop_gradient
        return x + p

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        rows = gradient if ctx.rows == 1 else gradient.sum(0, keepdim=True)
        if not ctx.trains:
            return None, rows
        shares = ctx.shares and not (device.IS_THERE and gradient.place.is_cpu_place())
        return gradient if shares else gradient.clone(), rows


class Own(nn.Layer):
    """An operation of the user (a PyLayer)."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.term = self.create_parameter([1, WIDTH])
        self.shares = bool(spec.get("shares"))

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return _Added.apply(x, self.term, self.shares)


class Again(nn.Layer):
    """An earlier layer of this model, a second time."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.other = net.earlier(spec.get("layer", 0))

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x if self.other is None else self.other(x, batch)


class Tied(nn.Layer):
    """The weight of an earlier linear layer, a second time."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        linears = [layer for layer in net.layers if isinstance(layer, Linear)]
        self.linear = linears[spec.get("layer", 0) % len(linears)].linear if linears else None

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x if self.linear is None else x + paddle.tanh(x @ self.linear.weight.t())


class Borrow(nn.Layer):
    """A layer of another model of the program."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        layers = list(net.others[0].layers) if net.others else []
        self.other = layers[spec.get("layer", 0) % len(layers)] if layers else None

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x if self.other is None else self.other(x, batch)


class Nested(nn.Layer):
    """Layers within a layer."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.inner = nn.LayerList([make_layer(layer, net) for layer in spec.get("layers", [])])
        self.spec = spec

    def run(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        batch.runs += 1
        for layer in self.inner:
            x = layer(x, batch)
        return x


class Gate(Nested):
    """Layers that some forwards skip.

    They are skipped on other ranks than `ranks`, before `after` forwards, in all but one of `every`, or if
    `skips` has [rank, number of the forward].
    """

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        spec = self.spec
        is_open = (
            batch.rank in spec.get("ranks", [batch.rank])
            and batch.number >= spec.get("after", 0)
            and (batch.number + 1) % spec.get("every", 1) == 0
            and [batch.rank, batch.number] not in spec.get("skips", [])
        )
        return self.run(x, batch) if is_open else x


class Recompute(Nested):
    """Layers that are recomputed in backward; `twice`: in two segments."""

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        for _ in range(1 + bool(self.spec.get("twice"))):
            if paddle.is_grad_enabled():
                x = recompute(self.run, x, batch, use_reentrant=bool(self.spec.get("reentrant")))
            else:
                x = self.run(x, batch)
        return x


class _Trapped(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, traps: Traps) -> paddle.Tensor:
        ctx.traps = traps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        ctx.traps.spring("backward")
        return gradient


class Trap(nn.Layer):
    """Raises in forward or in backward, when the program has set it."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.traps = net.traps

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        self.traps.spring("forward")
        return x if x.stop_gradient else _Trapped.apply(x, self.traps)


class Factor(nn.Layer):
    """x times a buffer that the program writes, and no forward."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.register_buffer("factor", paddle.ones([1]))

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        return x * self.factor.clone().astype(x.dtype)


LAYERS: dict[str, type[nn.Layer]] = {
    "linear": Linear,
    "add": Add,
    "scale": Scale,
    "table": Table,
    "embedding": Embedding,
    "buffer": Buffer,
    "factor": Factor,
    "complex": Complex,
    "norm": Norm,
    "own": Own,
    "again": Again,
    "tied": Tied,
    "borrow": Borrow,
    "gate": Gate,
    "recompute": Recompute,
    "trap": Trap,
}

_AROUND_ONE = ("factor", "last", "norm.weight")


class Net(nn.Layer):
    """A generated model, with the same values in every process.

    Args:
        spec: `layers`, and `frozen`: numbers of parameters that do not train.
        others: Models of the program that come before.
        traps: The state that its traps look at.
        simulates: Whether it belongs to the reference.
    """

    def __init__(self, spec: dict[str, Any], others: list[Net], traps: Traps, simulates: bool) -> None:
        super().__init__()
        self.layers = nn.LayerList()
        self.__dict__.update(others=others, traps=traps, simulates=simulates, filled=[])
        for layer in spec.get("layers", []):
            self.layers.append(make_layer(layer, self))
        self.last = self.create_parameter([WIDTH])  # so that each model has a parameter
        self.fill(17 + len(others))
        for number in spec.get("frozen", []):
            parameter_of(self, number).stop_gradient = True
        self.last.stop_gradient = False

    def earlier(self, number: int) -> nn.Layer | None:
        return self.layers[number % len(self.layers)] if len(self.layers) else None

    def fill(self, seed: int) -> None:
        """Give values to parameters that have none yet."""
        made = np.random.default_rng(seed)
        known = {id(p) for net in (self, *self.others) for p in net.filled}
        for name, p in self.named_parameters():
            if id(p) in known or p.stop_gradient:
                continue
            values = 0.3 * made.standard_normal(p.shape)
            values += any(name.endswith(end) for end in _AROUND_ONE)
            p.set_value(values.astype(np.float32).astype(paddle.get_default_dtype()))
            self.filled.append(p)

    def forward(self, x: paddle.Tensor, batch: Batch) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x * self.last


def make_layer(spec: dict[str, Any], net: Net) -> nn.Layer:
    return LAYERS[spec["kind"]](spec, net)


def parameter_of(net: nn.Layer, number: int) -> paddle.Tensor:
    """A parameter that is trained, or was before it was frozen; never running statistics."""
    parameters = [p for name, p in net.named_parameters() if not name.endswith(("_mean", "_variance"))]
    return parameters[number % len(parameters)]
