"""Checks before the framework forms a group: how a rank reaches rank 0, and what it reports to the others.

It finds problems for which a framework would wait in silence, or raise an error without a name: on this rank
alone, or once all ranks have arrived (`membership`).
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass

from paceline.env import RankEnvironment, is_in_pod, may_span_hosts
from paceline.errors import ConfigError, warn
from paceline.rendezvous.addresses import (
    Way,
    check_rendezvous_address,
    configured_interface,
    find_way,
    interface_for_gloo,
    interface_problems,
    means_this_host,
    wait_for_listener,
)
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.membership import Arrival, Membership, MembershipStore, attend
from paceline.rendezvous.secret import NO_SECRET, find_secret
from paceline.versions import own_version

_LEAST_S = 1.0  # for a rank that has arrived only just in time


@dataclass(frozen=True)
class Preflight:
    """What one rank knows before it has contacted the others.

    Attributes:
        who: This rank in words: "Rank 1 of 4 on host node1".
        what: The name of the variable with the address of rank 0.
        way: The route to that address.
        port: Where rank 0, or its launcher, listens there.
        deadline: By which all ranks must have arrived.
        arrival: What this rank reports to the others.
        secret: The job's secret; empty if it has none, or if this rank could not read it.
    """

    who: str
    what: str
    way: Way
    port: int
    deadline: Deadline
    arrival: Arrival
    secret: bytes

    def wait_for_rank_0(self) -> None:
        wait_for_listener(
            self.way,
            self.port,
            self.deadline.left_s(),
            what=self.what,
            who=self.who,
            likely="rank 0 was not started, or has ended",
            hint="look at rank 0's output; `timeout` gives it longer",
        )

    def attend(self, membership_store: MembershipStore, prefix: str) -> Membership:
        """See `paceline.rendezvous.membership.attend`. Collective."""
        return attend(
            membership_store, prefix, self.arrival, max(self.deadline.left_s(), _LEAST_S), self.secret
        )


def prepare(
    place: RankEnvironment,
    what: str,
    framework: str,
    timeout_s: float,
    *,
    serves: bool,
    over_gloo: bool,
    owner: str,
) -> Preflight:
    """Check whether this rank can reach the others, and set the address at which Gloo listens."""
    deadline = Deadline(timeout_s)
    way = find_way(place.master_addr, what)
    # Kubeflow gives the pod of rank 0 the address localhost, and the others its name.
    is_right_here = is_in_pod(os.environ) and place.rank < (place.local_world_size or 1)
    # torch's agents meet at a loopback address: each counts its own ranks, and all are on this host.
    is_one_host = means_this_host(way.name) and "TORCHELASTIC_RUN_ID" in os.environ and not is_right_here
    local_world_size = place.local_world_size
    if local_world_size is None or is_one_host:
        local_world_size = place.world_size
    spans_hosts = local_world_size < place.world_size
    check_rendezvous_address(
        way,
        place.rank,
        place.world_size,
        local_world_size=place.world_size if is_right_here else local_world_size,
        serves=serves,
        what=what,
    )
    problem, unreachable, secret = "", "", NO_SECRET
    listens = ("", "")
    try:
        secret = find_secret()
    except ConfigError as error:  # reported to the other ranks, which would wait for this one
        problem = str(error)
    if over_gloo and (spans_hosts or (may_span_hosts(place) and not way.is_loopback)):
        _configure_gloo(way, owner)
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        wrong, unreachable = interface_problems(names)
        listens = configured_interface(names)
        problem = problem or wrong
    arrival = Arrival(
        place.rank,
        place.world_size,
        socket.gethostname(),
        os.getpid(),
        # The membership store is sent over the network in the clear, and the id may be a secret.
        hashlib.sha256(place.job_id.encode()).hexdigest()[:8] if place.job_id else "",
        own_version(),
        framework,
        problem,
        unreachable,
        *listens,
    )
    who = f"Rank {place.rank} of {place.world_size} on host {arrival.host}"
    return Preflight(who, what, way, place.master_port, deadline, arrival, secret.key)


def refuse_latecomers(membership: Membership | None) -> None:
    """Raise if a process has arrived since the group was formed, and claims a place in it.

    For a rank that begins to train: two jobs with the same master address may have mixed their ranks before.
    """
    error = None if membership is None else membership.latecomer()
    if error is not None:
        raise ConfigError(
            error.summary,
            where=f"{error.where.partition(',')[0]}, after the group was formed",
            seen=error.seen,
            likely=error.likely,
            hint=error.hint,
        )


def _configure_gloo(way: Way, owner: str) -> None:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    interface, reason = interface_for_gloo(way)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        warn(
            f"{owner}: Gloo will listen at {interface}, because {reason}. "
            f"GLOO_SOCKET_IFNAME={interface}, or a line in /etc/hosts for this host, says so beforehand."
        )
