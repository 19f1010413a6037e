"""The error that names the replicas that differ, from plain values."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import ReplicasDifferError
from paceline.reducer.replica_hashes import Entry, check_replicas, differing, flattened, hash_of_plain


def row(*hashes: int, kind: str = "parameter") -> list[Entry]:
    return [Entry(kind, f"w{place}", value) for place, value in enumerate(hashes)]


def test_the_minority_is_named() -> None:
    error = differing([row(1, 2, 3), row(1, 2, 3), row(1, 5, 6), row(1, 2, 3)], where="here", seen="why")
    assert (
        "Rank 2 of 4 has another model than the other ranks: 2 of 3 values differ, parameter 'w1' first"
        in str(error)
    )
    assert error.ranks == (2,) and error.differing == {"w1": (2,), "w2": (2,)}
    assert "why" in error.seen and "rank 2: parameter 'w1', parameter 'w2'" in error.seen
    again = pickle.loads(pickle.dumps(error))
    assert (again.ranks, again.differing, str(again)) == (error.ranks, error.differing, str(error))


def test_several_odd_ranks_in_different_values() -> None:
    error = differing([row(1, 2), row(9, 2), row(1, 7)], where="here")
    assert error.ranks == (1, 2) and error.differing == {"w0": (1,), "w1": (2,)}
    assert str(error).startswith("Ranks 1-2 of 3 have another model")


def test_two_halves_have_no_majority() -> None:
    error = differing([row(1), row(2)], where="here")
    assert str(error).startswith("The 2 replicas of the model differ, in 1 of 1 values: parameter 'w0'")
    assert error.ranks == (1,) and "no majority" in error.hint


def test_a_value_that_some_ranks_lack() -> None:
    error = differing([row(1, 2), row(1), row(1, 2)], where="here")
    assert error.differing == {"w1": (1,)}


@pytest.mark.parametrize(("kind", "cause"), [("buffer", "local"), ("optimizer", "optimizer was made")])
def test_the_cause_goes_with_the_kind(kind: str, cause: str) -> None:
    assert cause in differing([row(1, kind=kind), row(2, kind=kind)], where="here").likely


def test_equal_replicas_exchange_eight_bytes() -> None:
    sent: list[bytes] = []

    def gather(payload: bytes) -> list[bytes]:
        sent.append(payload)
        return [payload, payload]

    check_replicas(row(1, 2), gather, where="here")
    assert [len(payload) for payload in sent] == [8]


def test_what_an_optimizer_holds_is_flattened() -> None:
    assert list(flattened("g", {"b": (1, None), "a": {"x": 2.0}})) == [
        ("g.a.x", 2.0),
        ("g.b.0", 1),
        ("g.b.1", None),
    ]
    assert hash_of_plain(1) != hash_of_plain(1.0) != hash_of_plain("1.0")
    assert hash_of_plain(object()) is None
    with pytest.raises(ReplicasDifferError):
        raise differing([row(1), row(2)], where="here")
