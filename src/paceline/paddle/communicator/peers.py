"""The ranks that train one model, however they were started.

The one idea: whoever brings the ranks together (a `paceline.Group`, paddle.distributed, or only a launcher's
environment variables), what DataParallel needs is a `Communicator` between them.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from typing import Any, Protocol

import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.collectives.formation import share_on_each_host
from paceline.collectives.group import Group
from paceline.collectives.init import init
from paceline.env import read_rank_environment
from paceline.errors import ConfigError, RegionError
from paceline.health.peer_monitor import ChannelPeerMonitor, MemoryPeerMonitor, report_no_peer_monitor
from paceline.paddle.communicator.calls import WARN_AFTER_S, GroupCalls, LoneCalls
from paceline.paddle.communicator.communicators import (
    Communicator,
    GroupCommunicator,
    HostsCommunicator,
    MemoryCommunicator,
)
from paceline.paddle.communicator.exchange import PaddleExchange
from paceline.paddle.communicator.hosts import MOST_HOSTS, control_of, join_hosts
from paceline.paddle.communicator.start import export_place, form_paddles_group, needs_paddles_group
from paceline.paddle.internals import GLOO_LIMIT_S
from paceline.paddle.model.arguments import checked_group
from paceline.reducer.between_hosts.options import BetweenHosts
from paceline.reducer.peers import EnvironmentGroup, PatientGroup, Ranks, exchange_of_named
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.shared_memory import HostMemory

_DEFAULT_OWNER = "DataParallel"
_OUTSIDE = -1  # the rank that a group of Paddle has where this process is none of its ranks

_log = logging.getLogger("paceline")
_is_limit_told = False
_environment = EnvironmentGroup("paceline.paddle")


class Peers(Ranks, Protocol):
    """The ranks that train one model, and what connects them."""

    group: Any
    """What was passed, or found, that connects the ranks; None: nothing does."""

    def connect(
        self, *, on_host: bool, reduce_through: str = "auto", between_hosts: BetweenHosts | None = None
    ) -> Communicator:
        """What moves gradients and values between the ranks. Collective.

        Args:
            on_host: Whether they are on the CPU; the same on all ranks.
            reduce_through: "memory", "group", or the better one ("auto"); the same on all ranks.
            between_hosts: What is asked of the way of gradients between hosts; the same on all ranks. None:
                only values are moved.

        Raises:
            ConfigError: That is not possible here.
        """
        ...

    def share_hosts(self) -> HostMemory:
        """The memory of this rank's host, and who is on which. Collective."""
        ...


class GroupPeers(PatientGroup):
    """The ranks of a `paceline.Group`, which share one host."""

    def __init__(
        self,
        group: Group,
        timeout_s: float | None = None,
        warn_after_s: float | None = None,
        owner: str = _DEFAULT_OWNER,
    ) -> None:
        super().__init__(group, timeout_s, warn_after_s)
        self.group = group
        self._owner = owner

    def connect(
        self, *, on_host: bool, reduce_through: str = "auto", between_hosts: BetweenHosts | None = None
    ) -> Communicator:
        if not on_host or reduce_through == "group":
            raise ConfigError(
                f"{self._owner}: a paceline.Group works in host memory only.",
                seen=f"reduce_through={reduce_through!r}" if on_host else "parameters on a device",
                hint="call paddle.distributed.init_parallel_env() before, and leave out the group",
            )
        return MemoryCommunicator(self.core, self.group)

    def share_hosts(self) -> HostMemory:
        return HostMemory(self.core, (tuple(range(self.world_size)),))


