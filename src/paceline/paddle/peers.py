"""The ranks that train one model, however they were started.

The one idea: whoever connects the ranks (a `paceline.Group`, paddle.distributed, or only a launcher's
environment variables), what DataParallel needs is the memory that they share.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.collectives.formation import report_slow
from paceline.collectives.group import Group
from paceline.collectives.init import init
from paceline.collectives.member_exchange import MemberExchange
from paceline.env import read_rank_environment
from paceline.errors import ConfigError
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.host import share_memory

_DEFAULT_TIMEOUT_S = 1800.0  # Paddle's own
_WARN_AFTER_S = 10.0

_environment_group: Group | None = None  # one for all models of this process


@dataclass(frozen=True)
class Peers:
    """The ranks and the memory that they share.

    Attributes:
        host_group: The memory.
        exchange: Small messages between the ranks.
        owner: Keeps the memory.
        timeout_s: For what is not a gradient.
    """

    host_group: _core.HostGroup
    exchange: Exchange
    owner: object
    timeout_s: float

    @property
    def rank(self) -> int:
        return self.host_group.rank

    @property
    def world_size(self) -> int:
        return self.host_group.world_size


class PaddleExchange:
    """See `rendezvous.exchange.Exchange`; over a group of paddle.distributed.

    Args:
        group: None: the default group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = dist.get_rank() if group is None else group.rank
        self.world_size: int = dist.get_world_size() if group is None else group.nranks

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        sizes = [int(part[0]) for part in self._gather(np.array([len(payload)], np.int64))]
        padded = np.frombuffer(payload.ljust(max(1, *sizes), b"\0"), np.uint8)
        parts = self._gather(padded.astype(np.int32))  # not every backend of Paddle moves bytes
        return [part.astype(np.uint8).tobytes()[:size] for part, size in zip(parts, sizes)]

    def _gather(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        parts: list[paddle.Tensor] = []
        dist.all_gather(parts, paddle.to_tensor(array), group=self._group)
        return [part.numpy() for part in parts]


def find_peers(group: Any, timeout_s: float | None) -> Peers | None:
    """The group that was passed, else paddle.distributed's, else one formed from the environment.

    Returns:
        None: this process is the only one.

    Raises:
        ConfigError: The group is none of ours or Paddle's, or its ranks do not share one host.
    """
    if isinstance(group, Group):
        return _over(group, timeout_s)
    if group is not None and not hasattr(group, "nranks"):
        raise ConfigError(
            "DataParallel: group is not a group of processes.",
            expected="a paceline.Group, a group of paddle.distributed, or None",
            got=repr(group),
        )
    if group is not None or (dist.is_initialized() and dist.get_world_size() > 1):
        return _through_paddle(group, timeout_s)
    if dist.is_initialized():
        return None
    environment = environment_group()
    return None if environment is None else _over(environment, timeout_s)


def is_on_several_hosts() -> bool:
    """Whether the launcher's variables tell of more processes than this host has."""
    try:
        place = read_rank_environment(needs_address=False)
    except ConfigError:
        return False
    return place.local_world_size is not None and place.local_world_size < place.world_size


def environment_group() -> Group | None:
    """The group of all processes that the launcher started; one for all models. None for a single one.

    Collective on the first call: blocks until all came.
    """
    global _environment_group
    if _environment_group is None or _environment_group.core.is_closed:
        try:
            place = read_rank_environment(needs_address=False)
        except ConfigError as error:
            if getattr(error, "variable", None):
                raise  # set, but wrong
            warnings.warn(
                "paceline.paddle: no launcher's variables are set, so this process trains alone. "
                "`paceline run -n 2 script.py` or paddle.distributed.launch starts several.",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
        if place.world_size == 1:
            return None
        _environment_group = init(name="paceline.paddle")
    return _environment_group


def _over(group: Group, timeout_s: float | None) -> Peers:
    exchange = MemberExchange(group.core, range(group.world_size))
    return Peers(group.core, exchange, group, timeout_s or group.core.timeout_s)


def _through_paddle(group: Any, timeout_s: float | None) -> Peers | None:
    exchange = PaddleExchange(group)
    if exchange.rank < 0:
        raise ConfigError(
            "DataParallel: this process is not in the group.",
            got=f"rank {dist.get_rank()}, a group of ranks {group.ranks}",
            hint="wrap the model only on the ranks of the group",
        )
    if exchange.world_size == 1:
        return None
    limit_s = timeout_s or _DEFAULT_TIMEOUT_S
    memory = share_memory(
        exchange,
        name="DataParallel over paddle.distributed",
        timeout_s=limit_s,
        warn_after_s=_WARN_AFTER_S,
        slow=report_slow,
    )
    if len(memory.hosts) > 1:
        memory.host_group.close()
        raise ConfigError(
            "paceline.paddle averages gradients on one host only.",
            seen=f"{exchange.world_size} ranks on {len(memory.hosts)} hosts",
            hint="use paddle.DataParallel between hosts",
        )
    return Peers(memory.host_group, exchange, memory.host_group, limit_s)
