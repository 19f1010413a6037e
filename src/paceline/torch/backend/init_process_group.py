"""`paceline.torch.init_process_group`: torch's function, with the settings of any supported launcher.

torch reads only torchrun's environment variables, so the variables of other launchers are translated into
those first. Then all ranks register in torch's store and check who is present before torch forms the group:
a missing or mismatched rank is reported at once, where torch would wait in silence.
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
from paceline.rendezvous.membership import Membership
from paceline.rendezvous.preflight import Preflight, prepare
from paceline.rendezvous.resource_limits import START_OF_THREAD, explain
from paceline.torch.communicator.store_exchange import FrameworkKeyStore

_DEFAULT_TIMEOUT_S = 1800.0  # torch's default for Gloo

_arguments = Arguments("init_process_group")
_memberships: weakref.WeakKeyDictionary[dist.ProcessGroup, Membership] = weakref.WeakKeyDictionary()
_starts = itertools.count()  # a process may destroy its group and create another at the same address


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta | float | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    **options: Any,
) -> None:
    """Call torch.distributed.init_process_group with the rank and address that the launcher assigned.

    Supports `paceline run`, torchrun, Slurm's srun, Open MPI, MPICH, Paddle's launch, and the pods of a
    LeaderWorkerSet or an indexed Job of Kubernetes. Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT of this process, because scripts and libraries read them. If the launcher does
    not report which ranks share a host, the host names decide. Collective; blocks until all ranks have
    arrived.

    Args:
        backend: As in torch: "gloo", "nccl", "paceline" (one host), ...; None: Gloo for tensors on the CPU,
            and NCCL for tensors on a GPU.
        timeout: Seconds or a timedelta, for start-up and for each call; None: torch's default, 30 minutes
            (10 with NCCL).
        rank: This process's rank; None: the launcher's value.
        world_size: Number of ranks; None: the launcher's value.
        address: "host:port" where rank 0 listens; None: the launcher's value.
        **options: Further arguments of torch's function, such as device_id.

    Raises:
        ConfigError: A variable is missing or wrong. The message lists what was found, and what is missing for
            the launcher that it looks like.
        RendezvousError: The ranks do not fit together: they expect different numbers of ranks, have different
            versions or secrets, two claim the same rank, or one cannot continue. Raised on all ranks; names
            the ranks and their hosts.

    Example:
        `srun -N 2 -n 4 python train.py`: each of the four processes calls init_process_group("gloo"). The
        second process on the second node gets RANK=3, LOCAL_RANK=1, and MASTER_ADDR with the name of the
        first node.
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
    preflight = prepare(
        place,
        "MASTER_ADDR",
        f"torch {torch.__version__.partition('+')[0]}",  # without the suffix, which depends on the hardware
        timeout_s,
        serves=serves,
        over_gloo=backend is None or "gloo" in backend,
        owner="paceline.torch",
    )
    if not serves:
        preflight.wait_for_rank_0()
    store = _open_store(preflight, timeout_s, serves=serves)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    membership = preflight.attend(FrameworkKeyStore(store), f"paceline/start/{attempt}/{next(_starts)}")
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


def _open_store(preflight: Preflight, timeout_s: float, *, serves: bool) -> TCPStore:
    """torch's store, served by rank 0 or by torchrun's agent. Does not wait for the other ranks."""
    try:
        return TCPStore(
            preflight.way.address,
            preflight.port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        seen = str(error).splitlines()[0]
        likely, hint = "rank 0 has ended meanwhile", "look at rank 0's output"
        if os.strerror(errno.EAGAIN) in seen:  # the store already listens: it holds the port itself
            likely, hint = explain(errno.EAGAIN, START_OF_THREAD)
        elif serves:
            holder = who_listens(preflight.port)
            seen = f"the port is held by {holder}" if holder else seen
            likely = "another job uses the same address"
            hint = "give each job a MASTER_PORT of its own; `paceline run` finds a free one"
        way = preflight.way
        raise RendezvousError(
            f"{preflight.who} could not {'open' if serves else 'reach'} torch's store.",
            where=f"MASTER_ADDR {way.name}, MASTER_PORT {preflight.port}; {way.describe()}",
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
