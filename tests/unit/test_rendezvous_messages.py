"""Any bytes may come while a group forms: the result is a value of the expected kind, or one error."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelMismatchError, RendezvousError
from paceline.reducer.model_agreement import ModelDescription, check_agreement
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import Frame, FrameReader, receive_frame, send_frame
from paceline.rendezvous.messages import (
    Hello,
    MessageError,
    gather_objects,
    join_payloads,
    read_failure,
    read_hello,
    read_object,
    split_payloads,
    write_failure,
    write_object,
)
from paceline.rendezvous.unix_socket_exchange import UnixSocketExchange

HELLO = Hello(1, 2, "a job", "world", 4711)
NESTED = [b"[" * 20_000, b'{"rank":' * 2_500]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
valid = st.sampled_from([write_object(asdict(HELLO)), write_failure(RendezvousError("no", missing=(1,)))])
# Anything; JSON of anything; objects with the right names and any values; and valid ones, damaged.
garbage = st.one_of(
    st.binary(max_size=80),
    plain.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(dict.fromkeys(asdict(HELLO), plain)).map(lambda v: json.dumps(v).encode()),
    st.fixed_dictionaries({"text": plain, "missing": plain}).map(lambda v: json.dumps(v).encode()),
    st.tuples(valid, st.integers(0, 60), st.binary(max_size=3)).map(
        lambda t: t[0][: t[1]] + t[2] + t[0][t[1] :]
    ),
    st.sampled_from(NESTED),
)
bounded = settings(max_examples=100, deadline=None)


@bounded
@given(garbage)
def test_reading_gives_the_right_kinds_or_a_message_error(raw):
    try:
        hello = read_hello(raw)
    except MessageError as error:
        assert len(str(error)) < 500
    else:
        assert [type(value) for value in asdict(hello).values()] == [int, int, str, str, int]
    try:
        failure = read_failure(raw)
    except MessageError:
        pass
    else:
        assert isinstance(failure, RendezvousError)
        assert all(type(rank) is int for rank in failure.missing)
        str(failure)


def test_what_is_written_is_read():
    assert read_hello(write_object(asdict(HELLO))) == HELLO
    error = read_failure(write_failure(RendezvousError("No rank came.", seen="nothing", missing=(1, 3))))
    assert error.summary == "Rank 0 gave up: No rank came."
    assert "nothing" in error.seen
    assert error.missing == (1, 3)
    with pytest.raises(MessageError, match="not of type int"):
        read_object(b'{"rank": true}', {"rank": int})
    with pytest.raises(MessageError, match="RecursionError"):
        read_hello(b"[" * 1_000_000)
    with pytest.raises(MessageError, match="too large"):
        read_hello(write_object(asdict(HELLO) | {"pid": 1 << 40}))


@bounded
@given(
    st.lists(st.binary(max_size=20), max_size=5),
    st.integers(0, 5),
    st.binary(max_size=12),
    st.integers(0, 40),
)
def test_payloads_are_split_as_they_were_joined_or_not_at_all(payloads, count, noise, at):
    joined = join_payloads(payloads)
    assert split_payloads(joined, len(payloads)) == payloads
    damaged = joined[:at] + noise + joined[at:]
    try:
        parts = split_payloads(damaged, count)
    except MessageError:
        return
    assert len(parts) == count
    assert join_payloads(parts) == damaged


@bounded
@given(st.binary(max_size=200), st.lists(st.integers(1, 9), max_size=30), st.integers(0, 100))
def test_a_frame_in_pieces_is_a_frame_or_a_connection_error(raw, cuts, longest):
    reader, at = FrameReader(longest), 0
    for cut in [*cuts, len(raw)]:
        piece = raw[at : at + min(cut, reader.wants)]
        at += len(piece)
        try:
            frame = reader.feed(piece)
        except ConnectionError:
            return
        if frame is not None:
            kind, payload = frame
            assert raw[:at] == bytes([kind]) + len(payload).to_bytes(8, "little") + payload
            assert len(payload) <= longest
            return


@bounded
@given(st.binary(max_size=40), st.sampled_from(Frame))
def test_frames_from_a_socket(raw, kind):
    here, there = socket.socketpair()
    with here, there:
        send_frame(there, kind, raw, Deadline(5))
        there.sendall(raw)
        there.close()
        assert receive_frame(here, Deadline(5)) == (kind, raw)
        try:
            got, payload = receive_frame(here, Deadline(5))
        except OSError:
            return
        assert raw.startswith(bytes([got]) + len(payload).to_bytes(8, "little") + payload)


def hub(rank, world_size, peers):
    """An exchange that is complete, over these connections."""
    exchange = UnixSocketExchange(0, 1, key="test", job_id="test", name="test", timeout_s=1)
    exchange.rank, exchange.world_size = rank, world_size
    exchange._peers = peers
    return exchange


def test_the_reason_of_rank_0_is_read_although_it_has_closed():
    """It fails while this rank has still to send its payload, to a connection that is then closed."""
    here, there = socket.socketpair()
    with here:
        send_frame(
            there, Frame.FAILED, write_failure(RendezvousError("Rank 1 was lost.", missing=(1,))), Deadline(5)
        )
        there.close()
        with pytest.raises(RendezvousError, match="Rank 1 was lost"):
            hub(2, 3, {0: here}).all_gather(b"mine", 5)


@bounded
@given(st.sampled_from(Frame), garbage)
def test_an_answer_of_rank_0_is_one_or_an_error_that_names_it(kind, raw):
    here, there = socket.socketpair()
    with here, there:
        send_frame(there, kind, raw, Deadline(5))
        try:
            answers = hub(1, 2, {0: here}).all_gather(b"mine", 5)
        except RendezvousError as error:
            assert error.missing == (0,) or kind is Frame.FAILED
        else:
            assert kind is Frame.ALL_PAYLOADS
            assert join_payloads(answers) == raw


class FromRank1:
    """An exchange in which rank 1 sends its own payload."""

    rank, world_size = 0, 2

    def __init__(self, payload):
        self.payload = payload

    def all_gather(self, payload, timeout_s):
        return [payload, self.payload]


@bounded
@given(garbage)
def test_what_a_member_hands_in_fits_or_is_an_error_that_names_it(raw):
    mine = {"problem": "", "memory": False}
    try:
        _, theirs = gather_objects(FromRank1(raw), mine, 5)
    except RendezvousError as error:
        assert error.missing == (1,)
        assert "Rank 1 of 2 sent something else" in str(error)
    else:
        assert {name: type(value) for name, value in theirs.items()} == {"problem": str, "memory": bool}
    with pytest.raises((RendezvousError, ModelMismatchError), match="ank 1"):
        check_agreement(ModelDescription(()), FromRank1(raw), 5)
