"""The ranks that answer on the control channel when a collective is late: here they are threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import pytest

from paceline.errors import DeadlineError, PeerLostError
from paceline.health import channel_tree, control_channel, liveness_check
from paceline.health.handshake import Member
from paceline.health.liveness_check import Activity, Answer, Seen
from paceline.health.peer_errors import late_ranks
from paceline.health.peer_monitor import ChannelSource, PeerMonitor
from paceline.reducer.process_group_waits import ProcessGroupWaits
from paceline.rendezvous.frames import Frame
from paceline.rendezvous.messages import MessageError
from tests.unit.test_control_channel import HOSTS, end, form

TREE = ((0, 1), (2, 3, 6), (4, 5))


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As long as a busy machine may take: each rank that is silent here takes all of it."""
    monkeypatch.setattr(channel_tree, "MOST_IN_A_STAR", 4)
    monkeypatch.setattr(liveness_check, "ASK_WITHIN_S", 3.0)
    monkeypatch.setattr(liveness_check, "_ANSWER_WITHIN_S", 2.0)
    monkeypatch.setattr(control_channel, "ASK_AGAIN_WITHIN_S", 0.0)


@pytest.fixture(params=[HOSTS, TREE], ids=["star", "tree"])
def channels(request):
    found = form(hosts=request.param)
    assert not [each for each in found if isinstance(each, Exception)], found
    yield found
    end(found)


def is_selecting(thread):
    return sys._current_frames()[thread.ident].f_code.co_name == "select"


@contextlib.contextmanager
def stopped(channel):
    """Its thread does nothing more, as if the process were stopped."""
    goes_on, has_stopped, receive = threading.Event(), threading.Event(), channel._receive

    def wait(rank):
        has_stopped.set()
        goes_on.wait()
        receive(rank)

    channel._receive = wait
    until_s = time.monotonic() + 60
    while not has_stopped.is_set() and not is_selecting(channel._thread):  # but in earlier messages
        assert time.monotonic() < until_s
        time.sleep(0.001)
    try:
        yield
    finally:
        goes_on.set()


def all_late(channels, but):
    """The answer to each rank that asks; they ask at once."""
    found = {}

    def ask(rank):
        found[rank] = channels[rank].late()

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(len(channels)) if rank != but]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return found


def give_up(channel):
    """The answer to a rank whose deadline has passed."""
    peer_monitor = PeerMonitor(ChannelSource(channel))
    peer_monitor.give_up()
    return peer_monitor.late()


def until_all_are_answered(channels):
    """A rank that asks before it has received the last round's result would take that for its answer."""
    until_s = time.monotonic() + 60
    while any(each._liveness._num_seen == 0 for each in channels):
        assert time.monotonic() < until_s
        time.sleep(0.001)


def wait_all(channels, but=()):
    for rank, each in enumerate(channels):
        if rank not in but:
            each.activity = Activity("in forward of iteration 3", is_waiting=True)


def test_no_rank_is_named_where_all_wait(channels):
    wait_all(channels)
    for each in channels:
        late = each.late()
        assert late is not None and late.ranks == ()
        assert late.seen.count("waits for others; last in forward of iteration 3") == len(channels) - 1


def test_a_rank_that_waits_elsewhere_is_not_to_blame(channels):
    """In its backward, for the gradients of one that has skipped its own and waits in its next forward."""
    wait_all(channels, but=[0])
    channels[0].activity = Activity("in backward of iteration 2", is_waiting=True)
    with pytest.raises(DeadlineError, match="gave up waiting to exchange") as raised:
        waits_of(channels[1]).poll(lambda: False, "a sum of values")
    assert "late" not in raised.value.fields
    assert (
        "rank 0 on host node0 (pid 100) waits for others; last in backward of iteration 2"
        in raised.value.seen
    )
    assert "different calls" in raised.value.likely


