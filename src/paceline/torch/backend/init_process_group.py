"""`paceline.torch.init_process_group`: torch's own, with what any launcher has told this process.

Torch reads the variables of torchrun only, so those are what every other launcher's are turned into, once.
Then all ranks meet in torch's store and see who has come, before torch forms a group there: what it would
wait for in silence is told at once. May import what is below the front end.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import warnings
import weakref
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.arguments import Arguments
from paceline.env import RankEnvironment, read_rank_environment, split_address
from paceline.errors import ConfigError, RendezvousError
from paceline.launch.ports import who_listens
from paceline.rendezvous.addresses import (
    Way,
    check_meeting_address,
    find_way,
    interface_for_gloo,
    interface_problems,
    told_interface,
    wait_for_listener,
)
from paceline.rendezvous.attendance import Arrival, Attendance, attend
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.secret import NO_SECRET, find_secret
from paceline.torch.link.exchange import StoreBoard

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own for Gloo

_arguments = Arguments("init_process_group")
_attendances: weakref.WeakKeyDictionary[dist.ProcessGroup, Attendance] = weakref.WeakKeyDictionary()
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
    deadline = Deadline(timeout_s)
    way = find_way(place.master_addr, "MASTER_ADDR")
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    spans_hosts = place.local_world_size not in (None, place.world_size)
    check_meeting_address(way, place.rank, place.world_size, spans_hosts=spans_hosts, serves=serves)
    problem, unreachable, secret = "", "", NO_SECRET
    listens = ("", "")
    try:
        secret = find_secret()
    except ConfigError as error:  # told to all, who would wait for this rank
        problem = str(error)
    if spans_hosts and (backend is None or "gloo" in backend):
        _tell_gloo(way)
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        wrong, unreachable = interface_problems(names)
        listens = told_interface(names)
        problem = problem or wrong
    who = f"Rank {place.rank} of {place.world_size} on host {socket.gethostname()}"
    if not serves:
        wait_for_listener(
            way,
            place.master_port,
            deadline.left_s(),
            what="MASTER_ADDR",
            who=who,
            likely="rank 0 was not started, or has ended",
            hint="look at rank 0's output; `timeout` gives it longer",
        )
    store = _open_store(way, place, timeout_s, serves=serves, who=who)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"paceline/start/{attempt}/{next(_starts)}"
    arrival = _arrival(place, problem, unreachable, listens)
    attendance = attend(StoreBoard(store), prefix, arrival, max(deadline.left_s(), 1.0), secret.key)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, **options)
    if dist.group.WORLD is not None:
        _attendances[dist.group.WORLD] = attendance


def refuse_latecomers() -> None:
    """Raise if a process has come since the default group was formed, and claims a place in it.

    For whoever begins to train: until then two jobs that meet at one address may have mixed their ranks.

    Raises:
        ConfigError: One has; both holders of the place are named.
    """
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    attendance = None if group is None else _attendances.get(group)
    error = None if attendance is None else attendance.latecomer()
    if error is not None:
        raise ConfigError(
            error.summary,
            where=f"{error.where.partition(',')[0]}, after the group was formed",
            seen=error.seen,
            likely=error.likely,
            hint=error.hint,
        )


def _arrival(place: RankEnvironment, problem: str, unreachable: str, listens: tuple[str, str]) -> Arrival:
    """What this rank tells the others of itself."""
    return Arrival(
        place.rank,
        place.world_size,
        socket.gethostname(),
        os.getpid(),
        # What the store is told crosses the network in the clear, and the id may be a secret.
        hashlib.sha256(place.job_id.encode()).hexdigest()[:8] if place.job_id else "",
        version("paceline"),
        f"torch {torch.__version__.partition('+')[0]}",  # what stands behind it tells of the hardware
        problem,
        unreachable,
        *listens,
    )


def _checked_backend(backend: str) -> str:
    """A backend that torch knows, or one for each kind of device, as "cpu:gloo,cuda:nccl"."""
    text = _arguments.text("backend", backend, hint='backend="gloo"')
    known = dist.Backend.backend_list
    for part in text.split(","):
        name = part.rpartition(":")[2].strip().lower()
        if name not in known:
            expected = f"one of {', '.join(known)}, or one for each kind of device: 'cpu:gloo,cuda:nccl'"
            raise _arguments.refuse("backend", backend, expected, 'backend="gloo"')
    return text


def _tell_gloo(way: Way) -> None:
    """Set GLOO_SOCKET_IFNAME where Gloo would listen at an address that no other host reaches."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    interface, reason = interface_for_gloo(way)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        warnings.warn(
            f"paceline.torch: Gloo is told to listen at {interface}, because {reason}. "
            f"GLOO_SOCKET_IFNAME={interface}, or a line in /etc/hosts for this host, says so beforehand.",
            RuntimeWarning,
            stacklevel=3,
        )


def _open_store(way: Way, place: RankEnvironment, timeout_s: float, *, serves: bool, who: str) -> TCPStore:
    """Torch's store, in the process of rank 0 or of torchrun's agent. Does not wait for the other ranks.

    Raises:
        RendezvousError: Somebody else listens there, or nobody any more.
    """
    try:
        return TCPStore(
            way.address,
            place.master_port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        holder = who_listens(place.master_port) if serves else None
        raise RendezvousError(
            f"{who} could not {'open' if serves else 'reach'} torch's store.",
            where=f"MASTER_ADDR {way.name}, MASTER_PORT {place.master_port}; {way.describe()}",
            seen=f"the port is held by {holder}" if holder else str(error).splitlines()[0],
            likely="another job meets at the same address" if serves else "rank 0 has ended meanwhile",
            hint="give each job a MASTER_PORT of its own; `paceline run` finds a free one"
            if serves
            else "look at rank 0's output",
        ) from error


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
