"""Makes the communicator between the ranks of a Paddle model."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import paddle

from paceline.paddle.communicator.calls import LoneCalls, MemoryCalls
from paceline.paddle.communicator.find_peers import DEFAULT_OWNER, LonePeers, PaddlePeers, Peers, find_peers
from paceline.paddle.communicator.hosts import MOST_HOSTS, join_hosts
from paceline.paddle.internals import GLOO_LIMIT_S
from paceline.paddle.ops import OPS
from paceline.reducer.between_hosts import choose_communicator
from paceline.reducer.between_hosts.options import BetweenHosts
from paceline.reducer.communicator import Communicator, GroupCommunicator, MemoryCommunicator

_log = logging.getLogger("paceline")
_has_warned_of_limit = False
_Communicators = dict[bool, Communicator[paddle.Tensor]]  # keys: whether the tensors are on the CPU
_common_communicators: weakref.WeakKeyDictionary[Any, _Communicators] = weakref.WeakKeyDictionary()


def connect(
    peers: Peers,
    *,
    on_host: bool,
    reduce_through: str = "auto",
    between_hosts: BetweenHosts | None = None,
) -> Communicator[paddle.Tensor]:
    """Collective."""
    if isinstance(peers, LonePeers):
        if on_host and reduce_through != "group":
            return MemoryCommunicator(peers.share_hosts().host_group, OPS, MemoryCalls)
        return GroupCommunicator(LoneCalls(on_host=on_host), OPS)
    communicator = choose_communicator.connect(
        peers,
        OPS,
        owner=DEFAULT_OWNER if between_hosts is None else between_hosts.owner,
        on_host=on_host,
        reduce_through=reduce_through,
        between_hosts=between_hosts,
        join_hosts=functools.partial(join_hosts, peers),
        why_not_joined=f"ranks on more than {MOST_HOSTS} hosts",
        calls_of_hooks=MemoryCalls,
    )
    if communicator.path == "group" and on_host and between_hosts is not None:
        _warn_of_limit(peers.rank, peers.timeout_s)
    return communicator


def _warn_of_limit(rank: int, timeout_s: float) -> None:
    global _has_warned_of_limit
    if rank == 0 and timeout_s > GLOO_LIMIT_S and not _has_warned_of_limit:
        _has_warned_of_limit = True
        _log.warning(
            "paceline: gradients go over a Gloo group of Paddle's alone, which ends the job if a rank is "
            "%g s late, whatever timeout_s (%g s) allows",
            GLOO_LIMIT_S,
            timeout_s,
        )


def common_communicator(group: Any, *, on_host: bool) -> Communicator[paddle.Tensor] | None:
    """The communicator of a group, the same one for all layers that ask; None in a single process.

    Collective on the first call for a group.
    """
    peers = find_peers(group)
    if not isinstance(peers, PaddlePeers):
        return None if peers is None else connect(peers, on_host=on_host)
    communicators = _common_communicators.setdefault(peers.group, {})
    if on_host not in communicators:
        communicators[on_host] = connect(peers, on_host=on_host)
    return communicators[on_host]
