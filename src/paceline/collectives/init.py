"""`paceline.init`: makes a Group from arguments or the environment."""

from __future__ import annotations

from datetime import timedelta

from paceline import _core
from paceline.arguments import Arguments
from paceline.collectives.formation import form_core
from paceline.collectives.group import Group
from paceline.collectives.straggler_warning import DEFAULT_WARN_AFTER_S
from paceline.env import (
    RankEnvironment,
    job_secret_from_environment,
    read_rank_environment,
    split_address,
)
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.secret import find_secret
from paceline.rendezvous.unix_socket_exchange import UnixSocketExchange

_LONGEST_NAME = 200

_arguments = Arguments("init")


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    job_id: str | None = None,
    name: str = "world",
    timeout_s: float | timedelta = 300.0,
    warn_after_s: float | timedelta = DEFAULT_WARN_AFTER_S,
    forming_timeout_s: float | timedelta | None = None,
) -> Group:
    """Join the group of all ranks of this job, which share one host. Collective; blocks until all joined.

    Arguments that are left out are read from the environment variables of `paceline run`, torchrun, Slurm,
    Open MPI or Paddle's launcher.

    Args:
        rank: This process's rank, from 0.
        world_size: Number of ranks, 1 to 128.
        address: "host:port", the same on all ranks of the job. Nothing listens on the port: the text names a
            rendezvous address on this host.
        job_id: A text that is the same on all ranks of the job, and that no other job uses.
        name: The name of the group; one process may be in several groups with different names.
        timeout_s: Time-out of each call in seconds, also of forming the group unless `forming_timeout_s` is
            set.
        warn_after_s: Seconds after which a wait is logged (logger "paceline"), with the ranks that it waits
            for.
        forming_timeout_s: Time-out of forming the group, in seconds.

    Raises:
        ConfigError: An argument or a variable is wrong.
        RendezvousError: A rank is missing at the deadline, or its arguments do not match.
        RegionError: There is not enough memory.

    Example:
        Two processes: paceline.init(rank=0, world_size=2, job_id="a") and the same with rank=1.
    """
    rank, world_size = _place(rank, world_size)
    if address is not None:
        split_address(_arguments.text("address", address, hint='address="127.0.0.1:29500"'), "address")
    if job_id is not None:
        _arguments.text("job_id", job_id, hint="a text that the ranks of this job have in common")
    _check_name(name)
    timeout_s = _arguments.seconds("timeout_s", timeout_s)
    warn_after_s = _arguments.seconds("warn_after_s", warn_after_s)
    if forming_timeout_s is None:
        forming_timeout_s = timeout_s
    forming_timeout_s = _arguments.seconds("forming_timeout_s", forming_timeout_s)
    place = read_rank_environment(
        rank=rank,
        world_size=world_size,
        address=address,
        job_id=job_id,
        needs_address=job_id is None and world_size != 1,  # a job id is a rendezvous address too
    )
    _place(place.rank, place.world_size)
    key = place.job_id if address is None and place.job_id else f"{place.master_addr}:{place.master_port}"
    deadline = Deadline(forming_timeout_s)
    with UnixSocketExchange(
        place.rank,
        place.world_size,
        key=key,
        job_id=place.job_id,
        name=name,
        timeout_s=forming_timeout_s,
        # A job_id argument may be wrong on one rank. The address contains no secret then, so that ranks with
        # the same `address` still connect, and report the difference at once.
        secret=_secret() if job_id is None else "",
        note=_note_on_hosts(place),
    ) as exchange:
        core = form_core(
            exchange,
            name=name,
            timeout_s=max(deadline.left_s(), 1.0),
            warn_after_s=warn_after_s,
            group_timeout_s=timeout_s,
        )
    return Group(core)


def _note_on_hosts(place: RankEnvironment) -> str:
    """A note for errors if the launcher seems to have started ranks on other hosts.

    This is no error by itself, because two nodes of a launcher may be one machine.
    """
    if place.local_world_size in (None, place.world_size):
        return ""
    return (
        f"; the launcher has started {place.local_world_size} of {place.world_size} ranks on this host, and "
        "paceline.init() connects ranks of one host: paceline.torch.init_process_group() and "
        "paceline.paddle.init_parallel_env() connect hosts"
    )


def _secret() -> str:
    return find_secret().key.hex() or job_secret_from_environment()


def _place(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if world_size is not None:
        hint = "a Group is of one machine; a wrapped model works across them, over torch's or Paddle's"
        world_size = _arguments.whole("world_size", world_size, least=1, most=_core.MAX_RANKS, hint=hint)
    if rank is not None:
        hint = "each rank gets a number of its own, from 0 on; `paceline run` gives it without being asked"
        most = None if world_size is None else world_size - 1
        rank = _arguments.whole("rank", rank, least=0, most=most, hint=hint)
    return rank, world_size


def _check_name(name: object) -> None:
    hint = 'a short one, as name="world"'
    text = _arguments.text("name", name, hint=hint, may_be_empty=False)
    if len(text) > _LONGEST_NAME:
        raise _arguments.refuse("name", text, f"at most {_LONGEST_NAME} characters", hint)
