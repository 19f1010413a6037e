"""A sync of local SGD in one process, in float64, with its own spelling of every formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

Outer = tuple[float, float, bool]
"""The outer optimizer: its learning rate, its momentum, and whether that is Nesterov's."""


def values_of(net: nn.Module) -> list[np.ndarray]:
    """Its parameters, copied."""
    return [parameter.detach().double().numpy().copy() for parameter in net.parameters()]


def meet(
    replicas: Sequence[nn.Module],
    begun: list[np.ndarray],
    velocity: list[np.ndarray],
    weights: Sequence[float],
    outer: Outer,
) -> None:
    """Let the models of all members meet. What is frozen and has not changed stays as it is.

    Args:
        replicas: The model of each member; all have the same parameters afterwards.
        begun: The parameters at the last sync; afterwards, at this one.
        velocity: Of the outer optimizer; moves on.
        weights: What each member weighs.
        outer: The outer optimizer.
    """
    lr, momentum, nesterov = outer
    held = [values_of(replica) for replica in replicas]
    is_trained = [parameter.requires_grad for parameter in replicas[0].parameters()]
    for index, before in enumerate(begun):
        if not is_trained[index] and all(np.array_equal(before, each[index]) for each in held):
            continue
        moved = sum(w * (before - each[index]) for w, each in zip(weights, held, strict=True)) / sum(weights)
        velocity[index] = momentum * velocity[index] + moved
        direction = moved + momentum * velocity[index] if nesterov else velocity[index]
        begun[index] = before - lr * direction
    with torch.no_grad():
        for replica in replicas:
            for parameter, value in zip(replica.parameters(), begun, strict=True):
                parameter.copy_(torch.from_numpy(value))
