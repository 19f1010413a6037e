"""Signed values in a store: a process without the secret can write there, and is not believed."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.health.store_check import Missing, StoreChecks
from paceline.rendezvous.signatures import ForeignValueError, Signatures, SignedKeyStore

SECRET = b"0123456789abcdef"


class KeyStore(dict):
    """A store of one process."""

    write = dict.__setitem__
    read = dict.get


@given(st.binary(max_size=40), st.text(max_size=10), st.sampled_from([SECRET, b""]))
def test_what_was_signed_is_read(value, key, secret):
    signed = Signatures(secret, "world").sign(key, value)
    assert Signatures(secret, "world").read(key, signed) == value


def test_the_code_is_an_hmac_of_all_that_it_is_about():
    parts = [b"paceline: a value in a store, 1", b"world", b"key", b"value"]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    code = hmac.new(SECRET, text, hashlib.sha256).hexdigest()[:32]
    assert Signatures(SECRET, "world").sign("key", b"value") == f"{code} value".encode()


@given(st.binary(max_size=60), st.sampled_from([SECRET, b""]))
def test_whatever_stands_there_is_a_value_or_foreign(raw, secret):
    signatures = Signatures(secret, "world")
    try:
        value = signatures.read("key", raw)
    except ForeignValueError:
        return
    assert signatures.sign("key", value) == raw


@pytest.mark.parametrize(
    ("writer", "key", "reason"),
    [
        (Signatures(b"another secret!!", "world"), "key", "has another secret"),
        (Signatures(SECRET, "another group"), "key", "has another secret"),
        (Signatures(SECRET, "world"), "another key", "has another secret"),
        (Signatures(b"", "world"), "key", "has no secret, and this rank has one"),
    ],
)
def test_values_of_another_writer_or_purpose_are_refused(writer, key, reason):
    with pytest.raises(ForeignValueError, match=reason) as caught:
        Signatures(SECRET, "world").read("key", writer.sign(key, b"value"))
    assert caught.value.value == b"value"


def test_a_rank_without_a_secret_notices_that_others_have_one():
    with pytest.raises(ForeignValueError, match="has a secret, and this rank has none"):
        Signatures(b"", "world").read("key", Signatures(SECRET, "world").sign("key", b"value"))


def test_each_changed_byte_is_noticed():
    signatures = Signatures(SECRET, "world")
    signed = signatures.sign("key", b"value")
    for place in range(len(signed)):
        changed = bytearray(signed)
        changed[place] ^= 1
        with pytest.raises(ForeignValueError):
            signatures.read("key", bytes(changed))


def test_the_secret_is_not_shown():
    assert SECRET.decode() not in repr(Signatures(SECRET, "world"))


def test_a_board_ignores_an_unknown_peer_and_says_so_once(caplog):
    key_store = KeyStore()
    ours = SignedKeyStore(key_store, Signatures(SECRET, "world"))
    ours.write("ours", "here")
    key_store["theirs"], key_store["also theirs"] = "1", "\udcff 1"
    with caplog.at_level(logging.WARNING, logger="paceline"):
        assert [ours.read(key) for key in ("ours", "theirs", "also theirs", "nothing")] == [
            "here",
            *[None] * 3,
        ]
    (record,) = caplog.records
    assert record.getMessage().startswith("paceline: what the store of this job holds at theirs is ignored")


def test_an_unknown_peer_cannot_answer_the_roll_for_a_rank(monkeypatch):
    """The process of rank 1 has died; an attacker writes an answer in its place."""
    key_store = KeyStore()
    signed = SignedKeyStore(key_store, Signatures(SECRET, "world"))
    StoreChecks(signed, 1, 2, None, "the test's group")
    monkeypatch.setattr("paceline.health.store_check.process_state", lambda pid: "")
    checks = StoreChecks(signed, 0, 2, None, "the test's group").begin()
    key_store["paceline/check/0/0/1/answer/1"] = "1"
    assert checks.missing() == [Missing(1, f"(pid {os.getpid()}) has died")]


def test_an_unknown_peer_cannot_call_the_roll():
    key_store = KeyStore()
    call = StoreChecks(
        SignedKeyStore(key_store, Signatures(SECRET, "world")), 0, 2, None, "the test's group"
    ).begin()
    with call:
        key_store[f"{call._prefix}/called"] = "1"
        call._begun -= 1.0  # it looks from then on
        call.is_requested()
        assert not call._is_requested.wait(0.3)
