"""Finds the ranks that train one model: those of a torch process group, or of a `paceline.Group`."""

from __future__ import annotations

import contextlib
import functools
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.arguments import Arguments
from paceline.collectives.straggler_warning import DEFAULT_WARN_AFTER_S
from paceline.env import read_rank_environment
from paceline.errors import ConfigError, RendezvousError
from paceline.reducer import process_group_peers
from paceline.reducer.host_reports import GroupReports, Reports
from paceline.reducer.peers import EnvironmentGroup, GroupPeers, exchange_of_named
from paceline.reducer.process_group_peers import ProcessGroupExchange, store_checks_of
from paceline.rendezvous.exchange import Exchange
from paceline.torch.communicator.calls import GroupCalls, gather_over, transport_device
from paceline.torch.communicator.store_exchange import (
    FrameworkKeyStore,
    is_default_store_served_by_rank,
    store_of,
    warn_of_shared_store,
)
from paceline.torch.model.arguments import checked_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.collectives.group import Group

_DEFAULT_TIMEOUT_S = 1800.0  # torch's default, for a process group that does not report its timeout
_HOLDER = 0  # the rank of the default group that serves torch's store, unless torchrun's agent does

_environment = EnvironmentGroup("paceline.torch")


class ProcessGroupPeers(process_group_peers.ProcessGroupPeers[torch.Tensor]):
    FRAMEWORK = f"torch {torch.__version__}"
    calls: GroupCalls

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None, warn_after_s: float | None) -> None:
        exchange = exchange_over(group)
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.timeout_s = timeout_s or _timeout_of(group)
        self.warn_after_s = warn_after_s or DEFAULT_WARN_AFTER_S
        name, patience = f"DDP over {dist.get_backend(group)}", (self.timeout_s, self.warn_after_s)
        super().__init__(GroupCalls(group, self), exchange, name, *patience)
        warn_of_shared_store(dist.get_backend(group), self.rank)

    def check_calls(self, owner: str, *, on_host: bool, reduce_through: str, between_hosts: bool) -> None:
        if reduce_through == "hosts" and on_host and not between_hosts:
            raise ConfigError(
                f'{owner}: reduce_through="hosts" is not possible here.',
                seen="ranks on several hosts, and a process group without a Gloo backend for the CPU",
                expected='a process group of "gloo", or of "cpu:gloo" and others',
                hint='leave reduce_through at "auto"',
            )

    def _reports_beside(self) -> Reports | None:
        """Over Gloo, beside a process group without the CPU, so that no report waits for a device."""
        serves_cpu = transport_device(self.process_group).type == "cpu"
        return None if serves_cpu else self._reports_over_gloo()

    def _reports_over_gloo(self) -> Reports | None:
        """Reports over a Gloo group of their own. Collective.

        None: some rank could not connect, and all ranks send their reports over the process group.
        """
        # Keys that no other group of these ranks, and no earlier start of them, has used in the store.
        nonces = self.exchange.all_gather(secrets.token_hex(8).encode(), self.timeout_s)
        made = None
        try:
            store = store_of(self.process_group)
            if store is not None:
                keys = PrefixStore(f"paceline/reports/{nonces[0].decode()}", store)
                timeout = timedelta(seconds=self.timeout_s)
                made = dist.ProcessGroupGloo(keys, self.rank, self.world_size, timeout=timeout)
        except (AttributeError, RuntimeError):  # torch without Gloo, or an interface that others cannot reach
            pass
        reported = self.exchange.all_gather(b"0" if made is None else b"1", self.timeout_s)
        if any(each != b"1" for each in reported):
            return None
        return GroupReports(functools.partial(gather_over, made, torch.device("cpu")))


Peers = ProcessGroupPeers | GroupPeers
"""The ranks that train one model, and what connects them."""


def exchange_over(process_group: dist.ProcessGroup | None = None) -> ProcessGroupExchange:
    """Exchanges small messages over an initialised torch process group; None: the default group.

    Raises:
        RendezvousError: There is no process group, or this process is not in it.
    """
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise RendezvousError(
            "torch.distributed has no process group yet.",
            likely="torch.distributed.init_process_group() was not called, or failed",
            hint='call torch.distributed.init_process_group("gloo") first, or start with `paceline run`',
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise RendezvousError(
            "This process is not a member of the given process group.",
            got=f"rank {dist.get_rank()} of the default group",
            hint="pass a group that this rank belongs to",
        )
    store = store_of(group)
    ranks = dist.get_process_group_ranks(group)
    checks = store_checks_of(
        group,
        rank,
        world_size,
        None if store is None else FrameworkKeyStore(store),
        scope=str(group.group_name),
        holder=ranks.index(_HOLDER) if _HOLDER in ranks and is_default_store_served_by_rank() else None,
        words=f"torch's {dist.get_backend(group)} process group",
    )
    begin_gather = functools.partial(gather_over, group, transport_device(group))
    return ProcessGroupExchange(rank, world_size, begin_gather, checks)


def find_peers(
    process_group: dist.ProcessGroup | Group | None,
    device_mesh: DeviceMesh | None,
    timeout_s: float | None,
    warn_after_s: float | None,
    name: str = "process_group",
    owner: str = "DistributedDataParallel",
) -> Peers:
    """The group that was passed, else torch's default group, else one formed from the environment.

    Raises:
        ConfigError: No group was found, or both a group and a mesh were passed.
    """
    process_group = checked_group(owner, process_group, name)
    if device_mesh is not None:
        process_group = _group_of_mesh(device_mesh, process_group)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return ProcessGroupPeers(process_group, timeout_s, warn_after_s)
    return GroupPeers(process_group or _group_from_environment(timeout_s, owner), timeout_s, warn_after_s)


def known_exchange(process_group: Any, device_mesh: Any) -> tuple[Exchange, float] | None:
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return None  # no rank in the group waits for this rank
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
    """The group that a model of this process has formed from the environment, or None."""
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
    devices = sorted(group._device_types, key=lambda device: device.type != "cpu")  # NCCL has no CPU backend
    for device in devices:
        with contextlib.suppress(RuntimeError, AttributeError):
            return float(group._get_backend(device).options._timeout.total_seconds())
    return _DEFAULT_TIMEOUT_S
