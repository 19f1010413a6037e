"""Messages over calls that block and match by their order, as in a process group; here they are queues."""

from __future__ import annotations

import gc
import queue
import socket
import threading
import time
import weakref

import numpy as np
import pytest

from paceline.health.peer_errors import is_of_a_late_peer, is_of_a_lost_peer
from paceline.reducer.between_hosts import piped_transport
from paceline.reducer.between_hosts.message_headers import HEADER_BYTES, PLANS, Envelope, Message, tag_of
from paceline.reducer.between_hosts.piped_transport import FRAME_BYTES, PipedTransport, Pipes

PATIENT_S = 30.0


class Line:
    """One direction: `send` returns when `receive` has taken a frame. Cut: both raise."""

    def __init__(self) -> None:
        self.frames: queue.Queue[Message | None] = queue.Queue()
        self.taken = threading.Semaphore(0)
        self.is_cut = threading.Event()

    def send(self, frame: Message) -> None:
        self.frames.put(frame.copy())
        while not self.taken.acquire(timeout=0.01):
            self._check()

    def receive(self, frame: Message) -> None:
        while True:
            try:
                came = self.frames.get(timeout=0.01)
                break
            except queue.Empty:
                self._check()
        assert came is not None and len(came) <= len(frame)
        frame[: len(came)] = came
        self.taken.release()

    def _check(self) -> None:
        if self.is_cut.is_set():
            raise RuntimeError("TIMEOUT self_rank = 0")


class Pair:
    """Both ends of a connection between two hosts."""

    def __init__(self, limit_s: float = 30.0) -> None:
        self.lines = there, back = Line(), Line()
        names = ["rank 0", "rank 1"]
        self.ends = [
            Pipes(0, [0, 1], names, {1: [there.send]}, {1: [back.receive]}, [], limit_s),
            Pipes(1, [0, 1], names, {0: [back.send]}, {0: [there.receive]}, [], limit_s),
        ]

    def cut(self) -> None:
        for line in self.lines:
            line.is_cut.set()

    def close(self) -> None:
        self.cut()
        for end in self.ends:
            end.abort()
        for lane in [lane for end in self.ends for lane in (*end._senders, *end._receivers)]:
            lane.thread.join(PATIENT_S)
            assert not lane.thread.is_alive()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()
    gc.collect()


def message(bucket: int, payload: bytes, model: int = 0, phase: int = 0) -> Message:
    found = np.empty(HEADER_BYTES + len(payload), np.uint8)
    Envelope(found, model * PLANS, bucket, phase, 0, 0).write(1, 1.0)
    found[HEADER_BYTES:] = np.frombuffer(payload, np.uint8)
    return found


def payload_of(found: Message) -> bytes:
    return found[HEADER_BYTES:].tobytes()


def test_each_message_finds_its_receive_whatever_the_order(pair):
    ours, theirs = (PipedTransport(end, model) for end, model in zip(pair.ends, (0, 0)))
    another = PipedTransport(pair.ends[1], 1)
    # A message that comes before it is requested waits: bucket 2 and the other model's bucket 0.
    for bucket, text, model in ((2, b"two", 0), (0, b"other", 1), (1, b"one", 0), (0, b"zero", 0)):
        pair_message = message(bucket, text, model)
        PipedTransport(pair.ends[0], model).sending(1, pair_message, tag_of(bucket, 0, 0))().wait(PATIENT_S)
    for transport, bucket, text in (
        (theirs, 0, b"zero"),
        (theirs, 1, b"one"),
        (another, 0, b"other"),
        (theirs, 2, b"two"),
    ):
        room = np.zeros(HEADER_BYTES + len(text), np.uint8)
        transport.receiving(0, room, tag_of(bucket, 0, 0))().wait(PATIENT_S)
        assert payload_of(room) == text
    # And the other way round: it is requested before it comes; both directions at once.
    rooms = [np.zeros(HEADER_BYTES + 4, np.uint8) for _ in range(2)]
    waits = [theirs.receiving(0, rooms[0], tag_of(5, 1, 0))(), ours.receiving(1, rooms[1], tag_of(5, 1, 0))()]
    ours.sending(1, message(5, b"ours", phase=1), tag_of(5, 1, 0))()
    theirs.sending(0, message(5, b"them", phase=1), tag_of(5, 1, 0))()
    for wait in waits:
        wait.wait(PATIENT_S)
    assert [payload_of(room) for room in rooms] == [b"ours", b"them"]


