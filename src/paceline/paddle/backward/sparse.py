"""Sparse gradients (SelectedRows): the rows that any rank touched, with the mean of their values.

Every rank gets every rank's rows, in rank order, each value times that rank's fraction of the total weight. A
row that several ranks touched occurs several times; Paddle's optimizers add these up, as they do for a word
that occurs twice in one batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle

from paceline import _core
from paceline.errors import ConfigError, format_ranks
from paceline.paddle import internals
from paceline.paddle.model.parameters import ManagedTensors
from paceline.reducer.communicator import Communicator


class SparseMeans:
    """Averages the sparse gradients of one model.

    Attributes:
        squared_norm: Always 0: norms do not include sparse gradients.
        nonfinite: (rank, parameter) of each gradient that was not finite in the last backward.
    """

    squared_norm = 0.0

    def __init__(self, tensors: ManagedTensors, communicator: Communicator[paddle.Tensor]) -> None:
        self.nonfinite: list[tuple[int, int]] = []
        self._first = len(tensors.names)
        self._parameters = tensors.sparse
        self._communicator = communicator

    def __len__(self) -> int:
        return len(self._parameters)

    def average(self, weight: float, *, has_data: bool) -> None:
        """Collective."""
        self.nonfinite = []
        for index, (name, parameter) in enumerate(self._parameters.items(), self._first):
            ranks = average_rows(parameter, name, self._communicator, weight)
            self.nonfinite += [(rank, index) for rank in ranks]


def average_rows(
    parameter: paddle.Tensor, name: str, communicator: Communicator[paddle.Tensor], weight: float = 1.0
) -> list[int]:
    """Replace the sparse gradient of `parameter` by its weighted mean over the ranks. Collective.

    A rank without a gradient contributes no rows, and gets every rank's; its weight counts all the same.

    Returns:
        The ranks whose rows hold an infinity or a NaN.
    """
    gradient = internals.gradient_of(parameter)
    is_dense = gradient is not None and not internals.is_sparse(gradient)
    width = [int(size) for size in parameter.shape[1:]]
    counts_here = gradient is not None and not is_dense and weight != 0.0
    rows, values = internals.rows_of(gradient) if counts_here else ([], np.empty((0, *width), np.float32))
    height = int(parameter.shape[0])
    is_given = gradient is not None
    facts = communicator.gather(
        np.array([len(rows), weight, is_dense, height, math.prod(width), is_given], np.float64)
    )
    counts, weights = facts[:, 0].astype(np.int64), facts[:, 1]
    if facts[:, 2].any():
        raise _dense_error(name, np.flatnonzero(facts[:, 2]).tolist(), len(facts))
    if (facts[:, 3:5] != facts[0, 3:5]).any():  # a row number of one rank may not exist on another
        raise _shape_error(name, facts[:, 3:5].astype(int).tolist())
    most = int(counts.max())
    dtype = np.dtype(str(parameter.dtype).removeprefix("paddle."))
    if most == 0:
        if facts[:, 5].any() and height:
            # Optimizers distinguish zeros from no gradient, and Paddle's SGD divides by the number of rows.
            _replace(parameter, [0], np.zeros((1, *width), dtype))
        return []
    padded_rows, padded_values = np.zeros(most, np.int64), np.zeros((most, *width), dtype)
    padded_rows[: len(rows)], padded_values[: len(rows)] = rows, values
    all_rows, all_values = communicator.gather(padded_rows), communicator.gather(padded_values)
    rows = np.concatenate([part[:count] for part, count in zip(all_rows, counts)]).tolist()
    parts = [part[:count] for part, count in zip(all_values, counts)]
    with _core.DefaultFloats():  # every rank computes the mean itself, and all must get the same bits
        shares = (weights / weights.sum()).astype(dtype)
        mean = np.concatenate([part * share for part, share in zip(parts, shares)])
    _replace(parameter, rows, mean)
    return [rank for rank, part in enumerate(parts) if not np.isfinite(part).all()]


def _replace(parameter: paddle.Tensor, rows: list[int], values: np.ndarray[Any, Any]) -> None:
    gradient = internals.gradient_of(parameter)
    if gradient is None:
        internals.give_rows(parameter, rows, values)
    else:
        internals.set_rows(gradient, rows, values)


def _dense_error(name: str, ranks: list[int], world_size: int) -> ConfigError:
    return ConfigError(
        f"DataParallel cannot average the gradient of '{name}'.",
        where=f"{format_ranks(ranks)} of {world_size}",
        expected="a sparse gradient, as that of nn.Embedding(sparse=True)",
        got="a dense one",
        likely="the weight is used outside of its embedding, too",
        hint="make the embedding with sparse=False",
    )


def _shape_error(name: str, shapes: list[list[int]]) -> ConfigError:
    return ConfigError(
        f"DataParallel cannot average the gradient of '{name}'.",
        expected="one shape on all ranks",
        got=", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes)),
        likely="the embedding's value was replaced by one of another shape after it had been wrapped",
        hint="make such changes first, then wrap; or wrap `.module` again, on every rank",
    )
