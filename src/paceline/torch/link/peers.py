"""The group that a model is wrapped over, whichever kind it is, as DDP needs it.

The one idea: DDP asks a group for three things: bytes from everybody (`exchange`), rank 0's bytes
(`broadcast`), and, if its ranks share one host, their shared memory (`share_host`). A torch process group of
any backend offers them, and so does a `paceline.Group`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paceline.arguments import Arguments
from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.rendezvous.exchange import Exchange
from paceline.torch.link.exchange import ProcessGroupExchange
from paceline.torch.link.restarts import warn_of_shared_store
from paceline.torch.model.arguments import checked_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline import _core
    from paceline.collectives.group import Group

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own, where a process group does not say
_DEFAULT_WARN_AFTER_S = 10.0

_environment_group: Group | None = None  # one for all models of this process


class Peers(Protocol):
    """The ranks that train one model."""

    timeout_s: float
    warn_after_s: float

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def exchange(self) -> Exchange: ...

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Torch's group, if there is one."""
        ...

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        """Replace a flat uint8 tensor by that of the rank `root`. Collective."""
        ...

    def share_host(self) -> _core.HostGroup | None:
        """The memory of all ranks, or None if they do not share one host. Collective."""
        ...


class ProcessGroupPeers:
    """Peers over a process group of torch: gloo, nccl, mpi or paceline."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None, warn_after_s: float | None) -> None:
        self.process_group = group
        self.exchange = ProcessGroupExchange(group)
        self.rank = self.exchange.rank
        self.world_size = self.exchange.world_size
        self.timeout_s = timeout_s or _timeout_of(group)
        self.warn_after_s = warn_after_s or _DEFAULT_WARN_AFTER_S
        warn_of_shared_store(dist.get_backend(group), self.rank)

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        dist.broadcast(payload, src=dist.get_global_rank(self.process_group, root), group=self.process_group)

    def share_host(self) -> _core.HostGroup | None:
        # Here, not above: a process that only reduces through the group needs no core.
        from paceline.collectives.formation import share_with_all

        name = f"DDP over {dist.get_backend(self.process_group)}"
        return share_with_all(
            self.exchange, name=name, timeout_s=self.timeout_s, warn_after_s=self.warn_after_s
        )


class GroupPeers:
    """Peers over a `paceline.Group`, whose ranks share one host. Its other users wait as long as before."""

    process_group = None

    def __init__(self, group: Group, timeout_s: float | None, warn_after_s: float | None) -> None:
        from paceline.collectives.whole_exchange import WholeExchange

        self.rank = group.rank
        self.world_size = group.world_size
        self.timeout_s = timeout_s or group._core.timeout_s
        self.warn_after_s = warn_after_s or group._core.warn_after_s
        self._core = group._core.with_patience(self.timeout_s, self.warn_after_s)
        self.exchange = WholeExchange(self._core)

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        on_host = payload.cpu()
        self._core.broadcast(on_host.data_ptr(), on_host.numel(), root)
        if on_host is not payload:
            payload.copy_(on_host)

    def share_host(self) -> _core.HostGroup | None:
        return self._core


def find_peers(
    process_group: dist.ProcessGroup | Group | None,
    device_mesh: DeviceMesh | None,
    timeout_s: float | None,
    warn_after_s: float | None,
    name: str = "process_group",
) -> Peers:
    """The group that was passed, else torch's default group, else one formed from the environment.

    Raises:
        ConfigError: There is none, or both a group and a mesh were passed.
    """
    process_group = checked_group("DistributedDataParallel", process_group, name)
    if device_mesh is not None:
        process_group = _group_of_mesh(device_mesh, process_group)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return ProcessGroupPeers(process_group, timeout_s, warn_after_s)
    return GroupPeers(process_group or _group_from_environment(timeout_s), timeout_s, warn_after_s)


def known_exchange(process_group: Any, device_mesh: Any) -> tuple[Exchange, float] | None:
    """What connects the ranks that these arguments name, and its time-out; None: nothing yet.

    Where they are refused themselves, because they are nonsense or both are given: the group over which the
    other ranks wait, most likely.
    """
    is_there = _environment_group is not None or (dist.is_available() and dist.is_initialized())
    named = (process_group, device_mesh if process_group is None else None)
    for group, mesh in (named, (None, None)):
        if group is None and mesh is None and not is_there:
            break
        with contextlib.suppress(ConfigError):
            peers = find_peers(group, mesh, None, None)
            return peers.exchange, peers.timeout_s
    return None


def _group_of_mesh(mesh: DeviceMesh, process_group: dist.ProcessGroup | Group | None) -> dist.ProcessGroup:
    if process_group is not None:
        raise ConfigError(
            "Cannot specify both process_group and device_mesh arguments.",
            expected="one of them",
            hint="pass one of them",
        )
    if not hasattr(mesh, "get_group"):
        hint = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2,)) makes one'
        check = Arguments("DistributedDataParallel")
        raise check.refuse("device_mesh", mesh, "a DeviceMesh of one dimension", hint, is_type=True)
    if mesh.ndim != 1:
        raise ConfigError(
            f"Only 1D device mesh is supported, but got one of {mesh.ndim} dimensions.",
            hint='pass the data-parallel dimension only, e.g. device_mesh["dp"]',
        )
    group: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
    return group


def formed_group() -> Group | None:
    """The group that some model of this process formed from the environment, if one has."""
    return _environment_group


def _group_from_environment(forming_timeout_s: float | None) -> Group:
    try:
        read_rank_environment()
    except ConfigError as error:
        raise ConfigError(
            "DistributedDataParallel: no process group has been initialised.",
            seen=error.summary,
            expected="torch.distributed.init_process_group(), or a start with `paceline run`",
            hint="`paceline run -n 2 script.py` needs no init_process_group",
        ) from error
    global _environment_group
    if _environment_group is None or _environment_group._core.is_closed:
        from paceline.collectives.init import init

        _environment_group = init(name="paceline.torch", forming_timeout_s=forming_timeout_s)
    return _environment_group


def _timeout_of(group: dist.ProcessGroup) -> float:
    """The time-out that the user gave to init_process_group, as far as the backend tells."""
    try:
        backend = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return _DEFAULT_TIMEOUT_S
