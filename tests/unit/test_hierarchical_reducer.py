"""The reducer between hosts against plain arithmetic: ranks are threads, links are queues in this process.

Hosts of any sizes: the ranks that have a shard, the pairing of reports, and the resulting bits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.collectives.failures  # noqa: F401  # lets the core raise errors of ours
from paceline import _core
from paceline.errors import MismatchError
from paceline.health.control_channel import ControlChannel
from paceline.health.liveness_check import Activity
from paceline.reducer.between_hosts import hierarchical, message_headers, routes
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer, Hosts
from paceline.reducer.between_hosts.message_headers import Message, tag_of
from paceline.reducer.between_hosts.routes import Route, num_shards, plan_route
from paceline.reducer.between_hosts.value_messages import InFlightValues
from paceline.reducer.plan import ParameterSpec, Plan, plan_buckets
from paceline.reducer.reducer_interface import BackwardStatus, Outcome

TIMEOUT_S = 60.0
COUNTS = (5, 40_000, 17)
Layout = Sequence[Sequence[int]]
LAYOUTS: list[Layout] = [
    [[0, 1], [2]],
    [[0], [1, 2, 3]],
    [[0, 2], [1, 3]],
    [[0, 1, 2], [3], [4, 5]],
]


VALUES_BYTES = [1, 1 << 14]
"""A shard of this size is sent as gradients: any, or that of full buckets of 16 KiB, between small ones."""


def make_plan(cap: int) -> Plan:
    specs = [ParameterSpec(f"p{i}", count, "float32", 4, "cpu") for i, count in enumerate(COUNTS)]
    return plan_buckets(specs, bucket_cap_bytes=cap, first_bucket_bytes=cap)


class Sync:
    """Payloads of all ranks, by rank: the n-th call of each belongs to the n-th of the others."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._rows: list[bytes] = [b""] * world_size

    def gather(self, rank: int, payload: bytes) -> list[bytes]:
        self._rows[rank] = payload
        self._barrier.wait(TIMEOUT_S)
        rows = list(self._rows)
        self._barrier.wait(TIMEOUT_S)
        return rows


class Crossing:
    """A message, once both ends have begun it. It is read as late as possible: when one of them waits."""

    def __init__(self) -> None:
        self.sent: Message | None = None
        self.coming: Message | None = None
        self._lock, self._has_both, self._is_over = threading.Lock(), threading.Event(), False

    def begin(self) -> None:
        if self.sent is not None and self.coming is not None:
            self._has_both.set()

    def wait(self, timeout_s: float) -> None:
        if not self._has_both.wait(timeout_s):
            raise RuntimeError("timed out")
        with self._lock:
            if not self._is_over:
                assert self.coming is not None
                self.coming[:] = self.sent
                self._is_over = True


class Links:
    """Messages by sender, receiver and tag, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_receive: dict[tuple[int, int, int], deque[Crossing]] = defaultdict(deque)
        self._to_send: dict[tuple[int, int, int], deque[Crossing]] = defaultdict(deque)
        self.sent: dict[int, list[tuple[int, int]]] = defaultdict(list)  # receiver and tag, by sender
        self.begun_by: dict[int, queue.SimpleQueue[str]] = defaultdict(queue.SimpleQueue)  # of receives

    def send(self, sender: int, receiver: int, tag: int, message: Message) -> Crossing:
        with self._lock:
            key = sender, receiver, tag
            self.sent[sender].append((receiver, tag))
            crossing = self._next(self._to_send[key], self._to_receive[key])
            crossing.sent = message
            crossing.begin()
        return crossing

    def receive(self, sender: int, receiver: int, tag: int, message: Message) -> Crossing:
        with self._lock:
            key = sender, receiver, tag
            crossing = self._next(self._to_receive[key], self._to_send[key])
            crossing.coming = message
            crossing.begin()
        return crossing

    def _next(self, own: deque[Crossing], others: deque[Crossing]) -> Crossing:
        if own:
            return own.popleft()
        others.append(Crossing())
        return others[-1]


class Transport:
    """One rank's end of the links."""

    needs_headers = lets_signals_in = False

    def __init__(self, links: Links, host: int, ranks: Sequence[int]) -> None:
        self.host, self.ranks = host, ranks
        self._links = links

    def sending(self, host: int, message: Message, tag: int) -> Callable[[], Crossing]:
        sender, receiver = self.ranks[self.host], self.ranks[host]
        return lambda: self._links.send(sender, receiver, tag, message)

    def receiving(self, host: int, message: Message, tag: int) -> Callable[[], Crossing]:
        def receive() -> Crossing:
            self._links.begun_by[self.ranks[self.host]].put(threading.current_thread().name)
            return self._links.receive(self.ranks[host], self.ranks[self.host], tag, message)

        return receive

    def timeout_of(self, timeout_s: float) -> float:
        return timeout_s

    def name(self, host: int) -> str:
        return f"rank {self.ranks[host]} (host {host})"

    def abort(self) -> None:
        """A rank that waits gives up at the deadline."""


