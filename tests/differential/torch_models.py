"""From a model's data to a module. Every layer maps [batch, WIDTH] to [batch, WIDTH].

The layers cover the ways in which a parameter's gradient is made: through views, shared memory, several uses,
recomputation, rows only, conjugates. See `LAYERS` for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.differential.torch_tensors import Held, Wrapped
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

    def __init__(self, rank: int, number: int, rows: torch.Tensor, weight: float = 1.0) -> None:
        self.rank = rank
        self.number = number
        self.rows = rows
        self.weight = weight
        self.runs = 0


class Linear(nn.Module):
    """y = tanh(x W + b)."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=spec.get("bias", True))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + 0.5 * x


class Add(nn.Module):
    """Adds a parameter behind a view: its gradient may share memory with that of x."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.view = spec.get("view", "plain")
        halves = {"cat": 2, "stack": 2}.get(self.view, 1)
        shape = {
            "plain": (1, WIDTH),
            "reshape": (1, 2, WIDTH // 2),
            "t": (WIDTH, 1),
            "expand": (1, WIDTH),
            "cat": (WIDTH // 2,),
            "stack": (WIDTH,),
            "chunk": (2, WIDTH),
            "select": (2, WIDTH),
            "cut": (WIDTH + 3,),
        }.get(self.view, (WIDTH,))
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.3) for _ in range(halves)])

    def term(self, x: torch.Tensor) -> torch.Tensor:
        p = self.parts[0]
        if self.view == "unsqueeze":
            return p.unsqueeze(0)
        if self.view in ("view", "reshape"):
            return getattr(p, self.view)(1, WIDTH)
        if self.view == "t":
            return p.t()
        if self.view == "expand":
            return p.expand(max(1, x.shape[0]), WIDTH)[: x.shape[0]] if x.shape[0] != 1 else p.expand(1, -1)
        if self.view == "cat":
            return torch.cat(list(self.parts)).view(1, WIDTH)
        if self.view == "stack":
            return torch.stack(list(self.parts)).sum(0, keepdim=True)
        if self.view == "chunk":
            first, second = p.chunk(2)
            return first - second
        if self.view == "select":
            return p[1].unsqueeze(0) + p[0]
        if self.view == "cut":
            return p[2 : 2 + WIDTH].view(1, WIDTH)
        return p

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + self.term(x).to(x.dtype)


class Scale(nn.Module):
    """x * p."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.factor = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x * self.factor


class Table(nn.Module):
    """x + the sum of a parameter's rows: it may have any number of rows, so its shape may change."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.rows = nn.Parameter(0.2 * torch.randn(spec.get("rows", 3), WIDTH))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = self.rows.to(x.dtype)
        return x + rows.sum(0) / max(1, rows.shape[0]) * torch.tanh(x)


class Embedding(nn.Module):
    """x + rows of an embedding; its gradient may be sparse."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=spec.get("sparse", False))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + 0.3 * self.table(batch.rows)


class Complex(nn.Module):
    """A complex parameter, whose gradient may be a lazy conjugate or a lazily negated component."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.view = spec.get("view", "real")
        self.value = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64) * 0.3)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        z = self.value
        if self.view == "conj":
            return x + ((x * z) * z.conj()).real.to(x.dtype)
        if self.view == "imag":
            return x + z.imag.to(x.dtype) * x
        if self.view == "conj-imag":
            return x + z.conj().imag.to(x.dtype).unsqueeze(0)
        return x + (x * z).real.to(x.dtype)


class Buffer(nn.Module):
    """A running mean, updated in training forwards and used in all."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        y = x + 0.3 * self.mean.to(x.dtype, copy=True)
        if self.training and x.shape[0]:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.5)
                self.count.add_(1)
        return y


class Factor(nn.Module):
    """x times a buffer that the program writes, and no forward."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x * self.factor.to(x.dtype, copy=True)


class Again(nn.Module):
    """An earlier layer of this model, a second time."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.other = net.earlier(spec.get("layer", 0))

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x if self.other is None else self.other(x, batch)