class PaddlePeers:
    """The ranks of a group of paddle.distributed."""

    def __init__(self, calls: GroupCalls, owner: str = _DEFAULT_OWNER) -> None:
        self.exchange = PaddleExchange(calls)
        self._owner = owner
        self.rank = calls.rank
        self.world_size = calls.world_size
        self.timeout_s = calls.timeout_s
        self.group = calls.group
        self._calls = calls

    def connect(
        self, *, on_host: bool, reduce_through: str = "auto", between_hosts: BetweenHosts | None = None
    ) -> Communicator:
        memory = self.share_hosts() if on_host and reduce_through != "group" else None
        if memory is not None and len(memory.hosts) == 1:
            return MemoryCommunicator(memory.host_group, memory.host_group)
        self._check(on_host, reduce_through)
        if memory is None:
            self._watch()
        else:
            self._calls.peer_monitor = ChannelPeerMonitor(control_of(self.group, self, memory.hosts))
        communicator = GroupCommunicator(self._calls)
        if memory is not None and between_hosts is not None and len(memory.hosts) <= MOST_HOSTS:
            return HostsCommunicator(
                communicator, self._calls, join_hosts(self.group, self, memory), between_hosts
            )
        if memory is not None:
            memory.host_group.close()
        if between_hosts is not None:
            between_hosts.refuse(_why_alone(on_host, reduce_through))
            self._tell_limit()
        return communicator

    def _tell_limit(self) -> None:
        """Say what nobody would expect who has set a longer time-out, or none."""
        global _is_limit_told
        if self._calls.on_host and self.rank == 0 and self.timeout_s > GLOO_LIMIT_S and not _is_limit_told:
            _is_limit_told = True
            _log.warning(
                "paceline: gradients go over a Gloo group of Paddle's alone, which ends the job if a rank is "
                "%g s late, whatever timeout_s (%g s) allows",
                GLOO_LIMIT_S,
                self.timeout_s,
            )

    def _check(self, on_host: bool, reduce_through: str) -> None:
        """Whether a group can do what the memory of one host does not."""
        if reduce_through == "memory":
            raise ConfigError(
                f'{self._owner}: reduce_through="memory" is not possible here.',
                seen="ranks on several hosts" if on_host else "parameters on a device",
                hint='leave reduce_through at "auto"',
            )
        if on_host != self._calls.on_host:
            raise ConfigError(
                f"{self._owner}: a {self._calls.backend} group of Paddle's cannot move these tensors.",
                expected="Gloo for parameters on the CPU, else the engine of their device (NCCL on GPUs)",
                got=f"{self._calls.backend}, parameters on {'the CPU' if on_host else 'a device'}",
                hint="paddle.set_device() before paddle.distributed.init_parallel_env() and the model; "
                "for devices other than GPUs, PADDLE_DISTRI_BACKEND=xccl",
            )

    def share_hosts(self) -> HostMemory:
        name, warn_after_s = f"{self._owner} over paddle.distributed", self._calls.warn_after_s
        return share_on_each_host(
            self.exchange, name=name, timeout_s=self.timeout_s, warn_after_s=warn_after_s
        )

    def _watch(self) -> None:
        """Memory of all ranks in which no gradient lies, or the channel of several hosts.

        Without either, ranks that are lost go unnamed, which rank 0 logs.
        """
        try:
            memory = self.share_hosts()
        except RegionError as error:  # on every rank; gradients need none of it
            report_no_peer_monitor(error, self.rank)
            return
        core = memory.of_all_ranks()
        if core is None:
            self._calls.peer_monitor = ChannelPeerMonitor(control_of(self.group, self, memory.hosts))
        else:
            self._calls.peer_monitor = MemoryPeerMonitor(core)


def _why_alone(on_host: bool, reduce_through: str) -> str:
    """Why gradients go over Paddle's group alone, in words."""
    if not on_host:
        return "parameters on a device"
    if reduce_through == "group":
        return 'reduce_through="group"'
    return f"ranks on more than {MOST_HOSTS} hosts"


class LonePeers:
    """A process that trains alone, and yet weighs its micro-batches, say."""

    rank, world_size, timeout_s = 0, 1, math.inf
    group = None

    @property
    def exchange(self) -> Exchange:
        return self

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """See `Exchange`."""
        return [payload]

    def connect(
        self, *, on_host: bool, reduce_through: str = "auto", between_hosts: BetweenHosts | None = None
    ) -> Communicator:
        if on_host and reduce_through != "group":
            group = init(rank=0, world_size=1, name="paceline.paddle")
            return MemoryCommunicator(group._core, group)
        return GroupCommunicator(LoneCalls(on_host=on_host))

    def share_hosts(self) -> HostMemory:
        group = init(rank=0, world_size=1, name="paceline.paddle")
        return HostMemory(group._core, ((0,),))


def find_peers(
    group: Any,
    timeout_s: float | None = None,
    warn_after_s: float | None = None,
    device_mesh: Any = None,
    owner: str = _DEFAULT_OWNER,
) -> Peers | None:
    """The group that was passed, else paddle.distributed's, else one formed from the environment.

    Args:
        group: A group of paddle.distributed, or ours, or None.
        timeout_s: For the slowest rank; None: the group's own.
        warn_after_s: Until a late rank is named in a warning; None: the usual.
        device_mesh: The ranks instead of a group, or None.
        owner: The class that asks for it, for errors.

    Returns:
        None: this process is the only one.

    Raises:
        ConfigError: The group is none of ours or Paddle's, or both a group and a mesh were passed.
    """
    group = checked_group(owner, group)
    if device_mesh is not None:
        group = _group_of_mesh(device_mesh, group)
    if isinstance(group, Group):
        return GroupPeers(group, timeout_s, warn_after_s, owner)
    if group is None and not dist.is_initialized():
        environment = connect_environment(timeout_s)
        if environment is not None:
            return GroupPeers(environment, timeout_s, warn_after_s, owner)
    if group is None and not (dist.is_initialized() and dist.get_world_size() > 1):
        return None
    _core.hold_late_threads()  # rank 0 serves Paddle's store until it has ended
    calls = GroupCalls(group, timeout_s or _paddles_timeout_s(), warn_after_s or WARN_AFTER_S)
    return PaddlePeers(calls, owner) if calls.world_size > 1 else None


