"""The network of the conformance tests in plain numpy and float64: the reference for both frameworks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Arrays = list[np.ndarray]
WIDTH = 5


def initial() -> Arrays:
    """Weights and biases of two layers, in the order of the model's parameters; weights are (in, out)."""
    rng = np.random.default_rng(1)
    shapes = [(4, WIDTH), (WIDTH,), (WIDTH, 2), (2,)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def batch(rows: int = 8, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)


def gradients(parameters: Sequence[np.ndarray], x: np.ndarray) -> Arrays:
    """The gradients of the mean squared output of tanh(x w + b) v + c, in float64."""
    w, b, v, c = (array.astype(np.float64) for array in parameters)
    hidden = np.tanh(x @ w + b)
    output = hidden @ v + c
    to_output = 2 * output / output.size
    to_hidden = (to_output @ v.T) * (1 - hidden**2)
    return [x.T @ to_hidden, to_hidden.sum(0), hidden.T @ to_output, to_output.sum(0)]


def trained(batches: Sequence[np.ndarray], lr: float = 0.1) -> Arrays:
    """The parameters after a step of SGD on each batch."""
    parameters = [array.astype(np.float64) for array in initial()]
    for x in batches:
        parameters = [p - lr * g for p, g in zip(parameters, gradients(parameters, x))]
    return parameters


def norm(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in arrays)))
