"""Makes the core of a group from an Exchange between its ranks."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

from paceline import _core
from paceline.collectives.failures import number_ranks
from paceline.collectives.straggler_warning import DEFAULT_WARN_AFTER_S, describe_stragglers
from paceline.errors import RendezvousError, format_ranks
from paceline.health import exit_reports
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.shared_memory import NONCE_BYTES, HostMemory, share_memory

_log = logging.getLogger("paceline")


def share(
    exchange: Exchange, *, name: str, timeout_s: float, warn_after_s: float = DEFAULT_WARN_AFTER_S
) -> HostMemory:
    """`share_memory` that also logs slow ranks, and closes the memory when the process ends. Collective.

    Raises the same errors.
    """
    memory = share_memory(
        exchange, name=name, timeout_s=timeout_s, warn_after_s=warn_after_s, slow=_report_slow
    )
    exit_reports.watch(memory.host_group)
    return memory


def _report_slow(facts: Mapping[str, Any]) -> None:
    _log.warning("paceline: %s", describe_stragglers(facts))


def share_on_each_host(exchange: Exchange, *, name: str, timeout_s: float, warn_after_s: float) -> HostMemory:
    """The memory of this rank's host, and the ranks of each host. Collective over the ranks of all hosts.

    Errors of a host's group name its ranks by their numbers in the whole job.

    Raises:
        RendezvousError: A rank did not take part in time.
        RegionError: There is not enough memory; on every rank of that host.
    """
    memory = share(exchange, name=name, timeout_s=timeout_s, warn_after_s=warn_after_s)
    if len(memory.hosts) > 1:
        own = next(ranks for ranks in memory.hosts if exchange.rank in ranks)
        number_ranks(memory.host_group.name, own, exchange.world_size)
    return memory


def share_alone(
    name: str, rank: int, world_size: int, timeout_s: float, warn_after_s: float
) -> _core.HostGroup:
    """A host group of this rank alone, for code that needs a host group. Not collective."""
    number_ranks(name, [rank], world_size)
    nonce = secrets.token_bytes(NONCE_BYTES)
    fd = _core.create_region(1, nonce)
    try:
        core = _core.HostGroup(fd, 0, nonce, name, timeout_s, warn_after_s)
    finally:
        os.close(fd)
    core.join()
    exit_reports.watch(core)
    return core


def form_core(
    exchange: Exchange,
    *,
    name: str,
    timeout_s: float,
    warn_after_s: float = DEFAULT_WARN_AFTER_S,
    group_timeout_s: float | None = None,
) -> _core.HostGroup:
    """Make the core of a group of the ranks that an Exchange connects; they must share a host. Collective.

    Raises:
        RendezvousError: The ranks are on several hosts, or one of them did not take part in time.
    """
    memory = share(exchange, name=name, timeout_s=timeout_s, warn_after_s=warn_after_s)
    core = memory.of_all_ranks()
    if core is None:
        raise RendezvousError(
            f"The {exchange.world_size} ranks of group {name!r} do not share one host's memory.",
            seen="; ".join(format_ranks(ranks) for ranks in memory.hosts),
            likely="they run on several machines, or in containers with separate networks",
            hint="a wrapped model works across hosts: on a process group of torch, or of paddle.distributed",
        )
    if group_timeout_s is None:
        return core
    return core.with_patience(group_timeout_s, warn_after_s)
