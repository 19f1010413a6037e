"""What a pass found out on the way: the gradient's norm, for clipping without a pass.

The one idea: the norm of the means is known when backward returns. It is that of .grad as long as nobody has
changed .grad (see `FreshGradients`); that is only looked at in models that clip.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def fingerprint(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Tells whether a gradient was changed, or replaced."""
    gradients = [p.grad for p in parameters]
    return [(id(g), g._version) for g in gradients if g is not None]


def memory(parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Addresses and sizes of all gradients; None where one is on another device, or sparse."""
    pointers, sizes = [], []
    for gradient in [p.grad for p in parameters]:
        if gradient is None:
            continue
        if not gradient.is_cpu or gradient.layout is not torch.strided:
            return None
        pointers.append(gradient.data_ptr())
        sizes.append(extent(gradient))
    return pointers, sizes


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize


def clip(
    parameters: Sequence[nn.Parameter], max_norm: float, known_norm: float | None, norm_type: float
) -> torch.Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns the norm that they had.

    Args:
        known_norm: Their 2-norm; None: to be computed.
    """
    if known_norm is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # As in torch: a NaN stays a NaN, and a norm that is small enough changes nothing.
    factor = max_norm / (known_norm + 1e-6)
    if not factor >= 1.0:
        with torch.no_grad():
            torch._foreach_mul_(gradients, factor)
    return torch.tensor(known_norm, device=gradients[0].device if gradients else None)
