"""Waits of a rank for messages to and from its peers, and the errors if they fail.

A transport knows only that a connection broke or that nothing arrived, so the control channel is asked which
rank caused each failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.errors import CollectiveError, DeadlineError, MismatchError, PeerLostError
from paceline.health.liveness_check import ASK_AGAIN_WITHIN_S, ASK_WITHIN_S
from paceline.health.peer_errors import is_of_a_late_peer, is_of_a_lost_peer, late_error, timeout_hint
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.between_hosts.message_headers import Header, HostsTransport, Message

_SHOWN = 300  # characters of a transport's own message
_KNOWN_WITHIN_S = 0.5  # after a connection broke: by then the control channel knows the reason
# A rank whose deadline has passed asks all others for their activity before it gives up and notifies its
# host. The rest is a margin for a busy machine.
_ASKS_WITHIN_S = ASK_AGAIN_WITHIN_S + 2 * ASK_WITHIN_S


def patience_s(timeout_s: float) -> float:
    """How long to wait for a message, if ranks of one host wait `timeout_s` for each other.

    This is a little longer, because a peer may be waiting for a rank of its own host, and only the peer knows
    which.
    """
    return timeout_s + min(2.0, timeout_s / 2)


def patience_with_its_host_s(timeout_s: float) -> float:
    """How long to wait for a rank or thread of this host that waits for a message of a peer: longer than that
    wait, because it knows the peer's name.
    """
    return patience_s(timeout_s) + _ASKS_WITHIN_S


class PeerWaits:
    """One rank's waits for its peers. Hosts and buckets are given by their numbers."""

    def __init__(
        self,
        transport: HostsTransport,
        peer_monitor: PeerMonitor,
        who: str,
        where: Callable[[int], str],
        timeout_s: float,
    ) -> None:
        self._transport, self._peer_monitor = transport, peer_monitor
        self._who, self._where = who, where
        self.patience_s = patience_s(timeout_s)
        self.timeout = transport.timeout_of(self.patience_s)
        self.patience_with_its_host_s = patience_with_its_host_s(timeout_s)

    def late(self, hosts: Iterable[int], doing: str, bucket: int, text: str = "") -> DeadlineError:
        if (stopped := self._silent_peer_error(doing, bucket, text)) is not None:
            return stopped  # peers may be waiting for it, too
        names = " and ".join(map(self._transport.name, hosts))
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting for {names} to {doing} after {self.patience_s:.1f} s.",
            where=self._where(bucket),
            seen=text,
            likely="that rank skipped this backward, is stuck in its data loader, was stopped, or its host "
            "cannot be reached any more",
            hint=f"look at that rank's own output; {timeout_hint()}",
            late=tuple(self._transport.ranks[host] for host in hosts),
        )

    def mismatch(self, host: int, message: Message, expected: str) -> MismatchError:
        header = Header.read(message)
        return MismatchError(
            f"{self._who.capitalize()} got another message from {self._transport.name(host)} than it "
            "waits for.",
            expected=expected,
            got="no header of a message" if header is None else f"{header}, weight {header.weight}",
            likely="the ranks of these hosts are not in the same backward of the same model",
            hint="run the same backward passes in the same order on every rank; nothing was averaged",
        )

    def lost(self, error: RuntimeError, host: int, bucket: int, silent: Iterable[int]) -> CollectiveError:
        """The error for a message whose transfer could not begin, or whose wait failed."""
        text, peer = str(error)[:_SHOWN], self._transport.name(host)
        if is_of_a_late_peer(text):
            # The peer may itself be waiting for another rank, whose message is missing, too.
            return self.late(dict.fromkeys([host, *silent]), "average gradients", bucket, text)
        if (reported := self._peer_monitor.lost(_KNOWN_WITHIN_S)) is not None:
            return reported
        if (stopped := self._silent_peer_error("average gradients", bucket, text)) is not None:
            return stopped  # the peer has given up on it, and its report could reach no rank
        is_lost = is_of_a_lost_peer(text)
        monitor = self._peer_monitor
        if (reported := monitor.find_lost(0.0) if is_lost else monitor.lost()) is not None:
            return reported
        return (PeerLostError if is_lost else CollectiveError)(
            f"{self._who.capitalize()} lost {peer}."
            if is_lost
            else f"{self._who.capitalize()} could not exchange gradients with {peer}.",
            where=self._where(bucket),
            seen=text,
            likely="it died or raised, or the network between the hosts broke" if is_lost else "",
            hint="look at that rank's own output, which gives the reason",
            lost=(self._transport.ranks[host],) if is_lost else (),
        )

    def _silent_peer_error(self, doing: str, bucket: int, text: str) -> DeadlineError | None:
        late = self._peer_monitor.silent()
        return None if late is None else late_error(self._who, late, doing, self._where(bucket), text)