@pytest.mark.parametrize("busy", [0, 1, 3])
def test_a_rank_that_computes_is_named_with_what_it_is_in(channels, busy):
    wait_all(channels, but=[busy])
    channels[busy].activity = Activity("after backward of iteration 2")
    for rank, each in enumerate(channels):
        late = each.late()
        if rank == busy:
            assert late is not None and late.ranks == ()
            continue
        assert late is not None and late.ranks == (busy,)
        assert f"rank {busy} on host node" in late.seen and "last after backward of iteration 2" in late.seen
        assert "its main thread: " in late.seen
        assert each.late(is_silent=True) is None


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_a_rank_that_does_not_answer_is_named_by_all_others(channels, silent):
    wait_all(channels, but=[silent])
    with stopped(channels[silent]):
        found = all_late(channels, but=silent)
    assert len(found) == len(channels) - 1
    for rank, late in found.items():
        assert late is not None and late.ranks == (silent,), (rank, late)
        assert "does not answer" in late.seen and "stopped" in late.likely


def acknowledges_nothing(monkeypatch, channels, silent):
    """Suppress the kernel's acknowledgements of data for a rank, as when the link to its host is cut."""
    ways = [link.socket for each in channels for other, link in each._connections.items() if other == silent]
    real = control_channel.unconfirmed_bytes
    monkeypatch.setattr(
        control_channel, "unconfirmed_bytes", lambda link: 1000 if link in ways else real(link)
    )


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_no_question_reaches_is_not_said_to_be_stopped(channels, silent, monkeypatch):
    wait_all(channels, but=[silent])
    acknowledges_nothing(monkeypatch, channels, silent)
    with stopped(channels[silent]):
        found = all_late(channels, but=silent)
    for rank, late in found.items():
        assert late is not None and late.ranks == (silent,), (rank, late)
        assert f"(pid {100 + silent}) does not answer, and its host acknowledges nothing" in late.seen
        assert f"the network to node{silent // 2} was cut" in late.likely and "SIGSTOP" not in late.likely
        assert "kill -CONT" not in late.hint


def test_a_question_that_does_not_arrive_is_asked_again_until_there_is_a_failure(channels, monkeypatch):
    """It takes longer to know that a host is lost than to ask."""
    monkeypatch.setattr(control_channel, "ASK_AGAIN_WITHIN_S", 600.0)
    wait_all(channels, but=[0])
    acknowledges_nothing(monkeypatch, channels, 0)
    found = []
    with stopped(channels[0]):
        asking = threading.Thread(target=lambda: found.append(channels[1].late()))
        asking.start()
        with channels[1]._lock:
            channels[1]._lose(0, control_channel.How.SILENT)
        asking.join(60)
    assert found == [None] and channels[1].failure.lost == (0, 1)


def test_where_some_are_stopped_and_some_are_not_reached_both_causes_are_given():
    members = [Member(rank, f"node{rank // 2}", 100 + rank) for rank in range(4)]
    late = late_ranks(Seen((1,), {}, (3,)), members, (0, 1))
    assert late.ranks == (1, 3)
    assert "the process of rank 1 is stopped" in late.likely and "the network to node1 was cut" in late.likely


def test_who_does_not_answer_is_named_and_not_who_computes(channels):
    wait_all(channels, but=[1, 3])
    with stopped(channels[3]):
        late = channels[2].late()
        assert late is not None and late.ranks == (3,)
        assert "rank 1 on host node0" in late.seen


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_that_has_given_up_and_ends_is_not_named(channels, ended):
    """The first to give up is at the end of its process when the others ask, and does not answer any more."""
    wait_all(channels, but=[3])
    assert give_up(channels[ended]).ranks == (3,)
    until_all_are_answered(channels)
    with stopped(channels[ended]):
        late = channels[2].late()
    assert late is not None and late.ranks == (3,), late
    assert "does not answer" not in late.seen


def test_a_rank_that_was_busy_a_moment_ago_and_does_not_answer_is_named(channels):
    wait_all(channels, but=[3])
    assert give_up(channels[0]).ranks == (3,)
    until_all_are_answered(channels)
    with stopped(channels[3]):
        late = channels[1].late()
    assert late is not None and late.ranks == (3,)
    assert "does not answer" in late.seen


def test_ranks_that_ask_at_once_share_a_round(channels):
    wait_all(channels, but=[1])
    with stopped(channels[1]):
        begun = channels[0]._liveness._round
        found = all_late(channels, but=1)
    assert all(late.ranks == (1,) for late in found.values()), found
    assert channels[0]._liveness._round == begun + 1


