"""The control channel as a tree: the first rank of each host relays between the others of it and the hub.

Ranks are threads of this process, each with its own connections.
"""

from __future__ import annotations

import pytest

from paceline.errors import PeerLostError, RendezvousError
from paceline.health import channel_setup, channel_tree
from paceline.health.channel_tree import MOST_IN_A_STAR, Neighbours, neighbours_of
from paceline.rendezvous.frames import Frame
from tests.unit.test_control_channel import SECRET, Waiter, end, facts_of, form, kill

HOSTS = ((0, 1), (2, 3, 6), (4, 5))
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def small_stars(monkeypatch):
    monkeypatch.setattr(channel_tree, "MOST_IN_A_STAR", 4)


@pytest.fixture
def channels():
    found = form(hosts=HOSTS)
    assert not [each for each in found if isinstance(each, Exception)], found
    yield found
    end(found)


def errors_of(channels, guilty):
    """The error that each other rank receives."""
    others = [each for rank, each in enumerate(channels) if rank != guilty]
    waiters = [Waiter(each) for each in others]
    yield
    for channel, waiter in zip(others, waiters, strict=True):
        error = channel.wait(WITHIN_S)
        assert isinstance(error, PeerLostError) and error.lost == (guilty,)
        assert waiter.called.wait(WITHIN_S) and waiter.error is error
        yield error


def test_the_hub_has_a_connection_for_each_host_and_each_rank_of_its_own(channels):
    assert [sorted(each._connections) for each in channels] == [
        [1, 2, 4],
        [0],
        [0, 3, 6],
        [2],
        [0, 5],
        [4],
        [2],
    ]
    assert [each.host for each in channels[5].members] == [f"node{i}" for i in (0, 0, 1, 1, 2, 2, 1)]


def test_up_to_a_number_of_ranks_it_is_a_star(monkeypatch):
    monkeypatch.setattr(channel_tree, "MOST_IN_A_STAR", MOST_IN_A_STAR)
    hosts = [range(8 * host, 8 * host + 8) for host in range(9)]
    assert len(neighbours_of(0, hosts[:8]).below) == 63
    assert neighbours_of(63, hosts[:8]) == Neighbours(0, {})
    assert sorted(neighbours_of(0, hosts).below) == [*range(1, 8), *range(8, 72, 8)]
    assert neighbours_of(0, hosts).below[64] == frozenset(range(64, 72))
    assert neighbours_of(64, hosts).parent == 0 and neighbours_of(65, hosts) == Neighbours(64, {})


@pytest.mark.parametrize("guilty", [0, 1, 2, 6])
def test_an_exception_reaches_all_others_with_its_text(channels, guilty):
    outcomes = errors_of(channels, guilty)
    next(outcomes)
    channels[guilty].report_failure(ValueError("the cause"))
    who = facts_of(guilty, HOSTS).describe()
    for error in outcomes:
        assert "ValueError: the cause" in error.seen and who in error.seen


@pytest.mark.parametrize("dead", [0, 1, 4, 5])
def test_a_death_is_known_to_all_others_with_its_host(channels, dead):
    outcomes = errors_of(channels, dead)
    next(outcomes)
    kill(channels[dead])
    who = f"ank {dead} of 7 on host {facts_of(dead, HOSTS).host}"
    # The connection of a process that is killed while a beat is sent to it is reset.
    for error in outcomes:
        assert error.summary in (f"R{who} died.", f"The connection to r{who} was reset.")


def test_who_leaves_in_good_order_is_no_failure(channels):
    channels[6].close()
    while any(6 not in {each.rank for each in channel.left} for channel in channels[:6]):
        assert channels[0].wait(0.01) is None
    channels[3].report_failure(ValueError("later"))
    for rank in (0, 1, 2, 4, 5):
        assert channels[rank].wait(WITHIN_S).lost == (3,)


def test_a_rank_cannot_speak_for_one_that_does_not_speak_through_it(channels):
    with channels[4]._lock:
        channels[4]._send(0, Frame.FAILED, (3).to_bytes(4, "little") + b"I am rank 3")
    error = channels[1].wait(WITHIN_S)
    assert error.lost == (4,) and "it speaks for rank 3" in error.seen


@pytest.mark.parametrize("other", [{"secrets": 5}, {"framework": "torch 2.14.0"}, {"world_size": 8}])
def test_who_does_not_fit_is_refused_on_all_hosts_though_one_rank_alone_has_seen_it(other):
    facts = [facts_of(rank, HOSTS) for rank in range(7)]
    secrets = [SECRET] * 7
    if "secrets" in other:
        secrets[5] = b"another secret of this job"
    else:
        facts[5] = facts_of(5, HOSTS, **other)
    for error in form(facts, secrets, hosts=HOSTS):
        assert isinstance(error, RendezvousError) and "rank 5 on host node2 (pid 105)" in error.seen, error


def test_a_rank_that_does_not_come_is_named_on_all_hosts(monkeypatch):
    """The first rank of its host gives up before the hub does, and reports that to the hub."""
    join = channel_setup._join

    def join_but_for_one(place, parent, facts, **rest):
        if facts[0].rank == 5:
            raise RendezvousError("it is stuck", seen="rank 5")
        return join(place, parent, facts, **rest)

    monkeypatch.setattr(channel_setup, "_join", join_but_for_one)
    monkeypatch.setattr(channel_setup, "_SHARE_OF_A_HOST", 0.1)
    for rank, error in enumerate(form(hosts=HOSTS, timeout_s=60.0)):
        assert isinstance(error, RendezvousError) and "rank 5" in error.seen, (rank, error)
        assert rank == 5 or "did not come" in error.seen


def test_ninety_ranks_connect_and_learn_of_a_death(monkeypatch):
    monkeypatch.setattr(channel_tree, "MOST_IN_A_STAR", MOST_IN_A_STAR)
    hosts = [range(10 * host, 10 * host + 10) for host in range(9)]
    channels = form(hosts=hosts)
    assert not [each for each in channels if isinstance(each, Exception)]
    try:
        assert len(channels[0]._connections) == 9 + 8
        kill(channels[57])
        for rank, channel in enumerate(channels):
            if rank != 57:
                assert channel.wait(WITHIN_S).summary == "Rank 57 of 90 on host node5 died."
    finally:
        end(channels)
