"""The environment of each rank: the inverse of paceline.env. Pure functions; imports nothing of Paceline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MasterAddress:
    """The master address of one launch, and the id that distinguishes it from other launches."""

    master_addr: str
    master_port: int
    paddle_ports: tuple[int, ...]  # one per rank: Paddle names a rank by its endpoint
    job_id: str


def new_job_id() -> str:
    """128 random bits, so that no two launches ever share one."""
    return os.urandom(16).hex()


def rank_variables(rank: int, nprocs: int, master_address: MasterAddress) -> dict[str, str]:
    """The variables of torch, Paddle and Paceline for one rank of a launch on one host.

    Example:
        Rank 1 of 2 gets RANK=1, LOCAL_RANK=1, WORLD_SIZE=2, PADDLE_TRAINER_ID=1, ...; MASTER_ADDR,
        MASTER_PORT and PACELINE_JOB_ID are the same for rank 0.
    """
    endpoints = [f"{master_address.master_addr}:{port}" for port in master_address.paddle_ports]
    return {
        "PACELINE_JOB_ID": master_address.job_id,
        # torch, as torchrun sets them
        "RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": master_address.master_addr,
        "MASTER_PORT": str(master_address.master_port),
        # Paddle, as paddle.distributed.launch sets them
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(nprocs),
        "PADDLE_GLOBAL_RANK": str(rank),
        "PADDLE_GLOBAL_SIZE": str(nprocs),
        "PADDLE_LOCAL_RANK": str(rank),
        "PADDLE_LOCAL_SIZE": str(nprocs),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_NNODES": "1",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": endpoints[0],
    }


def rank_environment(
    rank: int,
    nprocs: int,
    master_address: MasterAddress,
    inherited: Mapping[str, str],
    *,
    num_threads: int,
    is_threads_given: bool,
    has_gpu: bool,
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
        rank: The rank.
        nprocs: Number of ranks.
        master_address: The master address of the launch.
        inherited: The launcher's own environment.
        num_threads: Threads for this rank's kernels.
        is_threads_given: The user asked for `num_threads`; otherwise OMP_NUM_THREADS takes precedence.
        has_gpu: The machine has a GPU; otherwise Paddle must use Gloo, or it makes no process group.
    """
    environment = {name: value for name, value in inherited.items() if not _is_stale(name)}
    environment.update(rank_variables(rank, nprocs, master_address))
    if is_threads_given or not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(num_threads)
    environment.setdefault("PYTHONFAULTHANDLER", "1")  # a segmentation fault leaves a traceback
    if not has_gpu:
        environment.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    return environment


def _is_stale(name: str) -> bool:
    # Variables of an enclosing torchrun would make rank 0 expect a store that the agent serves. The
    # descriptor of an enclosing job holds another secret.
    return name.startswith("TORCHELASTIC_") or name == "PACELINE_SECRET_FD"
