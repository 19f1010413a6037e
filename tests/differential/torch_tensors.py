"""Layers with tensors that have no memory of their own: as buffers, as frozen and as trained parameters.

The reference has plain tensors of the same values in their places.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.differential.programs import Program, numbered
from tests.tensor_subclasses import Forwarding, Quantised

WIDTH = 4


def _jagged(values: torch.Tensor) -> torch.Tensor:
    rows = [row[: 1 + number % 3] for number, row in enumerate(values)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def _nested(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([row[: 1 + number % 3] for number, row in enumerate(values)])


HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quantised": lambda values: Quantised((values * 100).to(torch.int8), torch.linspace(0.1, 0.5, WIDTH)),
    "forwarding": lambda values: Forwarding(values.clone()),
    "jagged": _jagged,
    "nested": _nested,
    "coo": lambda values: (values * (values > 0)).to_sparse(),
    "csr": lambda values: (values * (values > 0)).to_sparse_csr(),
    "expanded": lambda values: values[:, :1].expand(WIDTH, WIDTH),
    "windows": lambda values: values.flatten()[: 2 * WIDTH - 1].unfold(0, WIDTH, 1),
}
"""The tensors that a layer may hold frozen, each made from a matrix."""

AS_PARAMETERS = ("quantised", "forwarding", "expanded")
_CONVERTING = ("convert", "swap", "replace", "ftz")
_OF_TRAINED = (*_CONVERTING, "clip", "scale_grads", "penalty", "hook", "freeze", "raise")


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as a plain tensor, which replaces it in the reference."""
    if isinstance(tensor, Quantised):
        return tensor.dequantize()
    if isinstance(tensor, Forwarding):
        return tensor.inner
    if tensor.is_nested:
        return torch.cat([row.flatten() for row in tensor.unbind()])
    # Not for the rows of a sparse gradient: to_dense() adds to zeros, and a rank may flush the sum.
    is_matrix = tensor.layout is torch.sparse_csr or (tensor.is_sparse and tensor.sparse_dim() == 2)
    return tensor.to_dense() if is_matrix else tensor


def _spoil(tensor: torch.Tensor, by: float) -> None:
    """Change the values of a tensor, on one rank: wrapping must repair this."""
    if isinstance(tensor, Quantised):
        tensor.scale_.mul_(by)
    elif isinstance(tensor, Forwarding):
        tensor.inner.mul_(by)
    elif tensor.layout is torch.sparse_coo:
        tensor._values().mul_(by)
    elif tensor.is_nested or tensor.layout is torch.sparse_csr:
        tensor.values().mul_(by)
    else:  # every place once
        torch.empty(0).set_(
            tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // 4,), (1,)
        ).mul_(by)


class Held(nn.Module):
    """x + x times a frozen matrix, or a number, that a tensor of some kind holds."""

    def __init__(self, spec: dict[str, Any], net: Any) -> None:
        super().__init__()
        values = 0.3 * torch.randn(WIDTH, WIDTH)
        held = HELD[spec["of"]](values)
        if spec.get("as") == "parameter":
            self.held = nn.Parameter(held, requires_grad=False)
        else:
            self.register_buffer("held", held)

    def spoil(self, by: float) -> None:
        _spoil(self.held.detach(), by)

    def make_plain(self) -> None:
        plain = dense_of(self.held).detach().clone()
        is_parameter = isinstance(self.held, nn.Parameter)
        del self.held
        if is_parameter:
            self.held = nn.Parameter(plain, requires_grad=False)
        else:
            self.register_buffer("held", plain)

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        values = dense_of(self.held).to(x.dtype)
        factor = values.sum() if values.dim() == 1 else values
        return x + 0.2 * (x * factor if values.dim() == 1 else x @ factor)


class _Unwrapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, rewraps: bool) -> torch.Tensor:
        ctx.rewraps = rewraps
        return x.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None]:
        return (Forwarding(gradient) if ctx.rewraps else gradient), None


class Wrapped(nn.Module):
    """x * p, with a trained p around another tensor; its gradient is plain or such a tensor, too."""

    def __init__(self, spec: dict[str, Any], net: Any) -> None:
        super().__init__()
        self.rewraps = spec.get("rewraps", False)
        self.wrapped = nn.Parameter(Forwarding(1 + 0.2 * torch.randn(WIDTH)))

    def spoil(self, by: float) -> None:
        _spoil(self.wrapped.detach(), by)

    def make_plain(self) -> None:
        if isinstance(self.wrapped, Forwarding):  # otherwise another model has this layer, too
            self.wrapped = nn.Parameter(self.wrapped.detach().inner.clone())

    def forward(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        factor = self.wrapped
        if isinstance(factor, Forwarding):
            factor = _Unwrapped.apply(factor, self.rewraps)
        return x * factor


def spoil(net: nn.Module, by: float) -> None:
    """Give all of these tensors other values."""
    for module in net.modules():
        if isinstance(module, (Held, Wrapped)):
            module.spoil(by)


def make_plain(net: nn.Module) -> None:
    """Replace all other tensors by plain ones."""
    for module in net.modules():
        if isinstance(module, (Held, Wrapped)):
            module.make_plain()


def add_tensors(program: Program, rng: random.Random) -> None:
    """Give every fifth program a layer of these.

    From another generator, so that a seed makes the same program as before there were such layers.
    """
    if rng.random() > 0.2 or "dtype" in program:
        return
    names = {op["op"] for _, op in numbered(program["ops"])}
    layers = program["models"][0]["layers"]
    place = rng.randint(0, len(layers))
    if not names & {*_OF_TRAINED} and "frozen" not in program["models"][0] and rng.random() < 0.5:
        layers.insert(place, {"kind": "wrapped", "rewraps": rng.random() < 0.5})
    elif not names & {*_CONVERTING}:
        of = rng.choice(sorted(HELD))
        layer = {"kind": "held", "of": of}
        if of in AS_PARAMETERS and rng.random() < 0.7:
            layer["as"] = "parameter"
        layers.insert(place, layer)