def known_exchange(group: Any, device_mesh: Any = None) -> tuple[Exchange, float] | None:
    """What connects the ranks that these arguments name; see `exchange_of_named`."""
    if getattr(group, "rank", 0) == _OUTSIDE:  # nobody in the group waits for this rank
        return None
    is_there = _environment.formed is not None or dist.is_initialized()
    return exchange_of_named(
        group, device_mesh, lambda named, mesh: find_peers(named, device_mesh=mesh), is_there=is_there
    )


def _group_of_mesh(mesh: Any, group: Any) -> Any:
    """The group of the ranks in a ProcessMesh of paddle.distributed. Collective."""
    if group is not None:
        raise ConfigError(
            "DataParallel: group and device_mesh both name the ranks.",
            expected="one of them",
            hint="pass one of them",
        )
    if not isinstance(mesh, dist.ProcessMesh):
        hint = 'paddle.distributed.ProcessMesh([0, 1], dim_names=["dp"])'
        check = Arguments("DataParallel")
        raise check.refuse("device_mesh", mesh, "a ProcessMesh of one dimension", hint, is_type=True)
    if mesh.ndim != 1:
        raise ConfigError(
            "DataParallel: only a device_mesh of one dimension is supported.",
            expected='one dimension, as ProcessMesh([0, 1], dim_names=["dp"]) has',
            got=f"{mesh.ndim} dimensions: {show(mesh)}",
            hint="pass the data-parallel dimension only",
            argument="device_mesh",
        )
    if not dist.is_initialized():
        raise ConfigError(
            "DataParallel: a device_mesh needs paddle.distributed.",
            hint="call paddle.distributed.init_parallel_env() before wrapping the model",
        )
    if not hasattr(mesh, "get_group"):
        raise ConfigError(
            f"DataParallel: PaddlePaddle {paddle.__version__} does not tell the group of a device_mesh.",
            expected="PaddlePaddle 3.1 or newer",
            hint="pass group=paddle.distributed.new_group(ranks)",
            argument="device_mesh",
        )
    return mesh.get_group()


_common_communicators: weakref.WeakKeyDictionary[Any, dict[bool, Communicator]] = weakref.WeakKeyDictionary()


def common_communicator(group: Any, *, on_host: bool) -> Communicator | None:
    """What moves values between the ranks of a group: one for all layers that ask, None in a single process.

    Collective on the first call for a group.
    """
    peers = find_peers(group)
    if not isinstance(peers, PaddlePeers):
        return None if peers is None else peers.connect(on_host=on_host)
    communicators = _common_communicators.setdefault(peers.group, {})
    if on_host not in communicators:
        communicators[on_host] = peers.connect(on_host=on_host)
    return communicators[on_host]


def _paddles_timeout_s() -> float:
    """How long Paddle's own process groups wait, which users set by PADDLE_PG_TIMEOUT."""
    return float(dist.ParallelEnv().pg_timeout) / 1000


def connect_environment(forming_timeout_s: float | None = None) -> Group | None:
    """Bring the processes that the launcher started together: in memory, or by paddle.distributed.

    Args:
        forming_timeout_s: For them to come together; None: the group's own time-out.

    Returns:
        None: this process is the only one, or paddle.distributed did it. Collective on the first call.
    """
    if needs_paddles_group():
        form_paddles_group(forming_timeout_s or _paddles_timeout_s())
        return None
    return environment_group(forming_timeout_s)


def environment_group(forming_timeout_s: float | None = None) -> Group | None:
    """The group of all processes that the launcher started; one for all models. None for a single one.

    Collective on the first call: blocks until all came.
    """
    if _environment.current is not None:
        return _environment.current
    try:
        place = read_rank_environment(needs_address=False)
    except ConfigError as error:
        if getattr(error, "variable", None):
            raise  # set, but wrong
        warnings.warn(
            "paceline.paddle: no launcher's variables are set, so this process trains alone. "
            "`paceline run -n 2 script.py` or paddle.distributed.launch starts several.",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    if place.world_size == 1:
        return None
    group = _environment.form(forming_timeout_s)
    export_place(group)
    return group
