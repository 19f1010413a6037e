"""Functions and classes with the names that code for torch.distributed or paddle.distributed uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paddle import nn

from paceline.arguments import Arguments
from paceline.collectives.group import Group
from paceline.launch.spawn import spawn as launch_spawn
from paceline.launch.spawn_context import SpawnContext
from paceline.paddle.communicator.find_peers import connect_environment
from paceline.paddle.ddp.parallel import DataParallel


class DistributedDataParallel(DataParallel):
    """`DataParallel` with the signature of torch's class, for code converted from torch.

    The arguments mean what they do there; see `DataParallel`.

    Example:
        >>> model = DistributedDataParallel(model, find_unused_parameters=True)
        >>> model(batch).sum().backward()   # rank 0's gradient was 1, rank 1's was 3: now 2 on both
    """

    def __init__(
        self,
        module: nn.Layer,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        **options: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _ARGUMENTS}
        super().__init__(module, **given, **options)


_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {
    "self",
    "module",
    "options",
}


def init_parallel_env() -> Group | None:
    """Connect the processes of one host, like paddle.distributed.init_parallel_env(), but faster.

    It needs no store of Paddle. DataParallel calls it by itself, so calling it is optional, unless code asks
    Paddle for the rank before: under torchrun, Slurm and MPI, paddle.distributed.get_rank() and Paddle's
    samplers know the rank only after this call. Collective; blocks until all processes that the launcher
    started have called it. Processes of several hosts, and those that train on GPUs, are connected by
    paddle.distributed.init_parallel_env(), after a check that they fit together.

    Returns:
        The group, which has collectives on numpy arrays. None in a single process, and None if
        paddle.distributed formed the group. The collectives of paddle.distributed itself need
        paddle.distributed.init_parallel_env().

    Raises:
        ConfigError: A variable of the launcher is wrong, or the address of rank 0 is not valid.
        RendezvousError: A process is missing at the deadline. On several hosts also: ranks expect different
            numbers of ranks, have different versions or secrets, two claim one rank, or one cannot go on.
            Raised on all ranks, with ranks and hosts.

    Example:
        Rank 0 and rank 1 both call it, under `paceline run -n 2`: both get a group of world_size 2.
    """
    return connect_environment()


def spawn(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> SpawnContext | None:
    """Call `func(*args)` in several new processes, like paddle.distributed.spawn.

    `paceline.spawn` does the same, but calls `func(rank, *args)` like torch's function.

    Args:
        func: What to call on each rank.
        args: Its arguments.
        nprocs: Number of ranks; -1: as many as there are cores.
        join: Wait for the ranks; else return at once.
        daemon: With join=False: stop the ranks, instead of waiting for them, when this process ends.
        **options: Further options of `paceline.spawn`.

    Returns:
        None, or with join=False a context to join later.

    Raises:
        ConfigError: An argument is wrong; nothing was started.
        LaunchError: A rank failed. It names the first rank that failed, and the reason.

    Example:
        >>> spawn(train, args=(0.1,), nprocs=2)
        Two processes run; each calls train(0.1).
    """
    check = Arguments("spawn")
    check.function("func", func, "func(*args)")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise check.refuse("args", args, "its arguments, in a tuple", "args=(1,) for one", is_type=True)
    count = None if nprocs == -1 else nprocs
    return launch_spawn(_call_without_rank, (func, *args), count, join, daemon, **options)


def _call_without_rank(rank: int, func: Callable[..., Any], *args: Any) -> None:
    func(*args)
