"""`paceline.torch.init_process_group`: torch's own, with what any launcher has told this process.

Its one idea: torch reads the variables of torchrun only, so those are what every other launcher's are turned
into, once, before torch is asked. May import what is below the front end.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.arguments import Arguments
from paceline.env import RankEnvironment, read_rank_environment, split_address

_arguments = Arguments("init_process_group")


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    **options: Any,
) -> None:
    """Call torch.distributed.init_process_group with the place that the launcher gave this process.

    Knows `paceline run`, torchrun, Slurm's srun, Open MPI, MPICH, Paddle's launch, and the pods of a
    LeaderWorkerSet or an indexed Job of Kubernetes. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT of this process, as far as they are known, because scripts and libraries read
    them. Collective; blocks until all ranks came.

    Args:
        backend: As torch's: "gloo", "nccl", "paceline" (one host), ...; None: Gloo for tensors on the CPU,
            and NCCL for those on a GPU.
        timeout: Seconds or a timedelta: for the ranks to come together and for each call; None: torch's
            default, 30 minutes (10 with NCCL).
        rank: This process's rank; None: as the launcher says.
        world_size: Number of ranks; None: as the launcher says.
        address: "host:port" where rank 0 listens; None: as the launcher says.
        **options: Further arguments of torch's, as device_id.

    Raises:
        ConfigError: A variable is missing or wrong. It lists what was found, and what is missing for the
            launcher that it looks like.

    Example:
        `srun -N 2 -n 4 python train.py`: each of the four processes calls init_process_group("gloo"). The
        second on the second node finds RANK=3, LOCAL_RANK=1 and the first node's name in MASTER_ADDR.
    """
    backend = None if backend is None else _arguments.text("backend", backend, hint='backend="gloo"')
    if address is not None:
        split_address(_arguments.text("address", address, hint='address="host0:29500"'), "address")
    if timeout is not None:
        options["timeout"] = timedelta(seconds=_arguments.seconds("timeout", timeout))
    for name in ("init_method", "store"):
        if name in options:
            raise _arguments.refuse(
                name,
                options[name],
                "address=, or nothing: the launcher's",
                f"torch.distributed.init_process_group takes {name}",
            )
    place = read_rank_environment(rank=rank, world_size=world_size, address=address)
    os.environ.update(torch_variables(place))
    dist.init_process_group(
        backend, init_method="env://", rank=place.rank, world_size=place.world_size, **options
    )


def torch_variables(place: RankEnvironment) -> dict[str, str]:
    """The variables that torchrun would have set, as far as they are known.

    Example:
        Rank 3 of 4, the second of two on its host: RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2,
        MASTER_ADDR=node0, MASTER_PORT=23456.
    """
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}
