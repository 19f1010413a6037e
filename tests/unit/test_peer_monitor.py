"""The rank to blame, among ranks that share memory beside their process group; without a process."""

from __future__ import annotations

import os

import pytest

from paceline.errors import DeadlineError, PeerLostError
from paceline.health.peer_errors import is_of_a_late_peer
from paceline.health.peer_monitor import MemorySource, PeerMonitor
from paceline.reducer.process_group_waits import _USUAL_NAPS, ProcessGroupWaits


class Core:
    """Memory of three ranks, seen by rank 0."""

    rank, world_size = 0, 3

    def __init__(self) -> None:
        self.activities = ["", "", ""]
        self.forwards = [0, 0, 0]
        self.states = ["alive"] * 3
        self.texts: list[str] = []
        self.error: Exception | None = None

    def set_activity(self, text: str, forwards: int = 0) -> None:
        self.activities[0], self.forwards[0] = text, forwards
        self.texts.append(text)

    def check_usable(self) -> None:
        if self.error is not None:
            raise self.error

    def records(self):
        pid = os.getpid()  # which runs
        return [
            {
                "rank": rank,
                "pid": pid,
                "state": self.states[rank],
                "activity": self.activities[rank],
                "forwards": self.forwards[rank],
            }
            for rank in range(3)
        ]


@pytest.fixture
def core():
    return Core()


def waits_of(core: Core, timeout_s: float = 0.05) -> ProcessGroupWaits:
    return ProcessGroupWaits(
        0,
        3,
        words="a group",
        timeout_s=timeout_s,
        warn_after_s=60.0,
        peer_monitor=PeerMonitor(MemorySource(core)),
    )


def after(count: int):
    """A call that is complete after so many queries."""
    asked = iter(range(count))
    return lambda: next(asked, None) is None


def waiting() -> str:
    core = Core()
    PeerMonitor(MemorySource(core)).publish_waiting()
    return core.texts[0]


def test_a_short_wait_is_not_reported(core):
    waits_of(core, 60.0).poll(after(3), 0)
    assert core.texts == []


def test_a_wait_that_ends_is_no_excuse_later(core):
    core.set_activity("in forward 2 of iteration 3", 2)
    waits_of(core, 60.0).poll(after(_USUAL_NAPS + 1), 0)  # done at the next query after the death
    assert core.texts[1:] == [waiting(), "in forward 2 of iteration 3"] and core.forwards[0] == 2


def test_who_waits_as_well_is_not_late(core):
    core.activities[1:] = ["in backward of iteration 3", waiting()]
    with pytest.raises(DeadlineError, match=r"gave up waiting for rank 1 .* after 0\.1 s") as caught:
        waits_of(core).poll(lambda: False, 0)
    assert caught.value.late == (1,)
    assert "is alive; last in backward of iteration 3" in str(caught.value)


def test_who_has_given_up_is_not_late_and_stays_so(core):
    peer_monitor = PeerMonitor(MemorySource(core))
    peer_monitor.give_up()
    peer_monitor.publish("after backward of iteration 3")
    given_up = core.activities[0]
    core.activities = ["", given_up, "in forward of iteration 3"]
    with pytest.raises(DeadlineError) as caught:
        waits_of(core).poll(lambda: False, 0)
    assert caught.value.late == (2,)


def test_where_all_wait_no_rank_is_named(core):
    core.activities[1:] = [waiting(), waiting()]
    with pytest.raises(DeadlineError, match="does not say which rank") as caught:
        waits_of(core).poll(lambda: False, 0)
    assert not caught.value.late


def test_who_ends_after_a_call_has_sent_what_it_owes(core):
    """It may be dead before this rank has looked at its report; its backward is as good as the others'."""
    core.error = PeerLostError("Rank 1 of 3 died.", lost=(1,))
    core.states[1] = "dead"
    waits_of(core, 60.0).poll(after(_USUAL_NAPS + 1), 0)  # done at the next query after the death


def test_a_death_ends_the_wait(core):
    core.error = PeerLostError("Rank 2 of 3 died.", seen="the kernel reported", lost=(2,))
    with pytest.raises(PeerLostError, match=r"(?s)Rank 2 of 3 died.*rank 0 of 3, .*over a group") as caught:
        waits_of(core, 60.0).poll(lambda: False, "a sum")
    assert caught.value.lost == (2,)


def test_one_that_gave_up_first_does_not_take_the_blame(core):
    core.activities[1] = "in backward of iteration 3"
    core.activities[2] = waiting()
    core.error = PeerLostError("Rank 2 of 3 raised.", seen="DeadlineError: rank 1 did not come", lost=(2,))
    with pytest.raises(DeadlineError) as caught:
        waits_of(core, 60.0).poll(lambda: False, 0)
    assert caught.value.late == (1,)


def test_a_broken_connection_of_one_that_left(core):
    core.states[1] = "left"
    error = waits_of(core).failed(RuntimeError("Connection closed by peer [::1]:7"), 0)
    assert isinstance(error, PeerLostError)
    assert error.lost == (1,)
    assert str(error).startswith("Rank 1 of 3 has left.")


def test_another_failure_is_not_for_the_peer_monitor(core):
    core.states[1] = "left"
    error = waits_of(core).failed(RuntimeError("sizes differ"), 0)
    assert not isinstance(error, PeerLostError)
    assert "sizes differ" in str(error)


def test_a_rank_that_dies_between_two_looks_has_not_left(core, monkeypatch):
    """The kernel marks the death after the check that all are well, before the check of each rank."""
    died = PeerLostError("Rank 1 of 3 died.", lost=(1,))

    def records(original=core.records):
        core.states[1], core.error = "dead", died
        return original()

    monkeypatch.setattr(core, "records", records)
    assert PeerMonitor(MemorySource(core)).find_lost(1.0) is died


def test_a_rank_that_is_dead_has_not_left(core):
    """The kernel's mark is visible a moment before the thread that watches the memory reports it."""
    core.states[1] = "dead"
    error = PeerMonitor(MemorySource(core)).find_lost(0.05)
    assert isinstance(error, PeerLostError)
    assert error.lost == (1,) and "Rank 1 of 3 died" in str(error)


def test_the_report_of_a_death_is_waited_for(core):
    core.states[1] = "dead"
    asked, error = iter(range(3)), PeerLostError("Rank 1 of 3 died.", lost=(1,))

    def check_usable() -> None:
        if next(asked, None) is None:
            raise error

    core.check_usable = check_usable
    assert PeerMonitor(MemorySource(core)).find_lost(30.0) is error


@pytest.mark.parametrize(
    "text",
    [
        "Timed out waiting 3000ms for recv operation to complete",
        "Application timeout caused pair closure",  # by an earlier one of this rank's
    ],
)
def test_the_words_of_gloos_deadline(text):
    assert is_of_a_late_peer(text)
