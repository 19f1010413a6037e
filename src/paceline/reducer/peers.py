"""The ranks that train one model, independent of a framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from paceline.collectives.group import Group
from paceline.collectives.init import init
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import ConfigError
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.shared_memory import HostMemory


class Ranks(Protocol):
    """The ranks that train one model, at a time when only small messages connect them."""

    timeout_s: float

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def exchange(self) -> Exchange:
        """Small messages between the ranks."""
        ...


class GroupPeers:
    """The ranks of a `paceline.Group`, with the model's own time-outs."""

    process_group = None

    def __init__(
        self, group: Group, timeout_s: float | None = None, warn_after_s: float | None = None
    ) -> None:
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        self.timeout_s = timeout_s or group._core.timeout_s
        self.warn_after_s = warn_after_s or group._core.warn_after_s
        self.core = group._core.with_patience(self.timeout_s, self.warn_after_s)
        self.exchange = WholeExchange(self.core)

    def share_hosts(self) -> HostMemory:
        """Collective."""
        return HostMemory(self.core, (tuple(range(self.world_size)),))


class EnvironmentGroup:
    """The group of all processes that a launcher started, shared by all models of this process."""

    def __init__(self, name: str) -> None:
        self.formed: Group | None = None
        self._name = name

    @property
    def current(self) -> Group | None:
        return None if self.formed is None or self.formed._core.is_closed else self.formed

    def form(self, forming_timeout_s: float | None) -> Group:
        """Return the group. Forms it, which is collective, if there is none or it was closed."""
        if self.current is None:
            self.formed = init(name=self._name, forming_timeout_s=forming_timeout_s)
        assert self.formed is not None
        return self.formed


def exchange_of_named(
    group: Any, mesh: Any, find: Callable[[Any, Any], Ranks | None], *, is_there: bool
) -> tuple[Exchange, float] | None:
    """The exchange between the ranks that a wrapper's arguments name, and its time-out; or None.

    If the arguments are refused themselves, because they are invalid or both are given, this is the exchange
    of the default group, over which the other ranks most likely wait.
    """
    for named, by_mesh in ((group, mesh if group is None else None), (None, None)):
        if named is None and by_mesh is None and not is_there:
            break
        with contextlib.suppress(ConfigError):
            peers = find(named, by_mesh)
            return None if peers is None else (peers.exchange, peers.timeout_s)
    return None
