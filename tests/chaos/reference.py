"""The weights after every step, from numpy in float64, in one process, without the code under test.

Also the batches and first weights of the jobs, which both sides use.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from tests.chaos.plans import STEPS, Job

Array = np.ndarray[Any, Any]

INPUTS, OUTPUTS, ROWS = 12, 4, 3
LEARNING_RATE, MOMENTUM = 0.05, 0.9


def first_weights(width: int) -> list[Array]:
    """Three layers: a matrix (inputs, outputs) and a bias each, float32."""
    random = np.random.default_rng(7)
    sizes = (INPUTS, width, width, OUTPUTS)
    weights = []
    for rows, columns in itertools.pairwise(sizes):
        weights.append((random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32))
        weights.append((random.standard_normal(columns) / 10).astype(np.float32))
    return weights


def batch(rank: int, step: int, micro: int) -> tuple[Array, Array]:
    """Inputs (ROWS, INPUTS) and targets (ROWS, OUTPUTS), float32."""
    random = np.random.default_rng((rank, step, micro))
    inputs = random.standard_normal((ROWS, INPUTS)).astype(np.float32)
    return inputs, random.standard_normal((ROWS, OUTPUTS)).astype(np.float32)


@functools.cache
def weights_after(job: Job) -> list[list[Array]]:
    """Element n: the weights after n steps of all ranks, float64."""
    weights = [each.astype(np.float64) for each in first_weights(job.width)]
    velocity = [np.zeros_like(each) for each in weights]
    after = [[each.copy() for each in weights]]
    for step in range(STEPS):
        mean = [np.zeros_like(each) for each in weights]
        active = [rank for rank in range(job.world_size) if step < job.steps_of(rank)]
        # torch's Join divides by the initial number of ranks.
        share = 1 / (job.world_size if job.style == "join" else len(active))
        for rank in active:
            for micro in range(job.micro_batches):
                for total, gradient in zip(mean, _gradients(weights, *batch(rank, step, micro))):
                    total += share * gradient
        for each, moving, gradient in zip(weights, velocity, mean):
            moving *= MOMENTUM
            moving += gradient
            each -= LEARNING_RATE * moving
        after.append([each.copy() for each in weights])
    return after


def _gradients(weights: list[Array], inputs: Array, targets: Array) -> list[Array]:
    """The gradients of the mean over all elements of (output - target)^2; tanh between the layers."""
    seen = [inputs.astype(np.float64)]
    for layer in range(3):
        out = seen[-1] @ weights[2 * layer] + weights[2 * layer + 1]
        seen.append(np.tanh(out) if layer < 2 else out)
    flow = 2 * (seen[3] - targets) / targets.size
    found: list[Array] = []
    for layer in (2, 1, 0):
        if layer < 2:
            flow = flow * (1 - seen[layer + 1] ** 2)
        found = [seen[layer].T @ flow, flow.sum(axis=0), *found]
        flow = flow @ weights[2 * layer].T
    return found
