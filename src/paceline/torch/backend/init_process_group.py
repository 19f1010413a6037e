"""`paceline.torch.init_process_group`: torch's own, with what any launcher has told this process.

Torch reads the variables of torchrun only, so those are what every other launcher's are turned into, once.
Then all ranks meet in torch's store and see who has come, before torch forms a group there: what it would
wait for in silence is reported at once.
"""

from __future__ import annotations

import errno
import itertools
import os
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.arguments import Arguments
from paceline.env import RankEnvironment, read_rank_environment, split_address
from paceline.errors import RendezvousError
from paceline.launch.ports import who_listens
from paceline.rendezvous.limits import START_OF_THREAD, explain
from paceline.rendezvous.membership import Membership
from paceline.rendezvous.start import Start, prepare
from paceline.torch.communicator.store_exchange import FrameworkKeyStore

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own for Gloo

_arguments = Arguments("init_process_group")
_memberships: weakref.WeakKeyDictionary[dist.ProcessGroup, Membership] = weakref.WeakKeyDictionary()
_starts = itertools.count()  # a process may end its group and begin another, at the same address


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
    MASTER_ADDR and MASTER_PORT of this process, because scripts and libraries read them. Where the launcher
    does not say which ranks share a host, their host's name does. Collective; blocks until all ranks came.

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
        RendezvousError: The ranks do not fit together: they expect different numbers of ranks, have different
            versions or secrets, two claim one rank, or one cannot go on. On all ranks, with names and hosts.

    Example:
        `srun -N 2 -n 4 python train.py`: each of the four processes calls init_process_group("gloo"). The
        second on the second node finds RANK=3, LOCAL_RANK=1 and the first node's name in MASTER_ADDR.
    """
    if backend is not None:
        backend = _checked_backend(backend)
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
    timeout_s = options["timeout"].total_seconds() if "timeout" in options else _DEFAULT_TIMEOUT_S
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    start = prepare(
        place,
        "MASTER_ADDR",
        f"torch {torch.__version__.partition('+')[0]}",  # what stands behind it shows the hardware
        timeout_s,
        serves=serves,
        over_gloo=backend is None or "gloo" in backend,
        owner="paceline.torch",
    )
    if not serves:
        start.wait_for_rank_0()
    store = _open_store(start, timeout_s, serves=serves)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    membership = start.attend(FrameworkKeyStore(store), f"paceline/start/{attempt}/{next(_starts)}")
    os.environ.update(torch_variables(_place_by_names(place, membership)))
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, **options)
    if dist.group.WORLD is not None:
        _memberships[dist.group.WORLD] = membership


def membership_of_default_group() -> Membership | None:
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if group is None else _memberships.get(group)


def _checked_backend(backend: str) -> str:
    text = _arguments.text("backend", backend, hint='backend="gloo"')
    known = dist.Backend.backend_list
    for part in text.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if name not in known:
            expected = f"one of {', '.join(known)}, or one for each kind of device: 'cpu:gloo,cuda:nccl'"
            raise _arguments.refuse("backend", backend, expected, 'backend="gloo"')
    return text


def _open_store(start: Start, timeout_s: float, *, serves: bool) -> TCPStore:
    """Torch's store, in the process of rank 0 or of torchrun's agent. Does not wait for the other ranks."""
    try:
        return TCPStore(
            start.way.address,
            start.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        seen = str(error).splitlines()[0]
        likely, hint = "rank 0 has ended meanwhile", "look at rank 0's output"
        if os.strerror(errno.EAGAIN) in seen:  # the store listens by then: it is the holder of the port
            likely, hint = explain(errno.EAGAIN, START_OF_THREAD)
        elif serves:
            holder = who_listens(start.port)
            seen = f"the port is held by {holder}" if holder else seen
            likely = "another job meets at the same address"
            hint = "give each job a MASTER_PORT of its own; `paceline run` finds a free one"
        raise RendezvousError(
            f"{start.who} could not {'open' if serves else 'reach'} torch's store.",
            where=f"MASTER_ADDR {start.way.name}, MASTER_PORT {start.port}; {start.way.describe()}",
            seen=seen,
            likely=likely,
            hint=hint,
        ) from error


def _place_by_names(place: RankEnvironment, membership: Membership) -> RankEnvironment:
    local_ranks = membership.local_ranks
    return replace(
        place,
        local_rank=local_ranks.index(place.rank) if place.local_rank is None else place.local_rank,
        local_world_size=place.local_world_size or len(local_ranks),
    )


def torch_variables(place: RankEnvironment) -> dict[str, str]:
    """The variables that torchrun would have set, as far as they are known."""
    numbers = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}