class Tied(nn.Module):
    """The weight of an earlier linear layer, transposed."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        linears = [layer for layer in net.layers if isinstance(layer, Linear)]
        self.linear = linears[spec.get("layer", 0) % len(linears)].linear if linears else None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x if self.linear is None else x + torch.tanh(x @ self.linear.weight.to(x.dtype))


class Borrow(nn.Module):
    """A layer of another model of the program."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        layers = list(net.others[spec.get("model", 0)].layers) if net.others else []
        self.other = layers[spec.get("layer", 0) % len(layers)] if layers else None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x if self.other is None else self.other(x, batch)


class Nested(nn.Module):
    """Layers within a layer."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.inner = nn.ModuleList([make_layer(layer, net) for layer in spec.get("layers", [])])
        self.ranks = spec.get("ranks")
        self.after = spec.get("after", 0)
        self.every = spec.get("every", 1)
        self.skips = spec.get("skips", [])
        self.reentrant = spec.get("reentrant")
        self.twice = spec.get("twice", False)

    def run(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        batch.runs += 1
        for layer in self.inner:
            x = layer(x, batch)
        return x


class Gate(Nested):
    """Layers that some forwards skip.

    They are skipped on other ranks than `ranks`, before `after` forwards, in all but one of `every`, or if
    `skips` has [rank, number of the forward].
    """

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.ranks is not None and batch.rank not in self.ranks:
            return x
        if batch.number < self.after or (batch.number + 1) % self.every:
            return x
        if [batch.rank, batch.number] in self.skips:
            return x
        return self.run(x, batch)


class Checkpoint(Nested):
    """Layers that are recomputed in backward; `twice`: in two checkpoints."""

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        for _ in range(1 + self.twice):
            if torch.is_grad_enabled():
                x = checkpoint(self.run, x, batch, use_reentrant=bool(self.reentrant))
            else:
                x = self.run(x, batch)
        return x


class _Trapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, traps: Traps) -> torch.Tensor:
        ctx.traps = traps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.traps.spring("backward")
        return gradients[0], None


class Trap(nn.Module):
    """Raises in forward or in backward, when the program has set it."""

    def __init__(self, spec: dict[str, Any], net: Net) -> None:
        super().__init__()
        self.traps = net.traps

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.traps.spring("forward")
        return _Trapped.apply(x, self.traps)


LAYERS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "add": Add,
    "scale": Scale,
    "table": Table,
    "embedding": Embedding,
    "complex": Complex,
    "buffer": Buffer,
    "factor": Factor,
    "again": Again,
    "tied": Tied,
    "borrow": Borrow,
    "gate": Gate,
    "checkpoint": Checkpoint,
    "trap": Trap,
    "held": Held,
    "wrapped": Wrapped,
}


class Net(nn.Module):
    """A generated model.

    Args:
        spec: `layers`, and `frozen`: numbers of parameters that do not train.
        others: Models of the program that come before.
        traps: The state that its traps look at.
    """

    def __init__(self, spec: dict[str, Any], others: list[Net], traps: Traps) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.__dict__["others"] = others
        self.__dict__["traps"] = traps
        for layer in spec.get("layers", []):
            self.layers.append(make_layer(layer, self))
        self.last = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))  # so that each model has a parameter
        for number in spec.get("frozen", []):
            parameter_of(self, number).requires_grad_(False)
        self.last.requires_grad_(True)

    def earlier(self, number: int) -> nn.Module | None:
        return self.layers[number % len(self.layers)] if len(self.layers) else None

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x * self.last


def make_layer(spec: dict[str, Any], net: Net) -> nn.Module:
    return LAYERS[spec["kind"]](spec, net)


def parameter_of(net: nn.Module, number: int) -> nn.Parameter:
    # An op that changes this plain parameter changes the wrapped tensor on the ranks, too.
    named = net.named_parameters()
    parameters = [p for name, p in named if name.rpartition(".")[2] not in ("held", "wrapped")]
    return parameters[number % len(parameters)]
