"""`paceline.torch.empty`: tensors in the memory that the ranks of a group share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.arguments import Arguments
from paceline.torch.backend.process_group import PacelineProcessGroup

_arguments = Arguments("paceline.torch.empty")


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return a tensor of zeros in the memory that the ranks of a process group share.

    Each rank gets its own tensor. The group's all_reduce, reduce, reduce_scatter, broadcast and all_gather
    work on it in place; any other tensor is copied through the shared memory in chunks. So use it for a
    tensor that is reduced many times. The memory is freed when the last view of the tensor is gone. A forked
    child cannot read it.

    Collective: every rank requests the same number of bytes, in the same order among its collective calls.
    Blocks until all ranks have called it, at most for the group's timeout.

    Args:
        *size: The shape: whole numbers, or one sequence of them.
        dtype: The dtype of the elements; None: torch's default dtype.
        group: A group of the backend "paceline"; None: the default group.

    Returns:
        A contiguous tensor on the CPU.

    Raises:
        ConfigError: The group has another backend, or an argument is wrong.
        MismatchError: The ranks asked for different numbers of bytes.
        RegionError: At least one rank does not have enough memory. Raised on every rank.
        PeerLostError, DeadlineError: A rank died, or did not make the call in time.

    Example:
        Rank 0 and rank 1 both run, under `paceline run -n 2`:

        >>> import torch.distributed as dist, paceline.torch
        >>> dist.init_process_group("paceline")                      # doctest: +SKIP
        >>> sums = paceline.torch.empty(3)                           # doctest: +SKIP
        >>> sums.fill_(dist.get_rank() + 1.0)                        # doctest: +SKIP
        >>> dist.all_reduce(sums)                                    # both hold [3, 3, 3]; doctest: +SKIP
    """
    shape = _checked_shape(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    hint = "for example dtype=torch.float32"
    _arguments.instance("dtype", dtype, torch.dtype, what="a dtype of torch", of="dtype", hint=hint)
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(_backend_of(group).allocate(nbytes)).view(dtype).view(shape)


def _checked_shape(size: Sequence[Any]) -> tuple[int, ...]:
    one = len(size) == 1 and isinstance(size[0], (tuple, list))
    return tuple(_arguments.whole("size", each, least=0) for each in (size[0] if one else size))


def _backend_of(group: Any) -> PacelineProcessGroup:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if isinstance(group, PacelineProcessGroup):
        return group
    got = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else repr(group)
    raise _arguments.refuse(
        "group",
        got,
        'a process group of the backend "paceline"',
        'call torch.distributed.init_process_group("paceline") first; or take torch.empty()',
    )
