"""Tensors of torch that have no memory of their own, like those of quantisation libraries and others."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class Quantised(torch.Tensor):
    """A matrix kept as int8 and a scale per row. It supports few operations, like the real ones."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale_ = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_"], inner["scale_"])

    @classmethod
    def make(cls, seed: int, rows: int = 4, columns: int = 3) -> Quantised:
        made = torch.Generator().manual_seed(seed)
        whole = torch.randint(-127, 127, (rows, columns), generator=made, dtype=torch.int8)
        return cls(whole, torch.rand(rows, generator=made) / 100)

    def dequantize(self) -> torch.Tensor:
        return self.data_ * self.scale_[:, None]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantised({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].data_), func(args[0].scale_))
        raise NotImplementedError(f"Quantised does not know {func}")


class Opaque(Quantised):
    """A tensor that does not declare its inner tensors."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Forwarding(torch.Tensor):
    """A tensor around another one, to which it forwards every operation."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Forwarding({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        def wrapped(value: Any) -> Any:
            return cls(value) if isinstance(value, torch.Tensor) and type(value) is torch.Tensor else value

        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach())
        found = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        if func._schema.name.endswith("_") and isinstance(args[0], cls):  # in place
            return args[0]
        return tree_map(wrapped, found)