def test_a_message_of_several_frames(pair):
    ours, theirs = (PipedTransport(end, 0) for end in pair.ends)
    text = np.random.default_rng(0).bytes(2 * FRAME_BYTES + 100)
    room = np.zeros(HEADER_BYTES + len(text), np.uint8)
    wait = theirs.receiving(0, room, tag_of(0, 0, 0))()
    ours.sending(1, message(0, text), tag_of(0, 0, 0))().wait(PATIENT_S)
    wait.wait(PATIENT_S)
    assert payload_of(room) == text


def test_an_idle_connection_shows_signs_of_life(monkeypatch):
    monkeypatch.setattr(piped_transport, "IDLE_S", 0.01)
    pair = Pair()
    frames = []
    receive = pair.lines[0].receive

    def see(frame: Message) -> None:
        receive(frame)
        frames.append(frame[:4].tobytes())

    pair.ends[1].incoming[0][0]._carry_frame = see
    deadline = time.monotonic() + PATIENT_S
    while len(frames) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(frames[:3]) == {b"idle"}
    room = np.zeros(HEADER_BYTES + 1, np.uint8)
    wait = PipedTransport(pair.ends[1], 0).receiving(0, room, tag_of(0, 0, 0))()
    PipedTransport(pair.ends[0], 0).sending(1, message(0, b"x"), tag_of(0, 0, 0))()
    wait.wait(PATIENT_S)
    assert payload_of(room) == b"x"
    pair.close()


def test_nothing_comes_in_time(pair):
    wait = PipedTransport(pair.ends[1], 0).receiving(0, np.zeros(100, np.uint8), 0)()
    with pytest.raises(RuntimeError) as caught:
        wait.wait(0.01)
    assert is_of_a_late_peer(str(caught.value))


@pytest.mark.parametrize(("limit_s", "is_late"), [(1e6, False), (1e-9, True)])
def test_a_connection_that_ends_is_lost_and_one_that_the_engine_gives_up_is_late(limit_s, is_late):
    pair = Pair(limit_s)
    receiver, sender = PipedTransport(pair.ends[1], 0), PipedTransport(pair.ends[0], 0)
    waits = [receiver.receiving(0, np.zeros(100, np.uint8), 0)()]
    pair.cut()
    with pytest.raises(RuntimeError) as caught:
        waits[0].wait(PATIENT_S)
    assert is_of_a_late_peer(str(caught.value)) == is_late
    assert is_of_a_lost_peer(str(caught.value)) != is_late
    with pytest.raises(RuntimeError):  # and so do all later ones
        receiver.receiving(0, np.zeros(100, np.uint8), 0)()
    with pytest.raises(RuntimeError):
        sender.sending(1, message(0, b"x"), 0)().wait(PATIENT_S)
    pair.close()


def test_a_message_of_another_size_does_not_fit(pair):
    room = np.zeros(HEADER_BYTES + 2, np.uint8)
    wait = PipedTransport(pair.ends[1], 0).receiving(0, room, tag_of(0, 0, 0))()
    PipedTransport(pair.ends[0], 0).sending(1, message(0, b"xyz"), tag_of(0, 0, 0))()
    with pytest.raises(RuntimeError, match="a message of 67 bytes came where 66 are awaited"):
        wait.wait(PATIENT_S)


