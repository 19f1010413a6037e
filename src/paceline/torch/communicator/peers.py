"""The group that a model is wrapped over, whichever kind it is, as DDP needs it.

The one idea: DDP asks a group for three things: bytes from everybody (`exchange`), rank 0's bytes
(`broadcast`), and the memory that the ranks of each host share (`share_hosts`). A torch process group of
any backend offers them, and so does a `paceline.Group`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paceline.arguments import Arguments
from paceline.collectives.formation import share_on_each_host
from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.health.control_channel import ControlChannel
from paceline.reducer.channels import channel_of
from paceline.reducer.peers import EnvironmentGroup, PatientGroup, Ranks, exchange_of_named
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.shared_memory import HostMemory
from paceline.torch.communicator.exchange import ProcessGroupExchange
from paceline.torch.communicator.restarts import warn_of_shared_store
from paceline.torch.model.arguments import checked_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.collectives.group import Group

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own, where a process group does not say
_DEFAULT_WARN_AFTER_S = 10.0

_environment = EnvironmentGroup("paceline.torch")


class Peers(Ranks, Protocol):
    """The ranks that train one model, and what connects them."""

    warn_after_s: float

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Torch's group, if there is one."""
        ...

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        """Replace a flat uint8 tensor by that of the rank `root`. Collective."""
        ...

    def share_hosts(self) -> HostMemory:
        """The memory of this rank's host, and who is on which. Collective."""
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

    def share_hosts(self) -> HostMemory:
        name = f"DDP over {dist.get_backend(self.process_group)}"
        return share_on_each_host(
            self.exchange, name=name, timeout_s=self.timeout_s, warn_after_s=self.warn_after_s
        )


class GroupPeers(PatientGroup):
    """Peers over a `paceline.Group`, whose ranks share one host."""

    process_group = None

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        on_host = payload.cpu()
        self.core.broadcast(on_host.data_ptr(), on_host.numel(), root)
        if on_host is not payload:
            payload.copy_(on_host)

    def share_hosts(self) -> HostMemory:
        return HostMemory(self.core, (tuple(range(self.world_size)),))


def find_peers(
    process_group: dist.ProcessGroup | Group | None,
    device_mesh: DeviceMesh | None,
    timeout_s: float | None,
    warn_after_s: float | None,
    name: str = "process_group",
    owner: str = "DistributedDataParallel",
) -> Peers:
    """The group that was passed, else torch's default group, else one formed from the environment.

    Args:
        process_group: The group, or None.
        device_mesh: A mesh instead, or None.
        timeout_s, warn_after_s: How long its ranks wait; None: the group's own.
        name: The argument that the group was passed as.
        owner: The class that it was passed to.

    Raises:
        ConfigError: There is none, or both a group and a mesh were passed.
    """
    process_group = checked_group(owner, process_group, name)
    if device_mesh is not None:
        process_group = _group_of_mesh(device_mesh, process_group)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return ProcessGroupPeers(process_group, timeout_s, warn_after_s)
    return GroupPeers(process_group or _group_from_environment(timeout_s, owner), timeout_s, warn_after_s)


def control_of(peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]]) -> ControlChannel:
    """The control channel of these ranks, which are on several hosts; see `channel_of`. Collective."""
    return channel_of(peers.process_group, peers, hosts, f"torch {torch.__version__}")


def known_exchange(process_group: Any, device_mesh: Any) -> tuple[Exchange, float] | None:
    """What connects the ranks that these arguments name; see `exchange_of_named`."""
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None  # nobody in the group waits for this rank
    is_there = _environment.formed is not None or (dist.is_available() and dist.is_initialized())
    find = functools.partial(find_peers, timeout_s=None, warn_after_s=None)
    return exchange_of_named(process_group, device_mesh, find, is_there=is_there)


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
    return _environment.formed


def _group_from_environment(forming_timeout_s: float | None, owner: str) -> Group:
    try:
        read_rank_environment()
    except ConfigError as error:
        raise ConfigError(
            f"{owner}: no process group has been initialised.",
            seen=error.summary,
            expected="torch.distributed.init_process_group(), or a start with `paceline run`",
            hint="`paceline run -n 2 script.py` needs no init_process_group",
        ) from error
    return _environment.form(forming_timeout_s)


def _timeout_of(group: dist.ProcessGroup) -> float:
    """The time-out that the user gave to init_process_group or new_group, as far as a backend tells."""
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")  # NCCL's serves no CPU
    for device in devices:
        with contextlib.suppress(RuntimeError, AttributeError):
            return float(group._get_backend(device).options._timeout.total_seconds())
    return _DEFAULT_TIMEOUT_S
