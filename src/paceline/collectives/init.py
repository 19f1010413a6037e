"""`paceline.init`: from arguments or the environment to a Group. Imports env, rendezvous and group."""

from __future__ import annotations

from paceline.collectives.formation import form_core
from paceline.collectives.group import Group
from paceline.env import job_secret_from_environment, read_rank_environment
from paceline.errors import ConfigError
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.hub import HubExchange

MAX_RANKS_PER_HOST = 128


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    job_id: str | None = None,
    name: str = "world",
    timeout_s: float = 300.0,
    warn_after_s: float = 10.0,
    forming_timeout_s: float | None = None,
) -> Group:
    """Join the group of all ranks of this job, which share one host. Collective; blocks until all came.

    What is not given comes from the environment: that of `paceline run`, torchrun, Slurm, Open MPI or
    Paddle's launcher.

    Args:
        rank: This process's rank, from 0.
        world_size: Number of ranks, 1 to 128.
        address: "host:port" that the ranks of the job have in common. Nothing listens on the port: it
            names a meeting place on this host.
        job_id: Text that the ranks of the job have in common and no other job has.
        name: Of the group; one process may be in several groups with different names.
        timeout_s: For each call; and for the ranks to come together, unless `forming_timeout_s` is given.
        warn_after_s: After how long a wait is logged (logger "paceline"), naming whom it waits for.
        forming_timeout_s: For the ranks to come together.

    Raises:
        ConfigError: An argument or a variable is wrong.
        RendezvousError: A rank is missing at the deadline, or does not fit.
        RegionError: There is not enough memory.

    Example:
        Two processes: paceline.init(rank=0, world_size=2, job_id="a") and the same with rank=1.
    """
    place = read_rank_environment(
        rank=rank,
        world_size=world_size,
        address=address,
        job_id=job_id,
        needs_address=job_id is None and world_size != 1,  # a job id is a meeting place too
    )
    if place.world_size > MAX_RANKS_PER_HOST:
        raise ConfigError(
            "One host can hold at most 128 ranks.", expected="1 to 128", got=f"world_size {place.world_size}"
        )
    if timeout_s <= 0:
        raise ConfigError("timeout_s must be positive.", got=str(timeout_s))
    if forming_timeout_s is None:
        forming_timeout_s = timeout_s
    elif forming_timeout_s <= 0:
        raise ConfigError("forming_timeout_s must be positive.", got=str(forming_timeout_s))
    key = place.job_id if address is None and place.job_id else f"{place.master_addr}:{place.master_port}"
    deadline = Deadline(forming_timeout_s)
    with HubExchange(
        place.rank,
        place.world_size,
        key=key,
        job_id=place.job_id,
        name=name,
        timeout_s=forming_timeout_s,
        # An id in the arguments may be wrong on one rank, which is told at once only where all meet.
        secret=job_secret_from_environment() if job_id is None else "",
    ) as exchange:
        core = form_core(
            exchange,
            name=name,
            timeout_s=max(deadline.left_s(), 1.0),
            warn_after_s=warn_after_s,
            group_timeout_s=timeout_s,
        )
    return Group(core)
