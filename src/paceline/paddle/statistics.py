"""Clipping with the norm that a pass found on its way."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from paceline.paddle import internals
from paceline.paddle.arena import nbytes


def fingerprint(parameters: Sequence[paddle.Tensor]) -> list[tuple[int, int]]:
    """Tells whether a gradient was changed, or replaced."""
    gradients = map(internals.gradient_of, parameters)
    return [(g.data_ptr(), g.inplace_version) for g in gradients if g is not None]


def memory(parameters: Sequence[paddle.Tensor]) -> tuple[list[int], list[int]] | None:
    """Addresses and sizes of all gradients; None where one is on another device, or has gaps."""
    gradients = [g for g in map(internals.gradient_of, parameters) if g is not None]
    if not all(g.place.is_cpu_place() and g.is_contiguous() for g in gradients):
        return None
    return [g.data_ptr() for g in gradients], [nbytes(g) for g in gradients]


def clip(
    parameters: Sequence[paddle.Tensor], max_norm: float, known_norm: float | None, norm_type: float
) -> paddle.Tensor:
    """Scale gradients so that their norm is at most `max_norm`; returns the norm that they had.

    Args:
        known_norm: Their 2-norm; None: to be computed.
    """
    if known_norm is None:
        norm: paddle.Tensor = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm
    # As Paddle's: a NaN stays a NaN, and a norm that is small enough changes nothing.
    factor = max_norm / (known_norm + 1e-6)
    if not factor >= 1.0:
        with paddle.no_grad():
            for parameter in parameters:
                gradient = internals.gradient_of(parameter)
                if gradient is not None:
                    gradient.scale_(factor)
    return paddle.to_tensor(known_norm)
