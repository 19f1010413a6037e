"""broadcast, all_gather, gather, scatter and all_to_all of tensors.

Each function checks its arguments in the caller's thread, and returns a function that runs the collective
and blocks until it is done. Data is moved as bytes, so every dtype works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import ConfigError
from paceline.torch.backend.staging import (
    as_input,
    as_output,
    check_output,
    check_tensor,
    joined,
    split,
    write_back,
)

if TYPE_CHECKING:
    from paceline._core import HostGroup

Call = Callable[[], None]


def broadcast(core: HostGroup, tensors: Sequence[torch.Tensor], root: int, timeout_s: float) -> Call:
    for tensor in tensors:
        check_output(tensor)

    def call() -> None:
        for tensor in tensors:
            is_root = core.rank == root
            buffer = as_input(tensor) if is_root else as_output(tensor)
            core.broadcast(buffer.data_ptr(), buffer.nbytes, root, timeout_s)
            if not is_root:
                write_back(buffer, tensor)

    return call


def all_gather(
    core: HostGroup, outputs: Sequence[torch.Tensor], source: torch.Tensor, timeout_s: float
) -> Call:
    _check_list("all_gather", outputs, source, core)
    if outputs[core.rank].numel() != source.numel():
        raise _mismatch("all_gather", f"output {core.rank}", outputs[core.rank], source.numel())
    if any(output.numel() != source.numel() for output in outputs):
        return _all_gather_uneven(core, outputs, source, timeout_s)

    def call() -> None:
        ready = as_input(source)
        block = torch.empty(core.world_size * source.numel(), dtype=source.dtype)
        core.all_gather(ready.data_ptr(), block.data_ptr(), ready.nbytes, timeout_s)
        split(block, outputs)

    return call


def _all_gather_uneven(
    core: HostGroup, outputs: Sequence[torch.Tensor], source: torch.Tensor, timeout_s: float
) -> Call:
    calls = [broadcast(core, [output], root, timeout_s) for root, output in enumerate(outputs)]

    def call() -> None:
        write_back(source.reshape(-1), outputs[core.rank])
        for part in calls:
            part()

    return call


def all_gather_single(core: HostGroup, output: torch.Tensor, source: torch.Tensor, timeout_s: float) -> Call:
    check_tensor(source)
    if output.dtype is not source.dtype:
        raise _wrong_dtype("all_gather", output, source)
    if output.numel() != source.numel() * core.world_size:
        raise _mismatch("all_gather", "output", output, source.numel() * core.world_size)

    def call() -> None:
        ready, block = as_input(source), as_output(output)
        core.all_gather(ready.data_ptr(), block.data_ptr(), ready.nbytes, timeout_s)
        write_back(block, output)

    return call


def gather(
    core: HostGroup, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int, timeout_s: float
) -> Call:
    check_tensor(source)
    if core.rank == root:
        _check_list("gather", outputs, source, core)
        for rank, output in enumerate(outputs):
            if output.numel() != source.numel():
                raise _mismatch("gather", f"output {rank}", output, source.numel())

    def call() -> None:
        ready = as_input(source)
        if core.rank != root:
            core.gather(ready.data_ptr(), 0, ready.nbytes, root, timeout_s)
            return
        block = torch.empty(core.world_size * source.numel(), dtype=source.dtype)
        core.gather(ready.data_ptr(), block.data_ptr(), ready.nbytes, root, timeout_s)
        split(block, outputs)

    return call


def scatter(
    core: HostGroup, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int, timeout_s: float
) -> Call:
    check_tensor(output)
    if core.rank == root:
        _check_list("scatter", sources, output, core)
        for rank, source in enumerate(sources):
            if source.numel() != output.numel():
                raise _mismatch("scatter", f"input {rank}", source, output.numel())

    def call() -> None:
        block = joined(sources) if core.rank == root else None
        target = as_output(output)
        core.scatter(
            0 if block is None else block.data_ptr(), target.data_ptr(), target.nbytes, root, timeout_s
        )
        write_back(target, output)

    return call


def all_to_all(
    core: HostGroup, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], timeout_s: float
) -> Call:
    _check_list("all_to_all", outputs, sources[0] if sources else None, core)
    _check_list("all_to_all", sources, outputs[0], core)

    def call() -> None:
        ready = joined(sources)
        block = torch.empty(sum(output.numel() for output in outputs), dtype=outputs[0].dtype)
        sent, received = [s.nbytes for s in sources], [o.nbytes for o in outputs]
        core.all_to_all(ready.data_ptr(), sent, block.data_ptr(), received, timeout_s)
        split(block, outputs)

    return call


def all_to_all_single(
    core: HostGroup,
    output: torch.Tensor,
    source: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    timeout_s: float,
) -> Call:
    """Splits are numbers of rows (dim 0); without splits, rows are divided evenly."""
    if output.dtype is not source.dtype:
        raise _wrong_dtype("all_to_all", output, source)
    sent = _split_bytes("input", source, input_splits, core.world_size)
    received = _split_bytes("output", output, output_splits, core.world_size)

    def call() -> None:
        ready, block = as_input(source), as_output(output)
        core.all_to_all(ready.data_ptr(), sent, block.data_ptr(), received, timeout_s)
        write_back(block, output)

    return call


def _split_bytes(name: str, tensor: torch.Tensor, splits: Sequence[int], world_size: int) -> list[int]:
    check_tensor(tensor)
    rows = tensor.shape[0] if tensor.dim() else 1
    counts = list(splits) if splits else [rows // world_size] * world_size
    if len(counts) != world_size or sum(counts) != rows or min(counts) < 0:
        raise ConfigError(
            f"all_to_all: the {name} splits {counts} do not fit.",
            expected=f"{world_size} splits that add up to {rows} rows",
            hint="pass one split per rank" if splits else "pass splits where rows do not divide evenly",
        )
    row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
    return [count * row_bytes for count in counts]


def _check_list(
    name: str, tensors: Sequence[torch.Tensor], like: torch.Tensor | None, core: HostGroup
) -> None:
    if len(tensors) != core.world_size or like is None:
        raise ConfigError(
            f"{name}: a list of {len(tensors)} tensors does not fit the group.",
            expected=f"{core.world_size} tensors, one per rank",
            hint="the length of the list is the world size of the group",
        )
    for tensor in (*tensors, like):
        check_tensor(tensor)
        if tensor.dtype is not like.dtype:
            raise _wrong_dtype(name, tensor, like)


def _wrong_dtype(name: str, tensor: torch.Tensor, like: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"{name}: the tensors of one call have different dtypes.",
        expected=str(like.dtype),
        got=str(tensor.dtype),
        hint="convert one side first; nothing is cast on the way",
    )


def _mismatch(name: str, which: str, tensor: torch.Tensor, expected: int) -> ConfigError:
    return ConfigError(
        f"{name}: the {which} has the wrong size.",
        expected=f"{expected} elements",
        got=f"shape {tuple(tensor.shape)}, {tensor.numel()} elements",
        hint="size the tensors for the group that is used",
    )
