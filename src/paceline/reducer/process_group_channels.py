"""The control channels of a framework's process groups on several hosts, one for each group."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Sequence
from typing import Any

from paceline.env import job_id_from_environment
from paceline.health.channel_tree import HUB
from paceline.health.control_channel import ControlChannel, form_channel
from paceline.health.handshake import Facts
from paceline.reducer.peers import Ranks
from paceline.rendezvous.secret import FILE_VARIABLE, JobSecret, find_secret
from paceline.trace.recording import recording
from paceline.trace.remote_ranks import RemoteRanks
from paceline.versions import own_version

_log = logging.getLogger("paceline")
_channels: weakref.WeakKeyDictionary[Any, ControlChannel] = weakref.WeakKeyDictionary()
_reports_through: weakref.ref[ControlChannel] | None = None
_is_warned = False


def channel_of(group: Any, peers: Ranks, hosts: Sequence[Sequence[int]], framework: str) -> ControlChannel:
    """The channel of this group, formed at the first call. Collective, over all ranks."""
    if group not in _channels:
        secret = find_secret()
        _warn_of_open_channel(peers.rank, secret)
        facts = _facts(peers, hosts, framework, secret)
        channel = form_channel(peers.exchange, facts, hosts, secret.key, peers.timeout_s)
        _channels[group] = channel
        _report_to_hub(channel, peers.rank, hosts)
    return _channels[group]


def known_channel(group: Any) -> ControlChannel | None:
    return _channels.get(group)


def _report_to_hub(channel: ControlChannel, rank: int, hosts: Sequence[Sequence[int]]) -> None:
    global _reports_through
    of_hub = next(ranks for ranks in hosts if HUB in ranks)
    if rank == HUB:
        channel.watch(RemoteRanks(lambda: recording.folder))
    elif rank not in of_hub and (_reports_through is None or _reports_through() is None):
        _reports_through = weakref.ref(channel)
        recording.report_to_host = _send_to_hub


def _send_to_hub(figures: bytes) -> None:
    if _reports_through is not None and (channel := _reports_through()) is not None:
        channel.report(figures)


def _facts(peers: Ranks, hosts: Sequence[Sequence[int]], framework: str, secret: JobSecret) -> Facts:
    job = job_id_from_environment()
    return Facts(
        rank=peers.rank,
        world_size=peers.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        local_ranks=next(list(ranks) for ranks in hosts if peers.rank in ranks),
        paceline=own_version(),
        # Without the local version, which shows the hardware.
        framework=framework.partition("+")[0],
        job=hashlib.sha256(job.encode()).hexdigest()[:8] if job else "",
        generation=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        clock_s=time.time(),
        has_secret=bool(secret.key),
    )


def _warn_of_open_channel(rank: int, secret: JobSecret) -> None:
    global _is_warned
    if rank == 0 and not secret.key and not _is_warned:
        _is_warned = True
        _log.warning(
            "paceline: this job on several hosts has no secret: any process that reaches its network can "
            "pose as a rank, read messages between ranks, and end the job. %s names a file of mode 0600 with "
            "the same content on all hosts (see docs/security.md)",
            FILE_VARIABLE,
        )
