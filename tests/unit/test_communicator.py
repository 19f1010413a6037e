"""The common code of communicators: values packed into chunks, bytes of any lengths gathered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.reducer.communicator import gather_bytes, pack


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_everything_is_packed_once_in_order_and_no_piece_is_too_large(sizes: list[int], most: int) -> None:
    runs = pack(sizes, most)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    for run in runs:
        assert len(run) == 1 or sum(sizes[index] for index in run) <= most
    for run, following in pairwise(runs):  # no two would fit into one
        assert sum(sizes[index] for index in run) + sizes[following.start] > most


def test_bytes_of_any_lengths_are_gathered_by_rank() -> None:
    payloads = [b"a", b"", b"bcd"]
    sent: list[list[np.ndarray[Any, Any]]] = []

    def rounds_of(payload: bytes) -> list[np.ndarray[Any, Any]]:
        own = np.zeros(max(map(len, payloads)), np.uint8)
        own[: len(payload)] = np.frombuffer(payload, np.uint8)
        return [np.array([len(payload)], np.int64), own]

    sent = [rounds_of(payload) for payload in payloads]
    for rank, payload in enumerate(payloads):
        calls = iter(range(2))

        def gather(array: np.ndarray[Any, Any], rank: int = rank, calls: Any = calls) -> np.ndarray[Any, Any]:
            call = next(calls)
            assert array.tobytes() == sent[rank][call].tobytes()
            return np.stack([rows[call] for rows in sent])

        assert gather_bytes(gather, payload) == payloads
