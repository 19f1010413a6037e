"""Finds the ranks that train one model, however they were started.

A `paceline.Group`, paddle.distributed, or only a launcher's environment variables connect them.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.collectives.group import Group
from paceline.collectives.init import init
from paceline.collectives.straggler_warning import DEFAULT_WARN_AFTER_S
from paceline.env import read_rank_environment
from paceline.errors import ConfigError, warn
from paceline.paddle.communicator.calls import GroupCalls
from paceline.paddle.communicator.form_group import export_place, form_paddles_group, needs_paddles_group
from paceline.paddle.model.arguments import checked_group
from paceline.reducer.peers import EnvironmentGroup, GroupPeers, exchange_of_named
from paceline.reducer.process_group_peers import ProcessGroupExchange, ProcessGroupPeers, store_checks_of
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.shared_memory import HostMemory
from paceline.rendezvous.signatures import LOSSLESS

DEFAULT_OWNER = "DataParallel"
_HOLDER = 0  # the rank of the default group that runs the server of Paddle's store
_OUTSIDE = -1  # the rank of a Paddle group on a process that is not in it

_environment = EnvironmentGroup("paceline.paddle")


class PaddlePeers(ProcessGroupPeers[paddle.Tensor]):
    FRAMEWORK = f"paddle {paddle.__version__}"
    calls: GroupCalls

    def __init__(self, calls: GroupCalls, timeout_s: float, warn_after_s: float, owner: str) -> None:
        group = calls.group
        checks = store_checks_of(
            group,
            calls.rank,
            calls.world_size,
            _FrameworkKeyStore(group.id),
            scope=f"group {group.id}",
            holder=group.ranks.index(_HOLDER) if _HOLDER in group.ranks else None,
            words=f"Paddle's {calls.backend} group",
        )
        exchange = ProcessGroupExchange(calls.rank, calls.world_size, calls.begin_gather, checks)
        super().__init__(calls, exchange, f"{owner} over paddle.distributed", timeout_s, warn_after_s)
        self.group = group

    def check_calls(self, owner: str, *, on_host: bool, reduce_through: str, between_hosts: bool) -> None:
        if on_host != self.calls.on_host:
            raise ConfigError(
                f"{owner}: a {self.calls.backend} group of Paddle's cannot move these tensors.",
                expected="Gloo for parameters on the CPU, else the engine of their device (NCCL on GPUs)",
                got=f"{self.calls.backend}, parameters on {'the CPU' if on_host else 'a device'}",
                hint="paddle.set_device() before paddle.distributed.init_parallel_env() and the model; "
                "for devices other than GPUs, PADDLE_DISTRI_BACKEND=xccl",
            )


class LonePeers:
    rank, world_size, timeout_s, warn_after_s = 0, 1, math.inf, DEFAULT_WARN_AFTER_S
    group = None

    @property
    def exchange(self) -> Exchange:
        return self

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        return [payload]

    def share_hosts(self) -> HostMemory:
        group = init(rank=0, world_size=1, name="paceline.paddle")
        return HostMemory(group._core, ((0,),))


Peers = PaddlePeers | GroupPeers | LonePeers
"""The ranks that train one model, and the connection between them."""


def find_peers(
    group: Any,
    timeout_s: float | None = None,
    warn_after_s: float | None = None,
    device_mesh: Any = None,
    owner: str = DEFAULT_OWNER,
) -> Peers | None:
    """The ranks of the group that was passed, else of paddle.distributed, else of the launcher's environment.

    Returns:
        None: this process is the only one.
    """
    group = checked_group(owner, group)
    if device_mesh is not None:
        group = _group_of_mesh(device_mesh, group)
    if isinstance(group, Group):
        return GroupPeers(group, timeout_s, warn_after_s)
    if group is None and not dist.is_initialized():
        environment = connect_environment(timeout_s)
        if environment is not None:
            return GroupPeers(environment, timeout_s, warn_after_s)
    if group is None and not (dist.is_initialized() and dist.get_world_size() > 1):
        return None
    _core.hold_late_threads()  # rank 0's thread serves Paddle's store until the process ends
    patience = timeout_s or _paddles_timeout_s(), warn_after_s or DEFAULT_WARN_AFTER_S
    calls = GroupCalls(group, *patience)
    return PaddlePeers(calls, *patience, owner) if calls.world_size > 1 else None


def known_exchange(group: Any, device_mesh: Any = None) -> tuple[Exchange, float] | None:
    if getattr(group, "rank", 0) == _OUTSIDE:  # no rank of the group waits for this process
        return None
    is_there = _environment.formed is not None or dist.is_initialized()
    return exchange_of_named(
        group, device_mesh, lambda named, mesh: find_peers(named, device_mesh=mesh), is_there=is_there
    )


def _group_of_mesh(mesh: Any, group: Any) -> Any:
    """Collective."""
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
            f"DataParallel: PaddlePaddle {paddle.__version__} does not say the group of a device_mesh.",
            expected="PaddlePaddle 3.1 or newer",
            hint="pass group=paddle.distributed.new_group(ranks)",
            argument="device_mesh",
        )
    return mesh.get_group()


def _paddles_timeout_s() -> float:
    return float(dist.ParallelEnv().pg_timeout) / 1000


def connect_environment(forming_timeout_s: float | None = None) -> Group | None:
    """Connect the processes that the launcher started: in shared memory, or with paddle.distributed.

    Returns:
        None: this process is the only one, or paddle.distributed connects them. Collective on the first call.
    """
    if needs_paddles_group():
        form_paddles_group(forming_timeout_s or _paddles_timeout_s())
        return None
    return environment_group(forming_timeout_s)


def environment_group(forming_timeout_s: float | None = None) -> Group | None:
    """The group of all processes that the launcher started, one for all models. None for a single process.

    Collective on the first call: blocks until all processes have called it.
    """
    if _environment.current is not None:
        return _environment.current
    try:
        place = read_rank_environment(needs_address=False)
    except ConfigError as error:
        if getattr(error, "variable", None):
            raise  # set, but wrong
        warn(
            "paceline.paddle: no launcher's variables are set, so this process trains alone. "
            "`paceline run -n 2 script.py` or paddle.distributed.launch starts several."
        )
        return None
    if place.world_size == 1:
        return None
    group = _environment.form(forming_timeout_s)
    export_place(group)
    return group


class _FrameworkKeyStore:
    """Paddle's store as a `KeyStore`.

    Its `get` blocks on a missing key. So each key has a counter, which can be read without blocking.
    """

    _lock = threading.Lock()  # all threads of this process share one connection to the store

    def __init__(self, group_id: int) -> None:
        self._prefix = f"paceline/group/{group_id}"
        self._store = paddle.base.core.create_or_get_global_tcp_store()

    def write(self, key: str, value: str) -> None:
        with self._speaking():
            self._store.set(f"{self._prefix}/{key}", value)
            self._store.add(f"{self._prefix}/{key}/written", 1)

    def read(self, key: str) -> str | None:
        with self._speaking():
            if self._store.add(f"{self._prefix}/{key}/written", 0) == 0:
                return None
            return bytes(self._store.get(f"{self._prefix}/{key}")).decode(errors=LOSSLESS)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except ValueError as error:  # Paddle's error for a broken connection
            raise RuntimeError(str(error)) from error
