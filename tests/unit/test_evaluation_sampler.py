"""EvaluationSampler without processes: shards, and the errors for rows that do not fit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from paceline.data import EvaluationSampler
from paceline.errors import ConfigError, MismatchError


class Threads:
    """The group of ranks that are threads; `member` is one rank's."""

    def __init__(self, world_size: int) -> None:
        self._arrays: list[np.ndarray] = [np.empty(0)] * world_size
        self._barrier = threading.Barrier(world_size, timeout=20)

    def all_gather(self, rank: int, array: np.ndarray) -> np.ndarray:
        self._arrays[rank] = array
        self._barrier.wait()
        stacked = np.stack(self._arrays)
        self._barrier.wait()
        return stacked


class Member:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self._rank = rank

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        return self._threads.all_gather(self._rank, array)


def gather_on_all(length: int, world_size: int, rows_of, root: int | None = None) -> list[object]:
    """The result or the error of each rank."""
    threads = Threads(world_size)
    results: list[object] = [None] * world_size

    def run(rank: int) -> None:
        sampler = EvaluationSampler(range(length), world_size, rank)
        try:
            results[rank] = sampler.gather(rows_of(sampler), Member(threads, rank), root=root)
        except Exception as error:
            results[rank] = error

    running = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return results


@given(st.integers(0, 10**5), st.integers(1, 17))
@settings(max_examples=60, deadline=None)
def test_parts_are_the_data_set(length: int, world_size: int) -> None:
    samplers = [EvaluationSampler(range(length), world_size, rank) for rank in range(world_size)]
    parts = [list(sampler) for sampler in samplers]
    assert [i for part in parts for i in part] == list(range(length))
    assert [len(sampler) for sampler in samplers] == list(map(len, parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("length", "world_size"), [(10, 3), (2, 4), (0, 2), (9, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_, np.complex128])
def test_rows_come_back_in_order(length: int, world_size: int, dtype: type) -> None:
    truth = np.arange(length * 6).reshape(length, 2, 3).astype(dtype)
    for result in gather_on_all(length, world_size, lambda sampler: truth[list(sampler)]):
        assert_array_equal(result, truth)
    # As batches, and a rank without any.
    results = gather_on_all(length, world_size, lambda sampler: [truth[i : i + 1] for i in sampler], root=0)
    if length:
        assert_array_equal(results[0], truth)
    assert len(results[0]) == length
    assert all(result is None for result in results[1:])


def test_every_ranks_error_names_the_rank_with_the_wrong_number() -> None:
    errors = gather_on_all(10, 3, lambda sampler: np.zeros(len(sampler) - (sampler.rank == 1)))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "rank 1 of 3" in str(error) and "rank 1: 3" in str(error) and "rank 1: 2" in str(error)


def test_every_ranks_error_names_other_shapes_and_types() -> None:
    for rows_of in (
        lambda sampler: np.zeros((len(sampler), 1 + sampler.rank)),
        lambda sampler: np.zeros(len(sampler), np.float32 if sampler.rank else np.float64),
    ):
        for error in gather_on_all(10, 2, rows_of):
            assert isinstance(error, MismatchError) and "rank 0" in str(error) and "rank 1" in str(error)
    for error in gather_on_all(4, 2, lambda sampler: np.array(["a"] * 2 if sampler.rank else [1, 2])):
        assert isinstance(error, MismatchError) and "rank 1 are no numbers" in str(error)


def test_a_group_of_another_size_is_refused() -> None:
    threads = Threads(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(EvaluationSampler(range(4), 1, 0).gather, np.zeros(4), Member(threads, rank))
            for rank in range(2)
        ]
    for future in futures:
        with pytest.raises(ConfigError, match="another number of ranks") as caught:
            future.result()
        assert "1 rank" in str(caught.value) and "2 ranks" in str(caught.value)


def test_bad_calls() -> None:
    sampler = EvaluationSampler(range(3), 1, 0)
    with pytest.raises(ConfigError, match="root="):
        sampler.gather([], root=1)
    with pytest.raises(ConfigError, match="no group"):
        sampler.gather([])
    with pytest.raises(ConfigError, match="rows="):
        sampler.gather(np.float32(3), Member(Threads(1), 0))
