"""Tensors in the form that the core needs: contiguous memory, and one block where torch passes a list.

A contiguous tensor is used in place. Any other tensor goes through a contiguous copy, which is written back.
Data that is only moved keeps its bits, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import ConfigError
from paceline.torch.model.inner_tensors import is_disjoint


def as_input(tensor: torch.Tensor) -> torch.Tensor:
    """Applies conjugation and negation, which torch keeps in flags and not in memory."""
    check_tensor(tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def as_output(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or an empty contiguous tensor like it. Pass it to `write_back()` when it is filled."""
    check_output(tensor)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def write_back(filled: torch.Tensor, tensor: torch.Tensor) -> None:
    if filled is not tensor:
        with torch.inference_mode():  # allows writes to tensors that require a gradient
            tensor.copy_(filled.view(tensor.shape))


def check_tensor(tensor: torch.Tensor) -> None:
    """Raises ConfigError unless this is a dense tensor in the memory of the CPU."""
    if not tensor.is_cpu:
        raise ConfigError(
            f"This process group has no backend for {tensor.device.type} tensors.",
            got=f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}",
            hint="move it to the CPU first",
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"The paceline backend does not take {tensor.layout} tensors.",
            got=f"shape {tuple(tensor.shape)}, {tensor.dtype}",
            expected="a dense tensor",
            hint="call to_dense() first, or use a gloo group for sparse tensors",
        )

    if tensor.is_nested or (tensor.numel() and not tensor.data_ptr()):
        raise ConfigError(
            "The paceline backend does not take a tensor without memory of its own, or a nested one.",
            got=f"{type(tensor).__name__}, {tensor.dtype}, {tensor.layout}",
            expected="a dense tensor in memory",
            hint="pass the tensors of which it consists, one after the other",
        )


def check_output(tensor: torch.Tensor) -> None:
    """As `check_tensor`; also raises ConfigError if several elements share memory."""
    check_tensor(tensor)
    if not (tensor.is_contiguous() or is_disjoint(tensor)):
        raise ConfigError(
            "This process group can't write to a tensor of which several elements lie in the same memory.",
            got=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}",
            hint="tensor.contiguous() makes one of it whose elements are its own",
        )


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([as_input(tensor).reshape(-1) for tensor in tensors])


def split(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():
        begin = 0
        for tensor in tensors:
            check_output(tensor)
            tensor.copy_(block[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()
