"""A reference for one sync of local SGD: one process, float64, formulas written independently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

Outer = tuple[float, float, bool]
"""The outer optimizer: its learning rate, its momentum, and whether that is Nesterov's."""


def values_of(net: nn.Module) -> list[np.ndarray]:
    """The parameters of a model, copied."""
    return [parameter.detach().double().numpy().copy() for parameter in net.parameters()]


def sync(
    replicas: Sequence[nn.Module],
    begun: list[np.ndarray],
    velocity: list[np.ndarray],
    weights: Sequence[float],
    outer: Outer,
) -> None:
    """Synchronise the models of all replica groups. A frozen parameter that has not changed stays as it is.

    Args:
        replicas: The model of each replica group; all have the same parameters afterwards.
        begun: The parameters at the last sync; afterwards, at this one.
        velocity: The velocity of the outer optimizer; updated.
        weights: The weight of each replica group.
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
