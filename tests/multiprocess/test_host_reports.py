"""`HostReports`: reports that the ranks of a host exchange in its memory, against plain lists of bytes."""

from __future__ import annotations

import os

import pytest

from paceline.errors import CollectiveError, PeerLostError
from paceline.health.peer_monitor import MemorySource, PeerMonitor
from paceline.reducer.host_reports import HostReports
from paceline.reducer.process_group_waits import STATUS, ProcessGroupWaits
from tests.harness import kept_ranks, ranks
from tests.multiprocess.rank_signals import publish, wait_until_published


def gather(reports: HostReports, payload: bytes, rank: int, world_size: int) -> list[bytes]:
    gathering, rows = reports.begin(payload)
    waits = ProcessGroupWaits(rank, world_size, words="memory", timeout_s=60.0, warn_after_s=60.0)
    waits.poll(gathering.is_completed, STATUS)
    gathering.wait()
    return rows()


@kept_ranks("world_size")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_all_reports_by_rank(group, world_size: int) -> None:
    reports = HostReports(group._core)
    for number in range(50):  # of different lengths, some of them empty
        of_rank = [bytes([rank, number]) * (number % 7) for rank in range(world_size)]
        assert gather(reports, of_rank[group.rank], group.rank, world_size) == of_rank


@kept_ranks(2)
def test_abandoned_reports_do_not_disturb_later_ones(group) -> None:
    reports = HostReports(group._core)
    reports.begin(b"abandoned")
    assert gather(reports, b"wanted %d" % group.rank, group.rank, 2) == [b"wanted 0", b"wanted 1"]


@kept_ranks(2)
def test_reports_of_different_lengths_raise(group) -> None:
    with pytest.raises(CollectiveError, match="bytes"):
        gather(HostReports(group._core), b"." * (1 + group.rank), group.rank, 2)


@ranks(2, dies={1: 7})
def test_a_report_counts_even_if_its_rank_died_after_it(group) -> None:
    """Otherwise the ranks would disagree about whether the backward was good."""
    reports = HostReports(group._core)
    if group.rank:
        wait_until_published("started", [0])
        reports.begin(b"last words")
        os._exit(7)
    gathering, rows = reports.begin(b"first ones")
    publish("started", 0)
    assert isinstance(PeerMonitor(MemorySource(group._core)).find_lost(within_s=60.0), PeerLostError)
    assert gathering.is_completed()
    gathering.wait()
    assert rows() == [b"first ones", b"last words"]
    with pytest.raises(PeerLostError, match="ank 1"):
        reports.begin(b"to no rank")