def test_the_receives_of_a_plan_that_was_replaced_take_nothing(pair):
    """Nor do they keep the memory that they would have filled. Plan 9 has the tags of plan 1."""
    ours, theirs = (PipedTransport(end, 0) for end in pair.ends)
    of_plan_1 = theirs.receiving(0, np.zeros(HEADER_BYTES + 3, np.uint8), tag_of(0, 0, 0, 1))()
    room = weakref.ref(of_plan_1.message)
    del of_plan_1
    gc.collect()
    assert room() is None
    sent = np.empty(HEADER_BYTES + 3, np.uint8)
    Envelope(sent, 9, 0, 0, 0, 0).write(1, 1.0)
    sent[HEADER_BYTES:] = np.frombuffer(b"new", np.uint8)
    found = np.zeros_like(sent)
    awaited = theirs.receiving(0, found, tag_of(0, 0, 0, 9))()
    ours.sending(1, sent, tag_of(0, 0, 0, 9))().wait(PATIENT_S)
    awaited.wait(PATIENT_S)
    assert payload_of(found) == b"new"


def test_what_has_arrived_is_good_whatever_ends_the_connection_later(monkeypatch):
    monkeypatch.setattr(piped_transport, "IDLE_S", 0.01)
    is_sent, is_over = threading.Event(), threading.Event()

    def carry(frame):
        if is_sent.is_set():  # a sign of life
            raise RuntimeError("gone")
        if b"sent" in bytes(frame):  # a busy machine may have signs of life before it
            is_sent.set()

    lane = piped_transport._Outgoing(carry, 5.0, is_over.set)
    transfer = lane.send(message(0, b"sent"))
    assert is_over.wait(PATIENT_S)
    transfer.wait(PATIENT_S)
    with pytest.raises(RuntimeError, match="closed by peer"):
        lane.send(message(0, b"more"))


def test_who_leaves_has_sent_everything_and_says_so(pair):
    leaving, staying = pair.ends
    sent = PipedTransport(leaving, 0).sending(1, message(0, b"last"), tag_of(0, 0, 0))()
    threading.Timer(0.05, pair.lines[1].is_cut.set).start()  # as if it shut its sockets down
    leaving.close()
    sent.wait(PATIENT_S)
    room = np.zeros(HEADER_BYTES + 4, np.uint8)
    PipedTransport(staying, 0).receiving(0, room, tag_of(0, 0, 0))().wait(PATIENT_S)
    assert payload_of(room) == b"last"
    staying.incoming[0][0].thread.join(PATIENT_S)
    with pytest.raises(RuntimeError, match="it has left"):
        PipedTransport(staying, 0).receiving(0, room, tag_of(1, 0, 0))()


class Watched:
    """A socket that notes how it is shut down, and whether its connection was still used then."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.pipes: Pipes | None = None

    def shutdown(self, how: int) -> None:
        assert self.pipes is not None
        self.calls.append((how, self.pipes._num_in_calls > 0))


def watched_ends() -> tuple[list[Pipes], list[Watched]]:
    there, back = Line(), Line()
    sockets = [Watched(), Watched()]
    ends = [
        Pipes(0, [0, 1], ["rank 0", "rank 1"], {1: [there.send]}, {1: [back.receive]}, sockets[:1], 30.0),
        Pipes(1, [0, 1], ["rank 0", "rank 1"], {0: [back.send]}, {0: [there.receive]}, sockets[1:], 30.0),
    ]
    for each, end in zip(sockets, ends, strict=True):
        each.pipes = end
    return ends, sockets


def test_ranks_that_leave_together_end_no_connection_that_is_used():
    ends, sockets = watched_ends()
    leaving = [threading.Thread(target=end.close) for end in ends]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(PATIENT_S)
    for each in sockets:
        assert each.calls[0] == (socket.SHUT_RDWR, False), each.calls


def test_a_rank_that_leaves_before_its_peer_may_still_write(monkeypatch):
    """The process group's thread may be about to: an error there would end the process."""
    monkeypatch.setattr(piped_transport, "_ENDED_WITHIN_S", 0.05)
    ends, sockets = watched_ends()
    ends[0].close()
    assert sockets[0].calls == [(socket.SHUT_RD, True)]
    assert not sockets[1].calls
    ends[1].close()
    for lane in (*ends[0]._senders, *ends[0]._receivers, *ends[1]._senders, *ends[1]._receivers):
        lane.thread.join(PATIENT_S)
    assert sockets[0].calls[-1] == (socket.SHUT_RDWR, False)
