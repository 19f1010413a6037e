"""The common code of communicators: values packed into chunks, bytes of any lengths gathered."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
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


@pytest.mark.parametrize("longest", [0, 3, 1016, 1017, 5000])
def test_bytes_of_any_lengths_are_gathered_by_rank(longest: int) -> None:
    payloads = [b"a", b"", bytes(index % 251 for index in range(longest))]
    calls: list[list[np.ndarray[Any, Any]]] = [[] for _ in payloads]
    barrier = threading.Barrier(len(payloads), timeout=60)

    def gathered(rank: int) -> list[bytes]:
        def gather(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            calls[rank].append(array.copy())
            barrier.wait()
            return np.stack([of_rank[len(calls[rank]) - 1] for of_rank in calls])

        return gather_bytes(gather, payloads[rank])

    with ThreadPoolExecutor(len(payloads)) as threads:
        assert list(threads.map(gathered, range(len(payloads)))) == [payloads] * len(payloads)
    assert [len(of_rank) for of_rank in calls] == [1 if longest <= 1016 else 2] * len(payloads)
