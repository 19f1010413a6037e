"""Shards of buckets on devices: their elements, and their waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DeadlineError, PeerLostError
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.between_hosts import peer_waits
from paceline.reducer.between_hosts.device_shards import DeviceShards, Place, gaps_in_shard, plan_of_shards
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer
from paceline.reducer.plan import ParameterSpec, Plan, pieces_of, plan_buckets

ITEMSIZES = {"float32": 4, "float16": 2, "float64": 8}
WAIT_S = 20.0


def make_plan(numels: list[int], dtypes: list[str], cap: int) -> Plan:
    specs = [
        ParameterSpec(f"p{number}", numel, dtype, ITEMSIZES[dtype], "cuda:0")
        for number, (numel, dtype) in enumerate(zip(numels, dtypes))
    ]
    return plan_buckets(specs, bucket_cap_bytes=cap, first_bucket_bytes=cap)


@given(
    parameters=st.lists(
        st.tuples(st.integers(0, 70000), st.sampled_from(sorted(ITEMSIZES))), min_size=1, max_size=5
    ),
    cap=st.sampled_from([64, 1000, 1 << 16, 1 << 22]),
    num_ranks=st.integers(1, 9),
)
def test_the_shards_of_all_ranks_are_each_bucket(parameters, cap, num_ranks):
    plan = make_plan(*map(list, zip(*parameters)), cap)
    of_shards = plan_of_shards(plan, num_ranks)
    assert len(of_shards.buckets) == len(plan.buckets)
    for number, (bucket, shard) in enumerate(zip(plan.buckets, of_shards.buckets)):
        section = of_shards.sections[shard.section]
        assert shard.parameters == (number,) and section.dtype == plan.sections[bucket.section].dtype
        numel = bucket.nbytes // section.itemsize
        count = shard.nbytes // section.itemsize
        assert numel <= count * num_ranks < numel + num_ranks
        # The gap after a bucket's gradients belongs to some shard, and no other element is left over.
        begin = (bucket.begin_byte - plan.sections[bucket.section].begin_byte) // section.itemsize
        held = {
            element - begin for _, first, last in pieces_of(plan, number) for element in range(first, last)
        }
        gaps = [
            place * count + element
            for place in range(num_ranks)
            for gap in gaps_in_shard(plan, number, Place(place, num_ranks))
            for element in range(gap.start, gap.stop)
        ]
        assert len(gaps) == len(set(gaps))
        assert held.union(gaps) == set(range(count * num_ranks)) and not held.intersection(gaps)


class Exchange:
    """Replaces the reducer that exchanges shards, and records its calls."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.error: BaseException | None = None

    def mark_ready(self, bucket: int) -> None:
        self.log.append(bucket)
        if self.error is not None:
            raise self.error

    def finish(self, status: object, allow_unused: bool) -> int:
        self.log.append("finish")
        return 0

    def give_up(self, error: BaseException) -> None:
        self.log.append(type(error))

    def close(self) -> None:
        self.log.append("close")


def make_shards(count: int, timeout_s: float = WAIT_S) -> tuple[DeviceShards, Exchange, list[str]]:
    exchange, log = Exchange(), cast("list[str]", [])
    peer_monitor = SimpleNamespace(
        publish_waiting=lambda: log.append("waiting"), publish_done=lambda: log.append("done")
    )
    shards = DeviceShards(
        cast(HierarchicalReducer, exchange),
        count,
        "rank 1 of 4",
        timeout_s,
        lambda: log.append("abort"),
        cast(PeerMonitor, peer_monitor),
    )
    return shards, exchange, log


def test_the_thread_of_the_backward_does_not_wait_for_a_shard():
    shards, exchange, log = make_shards(3)
    may_come, threads = threading.Event(), []

    def fetch(bucket: int) -> Callable[[], None]:
        def wait() -> None:
            threads.append(threading.current_thread())
            assert may_come.wait(WAIT_S)

        return wait

    for bucket in range(3):
        shards.bring(bucket, fetch(bucket))
    assert exchange.log == []
    may_come.set()
    shards.finish()
    assert exchange.log == [0, 1, 2, "finish"] and log == ["waiting", "done"]
    assert len(set(threads)) == 1 and threading.current_thread() not in threads
    shards.bring(0, fetch(0))  # of the next backward, whose other shards are still to come
    shards.close()
    assert exchange.log[4:] == [0, "close"]


@pytest.mark.parametrize("fails_in", ["fetch", "mark_ready"])
def test_a_shard_that_fails_ends_the_backwards_and_is_reported(fails_in):
    shards, exchange, log = make_shards(2)
    error = PeerLostError("Rank 3 of 4 died.", lost=(3,))

    def fetch() -> None:
        if fails_in == "fetch":
            raise error

    if fails_in == "mark_ready":
        exchange.error = error
    shards.bring(0, fetch)
    with pytest.raises(PeerLostError, match="Rank 3 of 4 died"):
        shards.finish()
    assert exchange.log[-1] is PeerLostError and log == ["abort"]
    with pytest.raises(PeerLostError):
        shards.bring(1, fetch)


def test_a_shard_that_never_comes_has_a_deadline(monkeypatch):
    monkeypatch.setattr(peer_waits, "_ASKS_WITHIN_S", 0.0)
    shards, _, _ = make_shards(2, timeout_s=0.2)
    is_over = threading.Event()
    shards.bring(0, lambda: None)
    shards.bring(1, lambda: cast(Any, is_over.wait(WAIT_S)))
    with pytest.raises(DeadlineError, match="Rank 1 of 4 gave up waiting for its shards") as caught:
        shards.finish()
    assert "1 of 2" in caught.value.seen
    is_over.set()
    shards.close()
