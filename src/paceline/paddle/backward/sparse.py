"""Sparse gradients (SelectedRows): the rows that any rank touched, with the mean of their values.

Every rank gets the rows of all ranks in rank order, or those of all virtual ranks in their order, each value
times its rank's fraction of the total weight. A row that several ranks touched occurs several times; Paddle's
optimizers add these up, as they do for a word that occurs twice in one batch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paceline import _core
from paceline.errors import ConfigError, format_ranks
from paceline.paddle import internals
from paceline.paddle.model.parameters import ManagedTensors
from paceline.reducer.communicator import Communicator

_HEADER = struct.Struct("<d??qqq")


class SparseMeans:
    """Averages the sparse gradients of one model.

    Attributes:
        indices: Those of the parameters that have sparse gradients.
        squared_norm: Always 0: norms do not include sparse gradients.
        nonfinite: (rank, parameter) of each gradient that was not finite in the last backward.
    """

    squared_norm = 0.0

    def __init__(self, tensors: ManagedTensors, communicator: Communicator[paddle.Tensor]) -> None:
        self.nonfinite: list[tuple[int, int]] = []
        self._parameters = tensors.sparse
        first = len(tensors.names)
        self.indices = range(first, first + len(tensors.sparse))
        self._communicator = communicator

    def pack(self, weight: float, *, has_data: bool = True) -> list[bytes]:
        return [_pack(parameter, weight) for parameter in self._parameters.values()]

    def average(self, packed: Sequence[list[bytes]]) -> None:
        """Collective."""
        self.nonfinite = []
        for number, (name, parameter) in enumerate(self._parameters.items()):
            payloads = self._communicator.all_gather(b"".join(each[number] for each in packed))
            by_rank = [list(_unpack(payload, _dtype_of(parameter))) for payload in payloads]
            _check(name, by_rank)
            self.nonfinite += [
                (rank, self.indices[number])
                for rank, parts in enumerate(by_rank)
                if not all(np.isfinite(part.values).all() for part in parts)
            ]
            _replace_by_mean(parameter, [part for parts in by_rank for part in parts])


@dataclass(frozen=True)
class _Rows:
    """A gradient of one parameter: the rows that it has, and their values; without `is_given`, there is none.

    Attributes:
        shape: Of the parameter: the number of rows, and the elements of each.
    """

    weight: float
    is_given: bool
    is_dense: bool
    shape: tuple[int, int]
    rows: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def _dtype_of(parameter: paddle.Tensor) -> np.dtype[Any]:
    return np.dtype(str(parameter.dtype).removeprefix("paddle."))


def _pack(parameter: paddle.Tensor, weight: float) -> bytes:
    """Its gradient, with the weight, which counts even if there is none."""
    gradient = internals.gradient_of(parameter)
    is_dense = gradient is not None and not internals.is_sparse(gradient)
    height, *width = (int(size) for size in parameter.shape)
    counts = gradient is not None and not is_dense and weight != 0.0
    rows, values = internals.rows_of(gradient) if counts else ([], np.empty(0, _dtype_of(parameter)))
    head = _HEADER.pack(weight, gradient is not None, is_dense, height, math.prod(width), len(rows))
    return b"".join((head, np.array(rows, np.int64).tobytes(), values.tobytes()))


def _unpack(payload: bytes, dtype: np.dtype[Any]) -> Iterator[_Rows]:
    end = 0
    while end < len(payload):
        weight, is_given, is_dense, height, width, count = _HEADER.unpack_from(payload, end)
        rows = np.frombuffer(payload, np.int64, count, end + _HEADER.size)
        begin = end + _HEADER.size + rows.nbytes
        values = np.frombuffer(payload, dtype, count * width, begin).reshape(count, width)
        end = begin + values.nbytes
        yield _Rows(weight, is_given, is_dense, (height, width), rows, values)


def _check(name: str, by_rank: Sequence[Sequence[_Rows]]) -> None:
    dense = [rank for rank, parts in enumerate(by_rank) if any(part.is_dense for part in parts)]
    if dense:
        raise _dense_error(name, dense, len(by_rank))
    shapes = [parts[0].shape for parts in by_rank]
    if len(set(shapes)) > 1:  # a row number of one rank may not exist on another
        raise _shape_error(name, [list(shape) for shape in shapes])


def _replace_by_mean(parameter: paddle.Tensor, parts: Sequence[_Rows]) -> None:
    """Replace its gradient by the weighted mean of these, one after the other."""
    height, *width = (int(size) for size in parameter.shape)
    rows = np.concatenate([part.rows for part in parts])
    if not len(rows):
        if height and any(part.is_given for part in parts):
            # Optimizers distinguish zeros from no gradient, and Paddle's SGD divides by the number of rows.
            _replace(parameter, [0], np.zeros((1, *width), _dtype_of(parameter)))
        return
    with _core.DefaultFloats():  # every rank computes the mean itself, and all must get the same bits
        weights = np.array([part.weight for part in parts])
        shares = (weights / weights.sum()).astype(_dtype_of(parameter))
        mean = np.concatenate([part.values * share for part, share in zip(parts, shares)])
    _replace(parameter, rows.tolist(), mean.reshape(-1, *width))


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