class NoFailures:
    """A control channel without failures."""

    failure = None
    activity = Activity()

    def at_failure(self, call: Callable[[BaseException], object]) -> None:
        """Nothing fails."""

    def report_failure(self, error: BaseException) -> None:
        raise AssertionError(error)

    def wait(self, timeout_s: float) -> None:
        """No rank has reported anything."""

    def late(self, *, is_silent: bool) -> None:
        """All ranks answer."""


class Failures(NoFailures):
    """A control channel to no rank."""

    def report_failure(self, error: BaseException) -> None:
        """All others reach this point by themselves."""


class World:
    """Threads as the ranks of a layout; `run` calls a function with each rank's reducer."""

    def __init__(
        self,
        layout: Layout,
        cap: int,
        *,
        is_exact: bool = False,
        control: type = NoFailures,
        generations: Sequence[int] = (),
    ) -> None:
        self.layout, self.plan, self._is_exact = layout, make_plan(cap), is_exact
        self._control, self._generations = control, generations
        self.size = sum(map(len, layout))
        self.links, self._sync = Links(), Sync(self.size)
        self._nonces = [secrets.token_bytes(16) for _ in layout]
        self._regions = [_core.create_region(len(host), nonce) for host, nonce in zip(layout, self._nonces)]

    def run(self, body: Callable[[int, HierarchicalReducer], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank_body(rank: int) -> None:
            try:
                results[rank] = self._run_one(rank, body)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=rank_body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        for region in self._regions:
            os.close(region)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads)
        return results

    def _run_one(self, rank: int, body: Callable[[int, HierarchicalReducer], Any]) -> Any:
        host = next(number for number, ranks in enumerate(self.layout) if rank in ranks)
        place = list(self.layout[host]).index(rank)
        group = _core.HostGroup(
            self._regions[host], place, self._nonces[host], f"host {host}", TIMEOUT_S, TIMEOUT_S
        )
        group.join()
        transport = None
        if place < num_shards(self.layout):
            transport = Transport(self.links, host, [ranks[place] for ranks in self.layout])
        hosts = Hosts(
            rank=rank,
            world_size=self.size,
            ranks=tuple(map(tuple, self.layout)),
            group=group,
            transport=transport,
            control=cast(ControlChannel, self._control()),
            gather=lambda payload: self._sync.gather(rank, payload),
            timeout_s=TIMEOUT_S,
        )
        generation = self._generations[rank] if self._generations else 1
        reducer = HierarchicalReducer(self.plan, hosts, generation, is_exact=self._is_exact)
        try:
            return body(rank, reducer)
        finally:
            reducer.close()
            group.close()


def gradient(rank: int, step: int, param: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng([rank, step, param])
    return rng.standard_normal(COUNTS[param]).astype(np.float32)


def place_of(reducer: HierarchicalReducer, plan: Plan, param: int) -> np.ndarray[Any, Any]:
    address = reducer.buffer_pointer + plan.offsets[param]
    return np.ctypeslib.as_array((ctypes.c_float * COUNTS[param]).from_address(address))


def means(
    layout: Layout, cap: int, weights: Sequence[float], steps: int = 2, *, is_exact: bool = False
) -> list[list[bytes]]:
    """The contents of each rank's gradient buffer after each backward."""
    world = World(layout, cap, is_exact=is_exact)

    def train(rank: int, reducer: HierarchicalReducer) -> list[bytes]:
        found = []
        reducer.set_weight(weights[rank])
        for step in range(steps):
            for param in (2, 1, 0):
                place_of(reducer, world.plan, param)[:] = gradient(rank, step, param)
                reducer.mark_ready(param)
            assert reducer.finish(BackwardStatus(1), False).outcome == Outcome.GOOD
            found.append(
                b"".join(place_of(reducer, world.plan, param).tobytes() for param in range(len(COUNTS)))
            )
        return found

    found: list[list[bytes]] = world.run(train)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_means_on_hosts_of_any_sizes(layout: Layout, is_weighted: bool) -> None:
    size = sum(map(len, layout))
    weights = [2.5, 0.5, 1.0, 3.0, 1e-3, 7.0][:size] if is_weighted else [1.0] * size
    found = means(layout, 1 << 14, weights)
    assert all(row == found[0] for row in found)
    for step, packed in enumerate(found[0]):
        rows = [
            np.concatenate([gradient(rank, step, param) for param in range(len(COUNTS))]).astype(np.float64)
            for rank in range(size)
        ]
        expected = sum(w * row for w, row in zip(weights, rows)) / sum(weights)
        np.testing.assert_allclose(np.frombuffer(packed, np.float32), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_left_of_an_unused_parameter_counts_where_it_is_marked_unused(layout: Layout) -> None:
    world = World(layout, 1 << 14)

    def train(rank: int, reducer: HierarchicalReducer) -> list[float]:
        found = []
        for step in range(2):
            for param in range(len(COUNTS)):
                place_of(reducer, world.plan, param)[:] = 6.0
            reducer.mark_ready(0)
            if rank == 0:
                reducer.mark_ready(1)
            elif step == 0:
                reducer.mark_unused(1)
            result = reducer.finish(BackwardStatus(1), True)
            assert result.outcome == Outcome.UNUSED
            assert result.globally_unused == [2] and 1 in result.unused[world.size - 1]
            found.append(float(place_of(reducer, world.plan, 1)[0]))
        return found

    for found in world.run(train):
        np.testing.assert_allclose(found, [6.0, 6.0 / world.size], rtol=1e-6)


@pytest.mark.parametrize("phase", [0, 1])
def test_in_each_turn_every_host_is_sent_to_by_one(phase: int) -> None:
    """Otherwise three links of four are idle while all send to the first host."""
    world = World([[0], [1], [2], [3]], 1 << 22)
    assert len(world.plan.buckets) == 1 and len(plan_route(sum(COUNTS), 4, 0, 1, 4).parts) == 4

    def one_backward(rank: int, reducer: HierarchicalReducer) -> None:
        for param in range(len(COUNTS)):
            reducer.mark_ready(param)
        assert reducer.finish(BackwardStatus(1), False).outcome == Outcome.GOOD

    world.run(one_backward)
    tag = tag_of(0, phase, 0, 1)
    turns = [[receiver for receiver, sent in world.links.sent[rank] if sent == tag] for rank in range(4)]
    for turn in zip(*turns, strict=True):
        assert sorted(turn) == [0, 1, 2, 3], turns


def test_the_receives_of_the_next_backward_delay_no_rank() -> None:
    """They are begun when a backward has ended, by the thread that waits and not by the one that ends it."""
    world = World([[0], [1]], 1 << 22)
    begun_by = world.links.begun_by
    begun_by.update({rank: queue.SimpleQueue() for rank in range(world.size)})

    def two_backwards(rank: int, reducer: HierarchicalReducer) -> list[str]:
        own = threading.current_thread().name
        found = []
        for step in range(2):
            for param in range(len(COUNTS)):
                reducer.mark_ready(param)
            assert reducer.finish(BackwardStatus(1), False).outcome == Outcome.GOOD
            found += [begun_by[rank].get(timeout=TIMEOUT_S) for _ in range(2 - step)]
        return ["own" if name == own else name for name in found]

    for names in world.run(two_backwards):
        assert names == ["own", "paceline-hosts", "paceline-hosts"]


def test_two_ranks_and_one_have_the_bits_of_three_hosts_and_one_and_two_have_not() -> None:
    """Three hosts of one rank add as one host does: ((0 + 1) + 2)."""
    alone = means([[0], [1], [2]], 1 << 14, [1.0] * 3)
    assert means([[0, 1], [2]], 1 << 14, [1.0] * 3) == alone
    assert means([[0, 1], [2]], 1 << 18, [1.0] * 3) == alone
    other = means([[0], [1, 2]], 1 << 14, [1.0] * 3)
    assert other != alone and other == means([[0], [1, 2]], 1 << 18, [1.0] * 3)


@pytest.mark.parametrize("layout", [*LAYOUTS, [[0, 1, 2], [3, 4, 5]], [[0, 1, 4], [2, 3]]])
@pytest.mark.parametrize("cap", [1 << 14, 1 << 18])  # one round, and two
def test_exact_sums_have_the_same_bits_in_every_layout(layout: Layout, cap: int) -> None:
    size = sum(map(len, layout))
    weights = [2.5, 0.5, 1.0, 3.1, 1e-3, 7.7][:size]
    alone = means([[rank] for rank in range(size)], 1 << 14, weights)
    assert means(layout, cap, weights, is_exact=True) == alone


@pytest.mark.parametrize("layout", [[[0], [1, 2]], [[0, 1, 3], [2]], [[0, 1, 2], [3, 5, 4]]])
def test_exact_sums_have_the_same_bits_if_parts_differ_in_size(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def plan_route_in_small_pieces(*args: Any, **rest: Any) -> Route:
        route = functools.partial(plan_route, piece_bytes=1 << 14)(*args, **rest)
        parts.append([sum(map(len, part)) for part in route.parts])
        return route

    layout = [sorted(ranks) for ranks in layout]
    weights = [2.5, 0.5, 1.0, 3.1, 1e-3, 7.7][: sum(map(len, layout))]
    alone = means([[rank] for rank in range(len(weights))], 1 << 14, weights)
    monkeypatch.setattr(hierarchical, "plan_route", plan_route_in_small_pieces)
    assert means(layout, 1 << 18, weights, is_exact=True) == alone
    assert all(len(each) == 2 for each in parts)
    if 1 in map(len, layout):  # the host of one block owns nothing
        assert all(not each[layout.index(min(layout, key=len))] for each in parts)


@pytest.mark.parametrize("num_hosts", [2, 3, 5])
@pytest.mark.parametrize("cap", [1 << 14, 1 << 18])  # several buckets, and one
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("values_bytes", VALUES_BYTES)
def test_gradients_that_travel_as_they_are_have_the_bits_of_sums(
    num_hosts: int, cap: int, is_weighted: bool, values_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = [[rank] for rank in range(num_hosts)]
    weights = [2.5, 0.0, 1.0, 3.1, 1e-3][:num_hosts] if is_weighted else [1.0] * num_hosts
    monkeypatch.setattr(hierarchical, "plan_route", functools.partial(plan_route, piece_bytes=1 << 14))
    monkeypatch.setattr(Transport, "needs_headers", True)
    sums = means(layout, cap, weights, steps=4)
    monkeypatch.setattr(Transport, "needs_headers", False)
    monkeypatch.setattr(routes, "VALUES_BYTES", values_bytes)
    made = []
    room_bytes = InFlightValues.room_bytes
    monkeypatch.setattr(InFlightValues, "room_bytes", lambda *given: made.append(given) or room_bytes(*given))
    assert means(layout, cap, weights, steps=4) == sums and made


@pytest.mark.parametrize("cap", [1 << 14, 1 << 18])
def test_more_hosts_than_the_core_adds_at_once(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are added in steps, with the same bits."""
    layout = [[rank] for rank in range(5)]
    weights = [2.5, 0.0, 1.0, 3.1, 1e-3]
    at_once = means(layout, cap, weights)
    monkeypatch.setattr(_core, "MAX_RANKS", 2)
    monkeypatch.setattr(routes, "VALUES_BYTES", 1)
    assert means(layout, cap, weights) == at_once


def test_gradients_that_travel_as_they_are_take_no_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the sent gradients and the received means lie in the gradient buffer, without copies."""
    monkeypatch.setattr(routes, "VALUES_BYTES", 1)
    world = World([[0], [1]], 1 << 22)
    gradient_buffers: dict[int, tuple[int, int]] = {}
    begun: list[tuple[int, int, int, bool]] = []  # rank, address, bytes

    def noted(prepare: Any, of_means: int) -> Any:
        def prepared(transport: Transport, host: int, message: Message, tag: int) -> Any:
            rank, is_mean = transport.ranks[transport.host], tag // (1 << 12) % 2 == 1
            begun.append((rank, int(message.ctypes.data), len(message), is_mean or bool(of_means)))
            return prepare(transport, host, message, tag)

        return prepared

    monkeypatch.setattr(Transport, "sending", noted(Transport.sending, 1))
    monkeypatch.setattr(Transport, "receiving", noted(Transport.receiving, 0))

    def one_backward(rank: int, reducer: HierarchicalReducer) -> None:
        gradient_buffers[rank] = reducer.buffer_pointer, world.plan.buffer_bytes
        for param in range(len(COUNTS)):
            reducer.mark_ready(param)
        assert reducer.finish(BackwardStatus(1), False).outcome == Outcome.GOOD

    world.run(one_backward)
    large = [each for each in begun if each[2] > 1000]
    assert large
    for rank, address, nbytes, is_in_buffer in large:
        first, buffer_bytes = gradient_buffers[rank]
        assert is_in_buffer == (first <= address and address + nbytes <= first + buffer_bytes)


def test_a_backward_of_gradients_that_travel_as_they_are_has_three_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "VALUES_BYTES", 1)
    world = World([[0], [1], [2]], 1 << 14)
    assert len(world.plan.buckets) > 3

    def one_backward(rank: int, reducer: HierarchicalReducer) -> None:
        for param in range(len(COUNTS)):
            reducer.mark_ready(param)
        assert reducer.finish(BackwardStatus(1), False).outcome == Outcome.GOOD

    world.run(one_backward)
    for rank in range(world.size):
        headers = [tag for _, tag in world.links.sent[rank] if tag % (1 << 12) == 0]
        assert len(headers) == 3 * (world.size - 1)


@pytest.mark.parametrize("layout", [[[0], [1]], [[0, 1], [2, 3]]], ids=["gradients as they are", "sums"])
def test_ranks_of_different_plans_average_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags repeat after some plans, and then match; the first header reveals the mismatch."""
    monkeypatch.setattr(routes, "VALUES_BYTES", 1)
    assert message_headers.tag_of(0, 0, 0, 1) == message_headers.tag_of(0, 0, 0, 9)
    generations = [1 if rank in layout[0] else 9 for rank in range(sum(map(len, layout)))]
    world = World(layout, 1 << 14, control=Failures, generations=generations)

    def one_backward(rank: int, reducer: HierarchicalReducer) -> None:
        for param in (2, 1, 0):
            place_of(reducer, world.plan, param)[:] = gradient(rank, 0, param)
        with pytest.raises(MismatchError, match="got another message from rank"):
            for param in (2, 1, 0):
                reducer.mark_ready(param)
            reducer.finish(BackwardStatus(1), False)
        # Its sums are unchanged: the largest bucket holds no mean.
        assert (place_of(reducer, world.plan, 1) == gradient(rank, 0, 1)).all()

    world.run(one_backward)


@pytest.mark.parametrize("layout", [[[0], [1]], [[0, 1], [2, 3]]], ids=["gradients as they are", "sums"])
def test_a_host_that_sends_another_weight_within_a_backward_is_noticed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "VALUES_BYTES", 1)
    # Two buckets, each of several chunks of sums: the last header beside gradients is not the first one.
    monkeypatch.setattr(hierarchical, "plan_route", functools.partial(plan_route, piece_bytes=1 << 12))
    world = World(layout, 1 << 17, control=Failures)
    write, last = message_headers.Envelope.write, len(world.plan.buckets) - 1
    assert last > 0

    def write_another_weight(self: message_headers.Envelope, number: int, weight: float) -> None:
        header = self.header(number)
        is_later = header.round == 0 and (header.bucket == last or header.piece > 0)
        write(self, number, weight + is_later)

    monkeypatch.setattr(message_headers.Envelope, "write", write_another_weight)

    def one_backward(rank: int, reducer: HierarchicalReducer) -> None:
        with pytest.raises(MismatchError, match="got another message from rank"):
            for param in (2, 1, 0):
                reducer.mark_ready(param)
            reducer.finish(BackwardStatus(1), False)

    world.run(one_backward)


@pytest.mark.parametrize("element", [0, 2000, 20_000, -1])  # of several buckets and owners
@pytest.mark.parametrize("values_bytes", VALUES_BYTES)
def test_an_overflow_in_any_bucket_is_reported_at_the_end_of_the_backward(
    element: int, values_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that receives a mean from its owner has not seen the sum."""
    monkeypatch.setattr(routes, "VALUES_BYTES", values_bytes)
    world = World([[0], [1]], 1 << 14)
    assert len(world.plan.buckets) > 3

    def train(rank: int, reducer: HierarchicalReducer) -> Any:
        results = []
        for value in (3e38, 1.0):  # finite on each rank
            for param in (2, 1, 0):
                place = place_of(reducer, world.plan, param)
                place[:] = 1.0
                if param == 1:
                    place[element] = value
                reducer.mark_ready(param)
            reducer.finish(BackwardStatus(1), False)
            results.append((reducer.last.nonfinite, reducer.last.overflowed))
        return results

    assert world.run(train) == [[([], [1]), ([], [])]] * 2


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=3) | st.sampled_from([[1, 1], [1, 1, 1]]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_all_ranks_receive_the_report_of_each_one(sizes: list[int], random: Any, is_exact: bool) -> None:
    """Unused parameters and gradients that are not finite, of ranks with and without a shard."""
    order = list(range(sum(sizes)))
    random.shuffle(order)
    hosts = sorted(sorted(order.pop() for _ in range(size)) for size in sizes)
    world = World(hosts, 1 << 14, is_exact=is_exact)
    unused = {rank: random.choice([[], [0], [2], [0, 2]]) for rank in range(world.size)}
    guilty = random.randrange(world.size)

    def train(rank: int, reducer: HierarchicalReducer) -> Any:
        for param in (2, 1, 0):
            if param in unused[rank]:
                continue
            place = place_of(reducer, world.plan, param)
            place[:] = 1.0
            if param == 1 and rank == guilty:
                place[30_000] = np.nan
            reducer.mark_ready(param)
        reducer.finish(BackwardStatus(1), True)
        return [reducer.last.unused[each] for each in range(world.size)], reducer.last.nonfinite

    with mock.patch.object(routes, "VALUES_BYTES", random.choice([1, 1 << 20])):
        results = world.run(train)
    for found, nonfinite in results:
        assert found == [unused[rank] for rank in range(world.size)]
        assert nonfinite == [(guilty, 1)]