def test_a_rank_that_goes_on_answers_again(channels):
    wait_all(channels)
    with stopped(channels[0]):
        assert channels[1].late().ranks == (0,)
    until = time.monotonic() + 60
    while channels[1].late().ranks:
        assert time.monotonic() < until


def test_who_has_left_owes_no_answer_and_is_named_as_one_that_has_left(channels):
    wait_all(channels)
    channels[3].close()
    while any(
        3 not in {each.rank for each in channel.left} for channel in channels if channel is not channels[3]
    ):
        time.sleep(0.01)
    assert channels[1].late().ranks == ()
    waits = waits_of(channels[1])
    with pytest.raises(PeerLostError, match="has left"):
        waits.poll(lambda: False, "a sum of values")


def test_where_the_hub_has_left_no_rank_is_said_to_be_stopped(channels):
    wait_all(channels)
    channels[0].close()
    neighbours = [each for each in channels[1:] if 0 in each._num_said]
    while not all(0 in {each.rank for each in channel.left} for channel in neighbours):
        time.sleep(0.01)
    for channel in neighbours:
        assert channel.late() is None
    with pytest.raises(PeerLostError, match=r"Rank 0 of \d has left"):
        waits_of(channels[1]).poll(lambda: False, "a sum of values")


def waits_of(channel):
    count = len(channel.members)
    return ProcessGroupWaits(
        1,
        count,
        words="a group",
        timeout_s=0.2,
        warn_after_s=60,
        peer_monitor=PeerMonitor(ChannelSource(channel)),
    )


def test_the_deadline_of_a_call_names_the_rank(channels):
    wait_all(channels)
    with (
        stopped(channels[0]),
        pytest.raises(DeadlineError, match="gave up waiting for rank 0 to exchange") as raised,
    ):
        waits_of(channels[1]).poll(lambda: False, "a sum of values")
    assert raised.value.late == (0,)


def test_a_connection_that_an_engine_has_closed_names_the_silent_rank_and_no_busy_one(channels):
    waits = waits_of(channels[1])
    wait_all(channels, but=[2])
    broken = RuntimeError("Connection closed by peer [10.0.0.1]:12")
    assert isinstance(waits.failed(broken, "a sum of values"), PeerLostError)
    with stopped(channels[0]):
        error = waits.failed(broken, "a sum of values")
    assert isinstance(error, DeadlineError) and error.late == (0,)


def test_a_failure_that_is_reported_meanwhile_says_more(channels):
    wait_all(channels)
    found = []
    with stopped(channels[1]):
        asking = threading.Thread(target=lambda: found.append(channels[2].late()))
        asking.start()
        channels[3].report_failure(ValueError("the cause"))
        asking.join(60)
    assert found == [None] and channels[2].failure is not None


def test_a_rank_cannot_answer_for_another_one():
    found = form(hosts=TREE)
    with found[4]._lock:
        found[4]._send(0, Frame.ANSWER, Answer(3, 1, "", True, "").pack())
    error = found[1].wait(60)
    assert error.lost == (4,) and "it answers for rank 3" in error.seen
    end(found)


def test_only_the_hub_reports_what_was_seen():
    found = form()
    with found[3]._lock:
        found[3]._send(0, Frame.SEEN, Seen((1,)).pack())
    assert found[1].wait(60).lost == (3,)
    end(found)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"silent": [true], "answers": [], "unreached": []}',
        b'{"silent": [], "answers": [1], "unreached": []}',
        b'{"silent": [], "answers": [], "unreached": ["1"]}',
        b'{"silent": [], "answers": []}',
    ],
)
def test_bytes_that_are_nothing_seen(raw):
    with pytest.raises(MessageError):
        Seen.unpack(raw)


def test_many_ranks_fit_into_a_frame():
    many = {rank: Answer(rank, 1, "\u4e2d" * 160, False, "\u4e2d" * 160) for rank in range(4096)}
    packed = Seen(tuple(range(4096)), many).pack()
    assert len(packed) < 1 << 16
    assert len(Seen.unpack(packed).answers) == 32
