"""The address that a name resolves to; real links: tests/hosts/test_addresses.py."""

from __future__ import annotations

import socket
import time

import pytest

from paceline.errors import ConfigError, RendezvousError
from paceline.rendezvous import addresses
from paceline.rendezvous.addresses import (
    Way,
    check_rendezvous_address,
    find_way,
    interface_for_gloo,
    interface_problems,
    means_this_host,
    wait_for_listener,
)

ELSEWHERE = Way("node0", "10.0.0.1", "10.0.0.2", "eth7", False)


def resolve_as(monkeypatch, address):
    """The addresses of this host's name; None: it does not resolve."""

    def getaddrinfo(name, port, **_):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)


def test_the_own_host():
    way = find_way("127.0.0.1", "MASTER_ADDR")
    assert (way.address, way.interface, way.is_own, way.is_loopback) == ("127.0.0.1", "lo", True, True)


def test_a_name_that_stands_for_nothing_is_reported_with_the_host():
    with pytest.raises(ConfigError, match="cannot be resolved on host") as c:
        find_way("no-such-host.invalid", "MASTER_ADDR")
    assert c.value.host == socket.gethostname()
    assert "MASTER_ADDR=no-such-host.invalid" in c.value.summary


def test_rank_0_must_be_where_the_others_look_for_it():
    with pytest.raises(ConfigError, match=r"Rank 0 of 4 is on host .* but MASTER_ADDR=node0 is not"):
        check_rendezvous_address(ELSEWHERE, 0, 4, local_world_size=2, serves=True)
    check_rendezvous_address(ELSEWHERE, 1, 4, local_world_size=2, serves=False)


def test_localhost_is_no_rendezvous_point_of_several_hosts():
    way = Way("localhost", "127.0.0.1", "127.0.0.1", "lo", True)
    with pytest.raises(ConfigError, match="means this host on every host"):
        check_rendezvous_address(way, 3, 4, local_world_size=2, serves=False)
    check_rendezvous_address(way, 3, 4, local_world_size=4, serves=False)


@pytest.mark.parametrize(
    ("name", "answer"),
    [("localhost", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("node0", False)],
)
def test_names_that_mean_each_host_itself(name, answer):
    assert means_this_host(name) is answer


@pytest.mark.parametrize(
    ("stands_for", "reason"),
    [
        (None, "cannot be resolved"),
        ("127.0.1.1", "stands for 127.0.1.1, where no other host reaches it"),
        ("192.0.2.77", "stands for 192.0.2.77, which is not an address of it"),
    ],
)
def test_gloo_gets_the_interface_if_the_hosts_name_leads_nowhere(monkeypatch, stands_for, reason):
    resolve_as(monkeypatch, stands_for)
    interface, why = interface_for_gloo(ELSEWHERE)
    assert interface == "eth7"
    assert reason in why
    assert "node0 stands for 10.0.0.1" in why


def test_gloo_gets_no_interface_if_the_hosts_name_is_right(monkeypatch):
    resolve_as(monkeypatch, ELSEWHERE.own_address)
    assert interface_for_gloo(ELSEWHERE) == ("", "")


def test_a_listener_that_never_comes_is_reported_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = {"what": "MASTER_ADDR", "who": "Rank 1 of 2", "likely": "rank 0 has ended", "hint": "look"}
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match=f"Rank 1 of 2 found nobody at MASTER_ADDR 127.0.0.1:{port}"):
        wait_for_listener(find_way("127.0.0.1", "MASTER_ADDR"), port, 0.3, **words)
    assert time.monotonic() - begun < 10


def test_interfaces_that_gloo_cannot_use_are_reported(monkeypatch):
    monkeypatch.setattr(addresses, "own_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.2"})
    monkeypatch.setattr(addresses.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    for fits in ("", "eth0", "eth1", "eth0,eth1"):  # a host with IPv6 only may be meant
        assert interface_problems(fits) == ("", "")
    own = "lo (127.0.0.1), eth0 (10.0.0.2)"
    for wrong in ("eth7", "eth0,eth7"):
        problem = f"GLOO_SOCKET_IFNAME={wrong} names no interface of this host, which has {own}"
        assert interface_problems(wrong) == (problem, "")
    unreachable = f"GLOO_SOCKET_IFNAME=lo (127.0.0.1) is reached by no other host; this one has {own}"
    assert interface_problems("lo") == ("", unreachable)
