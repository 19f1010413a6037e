"""Averages sparse gradients: gathers the rows of all ranks, and computes their mean.

Every rank gets the rows of all ranks in rank order, or those of all virtual ranks in their order, and adds
them in the same way, so the means have the same bits on all ranks. If the gradient of one rank is dense
(because the embedding's weight is used elsewhere, too), the mean is dense on all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline import _core
from paceline.reducer.communicator import Communicator

_HEADER = struct.Struct("<d??qq")


@dataclass(frozen=True)
class _Rows:
    """A gradient of one parameter: `values` of the rows `indices`; without `is_given`, there is none."""

    weight: float
    is_given: bool
    is_dense: bool
    indices: torch.Tensor
    values: torch.Tensor


class SparseMeans:
    """Averages the sparse gradients of one model.

    Attributes:
        indices: Those of the parameters that have sparse gradients.
        squared_norm: The squared norm of the last backward's means.
        nonfinite: (rank, parameter) of each gradient of the last backward that was not finite.
    """

    def __init__(
        self, parameters: Sequence[tuple[int, torch.Tensor]], communicator: Communicator[torch.Tensor]
    ) -> None:
        self.indices = {index for index, _ in parameters}
        self._parameters = parameters
        self._communicator = communicator
        self.squared_norm = 0.0
        self.nonfinite: list[tuple[int, int]] = []

    @torch.no_grad()
    def pack(self, weight: float, *, has_data: bool = True) -> list[bytes]:
        return [_pack(parameter.grad if has_data else None, weight) for _, parameter in self._parameters]

    @torch.no_grad()
    def average(self, packed: Sequence[list[bytes]]) -> None:
        """Replace each .grad by the weighted mean of what all ranks have packed. Collective.

        A .grad that no rank has stays None.

        Example:
            Rank 0 has row 1 with [2], rank 1 row 4 with [6]; both get rows 1 and 4 with [1] and [3].
        """
        self.squared_norm, self.nonfinite = 0.0, []
        for number, (index, parameter) in enumerate(self._parameters):
            payloads = self._communicator.all_gather(b"".join(each[number] for each in packed))
            by_rank = [list(_unpack(payload, parameter)) for payload in payloads]
            self.nonfinite += [
                (rank, index)
                for rank, parts in enumerate(by_rank)
                if any(part.weight and not torch.isfinite(part.values).all() for part in parts)
            ]
            rows = [part for parts in by_rank for part in parts]
            if any(part.is_given for part in rows):  # also without rows: for optimizers that is not None
                # Every rank computes the mean for itself, and all must get the same bits.
                with _core.DefaultFloats():
                    parameter.grad = _mean(rows, parameter)
                    values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                    self.squared_norm += float(values.double().square().sum())


def _pack(gradient: torch.Tensor | None, weight: float) -> bytes:
    if gradient is None:
        return _HEADER.pack(weight, False, False, 0, 0)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        indices, values = gradient.indices()[0], gradient.values()
    else:
        indices, values = torch.arange(len(gradient)), gradient
    head = _HEADER.pack(weight, True, not gradient.is_sparse, indices.numel(), values.numel())
    return b"".join((head, _bytes_of(indices), _bytes_of(values)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    # A copy, because dimensions of size 1 may have any stride, which view() to bytes refuses.
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return bytes(flat.numpy().tobytes())


def _unpack(payload: bytes, parameter: torch.Tensor) -> Iterator[_Rows]:
    end = 0
    while end < len(payload):
        weight, is_given, is_dense, count, numel = _HEADER.unpack_from(payload, end)
        begin = end + _HEADER.size
        end = begin + 8 * count + numel * parameter.element_size()
        if not count:
            empty = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device="cpu")
            no_rows = torch.empty(0, dtype=torch.int64, device="cpu")
            yield _Rows(weight, is_given, is_dense, no_rows, empty)
            continue
        memory = bytearray(payload[begin:end])
        indices = torch.frombuffer(memory, dtype=torch.int64, count=count)
        values = torch.frombuffer(memory, dtype=parameter.dtype, count=numel, offset=8 * count)
        yield _Rows(weight, is_given, is_dense, indices, values.view(count, *parameter.shape[1:]))


def _mean(rows: Sequence[_Rows], parameter: torch.Tensor) -> torch.Tensor:
    is_dense = any(part.is_dense for part in rows)
    # Not by an argument of each call, with which torch 2.11 and 2.12 warn nevertheless.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        mean = _sparse_mean([part for part in rows if part.weight], parameter)  # 0 * NaN would be NaN
    return (mean.to_dense() if is_dense else mean).to(parameter.device)


def _sparse_mean(counting: Sequence[_Rows], parameter: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    none = torch.empty(0, *parameter.shape[1:], dtype=wide, device="cpu")  # whatever the default device is
    no_rows = torch.empty(0, dtype=torch.int64, device="cpu")
    indices = torch.cat([no_rows, *(part.indices for part in counting)])
    # By numpy: torch divides large tensors among threads, each of which has its own rounding mode.
    values = torch.from_numpy(
        np.concatenate([none.numpy(), *(part.values.to(wide).numpy() * part.weight for part in counting)])
    )
    added = torch.sparse_coo_tensor(indices[None], values, parameter.shape, device="cpu").coalesce()
    means = added.values().numpy() / (sum(part.weight for part in counting) or 1)
    return torch.sparse_coo_tensor(
        added.indices(),
        # A copy in torch's own memory: a backward that adds to an empty mean resizes it.
        torch.from_numpy(means).to(parameter.dtype, copy=True),
        parameter.shape,
        device="cpu",
        is_coalesced=True,
    )
