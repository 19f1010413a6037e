"""all_reduce, reduce and reduce_scatter of tensors.

Each function checks its arguments in the caller's thread, and returns a function that runs the collective
and blocks until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed import ReduceOp

from paceline.collectives.ops import DTYPE_NUMBERS
from paceline.collectives.ops import ReduceOp as Op
from paceline.errors import ConfigError
from paceline.torch.backend import sparse
from paceline.torch.backend.staging import as_input, check_output, check_tensor, joined, write_back

if TYPE_CHECKING:
    from paceline._core import HostGroup

Call = Callable[[], None]

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in DTYPE_NUMBERS.items()}
# Keyed by hash: reading the enum out of a ReduceOp costs several times as much, in calls of microseconds.
_INEXACT_OPS: dict[int, int] = {
    hash(ReduceOp.SUM): Op.SUM.value,
    hash(ReduceOp.AVG): Op.MEAN.value,
    hash(ReduceOp.MIN): Op.MIN.value,
    hash(ReduceOp.MAX): Op.MAX.value,
    hash(ReduceOp.PRODUCT): Op.PRODUCT.value,
}
_EXACT_OPS = {op: code for op, code in _INEXACT_OPS.items() if code != Op.MEAN}
_BOOL_OPS = {**_EXACT_OPS, hash(ReduceOp.BAND): Op.MIN.value, hash(ReduceOp.BOR): Op.MAX.value}
_COMPLEX_OPS = {op: code for op, code in _INEXACT_OPS.items() if code in (Op.SUM, Op.MEAN)}
_SCALED_SUM = hash(ReduceOp.PREMUL_SUM)


def _ops_of(dtype: torch.dtype) -> dict[int, int]:
    if dtype is torch.bool:
        return _BOOL_OPS
    return _INEXACT_OPS if dtype.is_floating_point else _EXACT_OPS


#: For each dtype: the core's number of the dtype, and the core's numbers of its ops, by hash(ReduceOp).
KERNELS: dict[torch.dtype, tuple[int, dict[int, int]]] = {
    dtype: (number, _ops_of(dtype)) for dtype, number in DTYPES.items()
}
NO_KERNEL: tuple[int, dict[int, int]] = (-1, {})
_COMPLEX_KERNELS = {torch.complex64: DTYPES[torch.float32], torch.complex128: DTYPES[torch.float64]}


@dataclass(frozen=True)
class Reduction:
    dtype: int
    op: int
    factor: float | torch.Tensor | None = None  # each rank multiplies its input by it first

    @classmethod
    def of(cls, tensor: torch.Tensor, op: ReduceOp) -> Reduction:
        """Raises ConfigError if the backend has no such reduction."""
        check_tensor(tensor)
        if tensor.dtype in _COMPLEX_KERNELS:
            number, ops = _COMPLEX_KERNELS[tensor.dtype], _COMPLEX_OPS
        elif tensor.dtype in KERNELS:
            number, ops = KERNELS[tensor.dtype]
        else:
            raise _unsupported(tensor, op)
        if hash(op) == _SCALED_SUM and (tensor.is_floating_point() or tensor.is_complex()):
            return cls(number, Op.SUM, _state(op)[1])
        if hash(op) not in ops:
            raise _unsupported(tensor, op)
        return cls(number, ops[hash(op)])

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        ready = as_input(tensor)
        return ready if self.factor is None else ready.detach() * self.factor


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _state(op: ReduceOp) -> tuple[Any, float | torch.Tensor | None]:
    state: tuple[Any, float | torch.Tensor | None] = cast(Any, op).__getstate__()
    return state


def _op_name(op: ReduceOp) -> str:
    return str(_state(op)[0]).rpartition(".")[2]


def _unsupported(tensor: torch.Tensor, op: ReduceOp) -> ConfigError:
    name = _op_name(op)
    hint = "convert the tensor to one of these, or use a gloo group for it"
    if name == "AVG":
        hint = "use SUM, then divide as your program means it"
    return ConfigError(
        f"The paceline backend has no {name} of {tensor.dtype} tensors.",
        got=f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}",
        expected="SUM, MIN, MAX or PRODUCT of float16, bfloat16, float32, float64, int8 to int64, uint8 or "
        "bool; AVG and PREMUL_SUM of floating types; SUM and AVG of complex64 and complex128",
        hint=hint,
    )


def all_reduce(core: HostGroup, tensors: Sequence[torch.Tensor], op: ReduceOp, timeout_s: float) -> Call:
    calls = [_all_reduce_one(core, tensor, op, timeout_s) for tensor in tensors]
    return calls[0] if len(calls) == 1 else in_turn(calls)


def _all_reduce_one(core: HostGroup, tensor: torch.Tensor, op: ReduceOp, timeout_s: float) -> Call:
    if tensor.layout is torch.sparse_coo:
        return sparse.all_reduce(core, tensor, op, timeout_s)
    reduction = Reduction.of(tensor, op)
    check_output(tensor)
    tensor = real_view(tensor)
    if tensor.is_contiguous() and reduction.factor is None:
        pointer, count = tensor.data_ptr(), tensor.numel()
        return partial(core.all_reduce, pointer, count, reduction.dtype, reduction.op, 1.0, timeout_s)

    def call() -> None:
        buffer = reduction.prepared(tensor)
        core.all_reduce(buffer.data_ptr(), buffer.numel(), reduction.dtype, reduction.op, 1.0, timeout_s)
        write_back(buffer, tensor)

    return call


def reduce(core: HostGroup, tensor: torch.Tensor, op: ReduceOp, root: int, timeout_s: float) -> Call:
    reduction = Reduction.of(tensor, op)
    check_output(tensor)
    tensor = real_view(tensor)

    def call() -> None:
        buffer = reduction.prepared(tensor)
        core.reduce(buffer.data_ptr(), buffer.numel(), reduction.dtype, reduction.op, root, timeout_s)
        if core.rank == root:
            write_back(buffer, tensor)

    return call


def reduce_scatter(
    core: HostGroup, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, timeout_s: float
) -> Call:
    """Reduce `inputs[r]` over all ranks into rank r's `output`. Sizes may differ between ranks."""
    counts = [tensor.numel() for tensor in inputs]
    if len(counts) != core.world_size or counts[core.rank] != output.numel():
        raise ConfigError(
            f"reduce_scatter: {len(counts)} inputs of {counts} elements do not fit the output.",
            expected=f"{core.world_size} inputs, number {core.rank} with {output.numel()} elements",
            hint="pass one input per rank, each as large as that rank's output",
        )
    if all(count == counts[0] for count in counts):
        return reduce_scatter_single(core, output, joined(inputs), op, timeout_s)
    buffers = [as_input(tensor).detach().clone() for tensor in inputs]
    calls = [reduce(core, buffer, op, root, timeout_s) for root, buffer in enumerate(buffers)]

    def call() -> None:
        in_turn(calls)()
        write_back(buffers[core.rank], output)

    return call


def reduce_scatter_single(
    core: HostGroup, output: torch.Tensor, source: torch.Tensor, op: ReduceOp, timeout_s: float
) -> Call:
    if source.dtype is not output.dtype or source.numel() != output.numel() * core.world_size:
        raise ConfigError(
            "reduce_scatter: the input does not fit the output.",
            expected=f"{output.numel()} * {core.world_size} elements of {output.dtype}",
            got=f"{source.numel()} elements of {source.dtype}",
            hint="the input holds one piece per rank, each as large as the output",
        )
    reduction = Reduction.of(source, op)
    source, output = real_view(source), real_view(output)

    def call() -> None:
        ready = reduction.prepared(source)
        target = (
            output
            if output.is_contiguous()
            else torch.empty_like(output, memory_format=torch.contiguous_format)
        )
        core.reduce_scatter(
            ready.data_ptr(), target.data_ptr(), target.numel(), reduction.dtype, reduction.op, timeout_s
        )
        write_back(target, output)

    return call


def in_turn(calls: Sequence[Call]) -> Call:
    def call() -> None:
        for one in calls:
            one()

    return call
