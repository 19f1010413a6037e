"""all_reduce of sparse tensors: every rank gathers the entries of all ranks, in rank order, and adds them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from paceline.errors import ConfigError, MismatchError

if TYPE_CHECKING:
    from paceline._core import HostGroup

_MOST_DIMENSIONS = 12


def all_reduce(core: HostGroup, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Callable[[], None]:
    """Sum a COO tensor over all ranks, in place; ranks may have entries at different indices.

    The result is coalesced and has the same bits on all ranks.
    """
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu or tensor.dim() > _MOST_DIMENSIONS:
        raise ConfigError(
            f"The paceline backend does not take {tensor.layout} tensors of {tensor.dim()} dimensions.",
            got=f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}",
            expected=f"a dense tensor, or torch.sparse_coo of up to {_MOST_DIMENSIONS} dimensions on a CPU",
            hint="call to_dense() or to_sparse_coo() first",
        )
    if hash(op) != hash(ReduceOp.SUM):  # an enum value, or an object that holds one
        raise ConfigError(
            "Sparse tensors are only added up: an entry that a rank lacks is no number to compare with.",
            got=str(op),
            expected="ReduceOp.SUM",
            hint="call to_dense() first",
        )

    def call() -> None:
        own = tensor.detach().coalesce()
        shapes = _gather(core, _describe(own), timeout_s)
        _check_alike(shapes, core.rank)
        counts = [int(row[0]) for row in shapes]
        indices = _gather_entries(core, own.indices().t(), counts, timeout_s)
        values = _gather_entries(core, own.values(), counts, timeout_s)
        # Not by an argument of the call, with which torch 2.11 and 2.12 warn nevertheless.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            total = torch.sparse_coo_tensor(indices.t(), values, own.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(total)

    return call


def _describe(own: torch.Tensor) -> torch.Tensor:
    alike = [own.sparse_dim(), own.dense_dim(), own.element_size(), own.is_floating_point(), *own.shape]
    return torch.tensor([own._nnz(), *alike, *[-1] * (_MOST_DIMENSIONS - own.dim())])


def _check_alike(rows: torch.Tensor, rank: int) -> None:
    for other, row in enumerate(rows):
        if not torch.equal(row[1:], rows[0][1:]):
            raise MismatchError(
                "all_reduce: the ranks' sparse tensors differ in shape or dtype.",
                where=f"rank {rank} of {len(rows)}",
                expected=f"{_describe_row(rows[0])} (rank 0)",
                got=f"{_describe_row(row)} (rank {other})",
                hint="give every rank a tensor of the same shape, sparse dimensions and dtype",
            )


def _describe_row(row: torch.Tensor) -> str:
    _, sparse_dim, dense_dim, element_bytes, is_floating, *shape = row.tolist()
    kind = "floating" if is_floating else "integer"
    sizes = tuple(shape[: sparse_dim + dense_dim])
    return f"shape {sizes}, {sparse_dim} of them sparse, {kind} elements of {element_bytes} bytes"


def _gather_entries(core: HostGroup, own: torch.Tensor, counts: list[int], timeout_s: float) -> torch.Tensor:
    """Each rank sends its entries, padded to the largest number of entries of any rank."""
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: len(own)] = own
    rows = _gather(core, padded, timeout_s)
    return torch.cat([row[:count] for row, count in zip(rows, counts)])


def _gather(core: HostGroup, own: torch.Tensor, timeout_s: float) -> torch.Tensor:
    """Collective."""
    own = own.contiguous()
    rows: Any = own.new_empty((core.world_size, *own.shape))
    if math.prod(own.shape):
        core.all_gather(own.data_ptr(), rows.data_ptr(), own.nbytes, timeout_s)
    return rows  # type: ignore[no-any-return]
