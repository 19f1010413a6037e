"""The format of sums in messages between hosts, and the errors of encoding them; no processes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from paceline.reducer.between_hosts.compressed_sums import ENCODINGS, CodedSums
from paceline.reducer.between_hosts.routes import plan_route
from paceline.reducer.plan import ParameterSpec, Plan, plan_buckets

SIZES = (700, 33_000, 5, 2000)


def plan_of(cap_bytes: int, order: tuple[int, ...] | None = None, dtype: str = "float32") -> Plan:
    itemsize = {"float32": 4, "float64": 8}[dtype]
    specs = [ParameterSpec(f"p{i}", numel, dtype, itemsize, "cpu") for i, numel in enumerate(SIZES)]
    return plan_buckets(specs, bucket_cap_bytes=cap_bytes, first_bucket_bytes=cap_bytes, order=order)


def sums_of(
    kind: str,
    plan: Plan,
    place: int = 0,
    num_ranks: int = 1,
    num_hosts: int = 2,
    host_sizes: tuple[int, ...] | None = None,
) -> CodedSums:
    itemsizes = [plan.sections[bucket.section].itemsize for bucket in plan.buckets]
    counts = [bucket.nbytes // itemsize for bucket, itemsize in zip(plan.buckets, itemsizes)]
    routes = [plan_route(n, size, place, num_ranks, num_hosts) for n, size in zip(counts, itemsizes)]
    return CodedSums(ENCODINGS[kind], plan, routes, itemsizes, 0, host_sizes or (num_ranks,) * num_hosts)


def values_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def send(sums: CodedSums, phase: int, bucket: int, piece: range, values: np.ndarray, weight: float):
    """The received values."""
    message = np.full(sums.nbytes(bucket, len(piece)) + 2, 0x5A, np.uint8)
    payload = message.ctypes.data
    values_at(sums.room(phase, bucket, payload), len(piece))[:] = values
    sums.write(phase, bucket, piece, payload, weight)
    assert (message[-2:] == 0x5A).all()
    return values_at(sums.read(bucket, len(piece), payload, weight, 1), len(piece)).copy()


@pytest.mark.parametrize("kind", list(ENCODINGS))
def test_what_arrives_and_what_is_kept_are_the_sums(kind):
    plan = plan_of(1 << 20)
    sums = sums_of(kind, plan)
    count = plan.buckets[0].nbytes // 4
    pieces, rng = [range(1000), range(1000, count)], np.random.default_rng(0)
    arrived, exact = np.zeros(count), np.zeros(count)
    for weight in (1.0, 3.0, 0.5):
        values = rng.standard_normal(count).astype(np.float32)
        for piece in pieces:
            here = slice(piece.start, piece.stop)
            arrived[here] += send(sums, 0, 0, piece, values[here] * weight, weight) / weight
        sums.adopt(())
        exact += values
    kept = np.concatenate([sums.error_of(index) for index in reversed(range(len(SIZES)))])
    assert np.abs(kept).max() > 0
    flat = np.concatenate(
        [np.zeros(0)]
        + [
            (exact - arrived)[(plan.offsets[i] - plan.sections[0].begin_byte) // 4 :][: SIZES[i]]
            for i in reversed(range(len(SIZES)))
        ]
    )
    assert_allclose(kept, flat, atol=1e-5)


def test_a_host_without_weight_counts_nothing_and_keeps_its_error():
    plan = plan_of(1 << 20)
    sums = sums_of("int8", plan)
    piece = range(500)
    send(sums, 0, 0, piece, np.linspace(0, 1, 500), 1.0)
    sums.adopt(())
    before = [sums.error_of(index) for index in range(len(SIZES))]
    assert_array_equal(send(sums, 0, 0, piece, np.full(500, np.nan), 0.0), np.zeros(500))
    sums.adopt(())
    for index, error in enumerate(before):
        assert_array_equal(sums.error_of(index), error)


def test_the_smallest_weights_give_means_all_the_same():
    sums = sums_of("bf16", plan_of(1 << 20))
    for weight in (1e-35, 1e30):
        found = send(sums, 0, 0, range(16), np.full(16, 3.0 * weight), weight) / np.float64(weight)
        assert_allclose(found, 3.0, rtol=1e-2)


def test_float64_goes_as_it_is():
    plan = plan_of(1 << 20, dtype="float64")
    sums = sums_of("int8", plan)
    assert sums.nbytes(0, 100) == 800
    assert sums.room(0, 0, 4711) == 4711 == sums.read(0, 100, 4711, 2.0, 1)


@pytest.mark.parametrize("host_sizes", [(1, 1, 1), (4, 2, 2), (1, 3, 2)])
def test_an_error_of_the_sums_of_all_hosts_keeps_its_size_on_hosts_of_any_sizes(host_sizes):
    """The weight of this host's error in the mean of all equals the weight of its own mean."""
    rng, plan = np.random.default_rng(2), plan_of(1 << 20)
    sums = sums_of("topk", plan, num_hosts=3, host_sizes=host_sizes)
    route = plan_route(plan.buckets[0].nbytes // 4, 4, 0, 1, 3)
    wanted = np.zeros(plan.buckets[0].nbytes // 4)
    weight = host_sizes[0] / sum(host_sizes)  # of this host in the mean of all
    part = route.part_of(0)
    for phase, pieces in enumerate(([p for part in route.parts for p in part], part)):
        for piece in pieces:
            values = rng.standard_normal(len(piece)).astype(np.float32)
            missing = values - send(sums, phase, 0, piece, values, 1.0)
            wanted[piece.start : piece.stop] += missing * (1 if phase else weight)
    sums.adopt(())
    assert part and np.abs(wanted).max() > 0
    section = plan.sections[plan.buckets[0].section]
    for index, numel in enumerate(SIZES):
        first = (plan.offsets[index] - section.begin_byte) // 4
        expected = wanted[first : first + numel]
        np.testing.assert_allclose(weight * sums.error_of(index), expected, rtol=1e-5, atol=1e-6)


class HostOfTwo:
    """The memory of a host: adds the other rank's values of the same parameter."""

    def __init__(self, other: CodedSums) -> None:
        self._other, self._index = other, 0

    def all_reduce(self, pointer: int, count: int, dtype: int, op: int) -> None:
        values_at(pointer, count)[:] += self._other.error_of(self._index)
        self._index += 1


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_errors_go_to_the_ranks_that_send_the_values_now(num_hosts):
    rng = np.random.default_rng(1)
    old = [sums_of("topk", plan_of(1 << 20), place, 2, num_hosts) for place in range(2)]
    wanted = [np.zeros(numel, np.float32) for numel in SIZES]
    for sums in old:
        for unused in ((), (1,)):  # values that are set aside move, too
            for phase in range(1 if num_hosts == 2 else 2):
                route = sums._routes[0]
                pieces = route.part_of(0) if phase else [p for part in route.parts for p in part]
                for piece in pieces:
                    send(sums, phase, 0, piece, rng.standard_normal(len(piece)).astype(np.float32), 1.0)
            before = sums.error_of(1)
            sums.adopt((index, range(SIZES[index])) for index in unused)
            assert np.array_equal(before, sums.error_of(1)) == bool(unused)
    for index in range(len(SIZES)):
        wanted[index] = old[0].error_of(index) + old[1].error_of(index)
    new = [sums_of("topk", plan_of(20_000, (2, 0, 3, 1)), place, 2, num_hosts) for place in range(2)]
    assert len(new[0]._routes) > 3
    for place in range(2):
        new[place].take_over(old[place], HostOfTwo(old[1 - place]))
    for index in range(len(SIZES)):
        first, second = (sums.error_of(index) for sums in new)
        assert not (first * second).any()  # each value has one sender
        assert_array_equal(first + second, wanted[index])


def test_a_rank_without_a_shard_takes_part_when_errors_move():
    old = sums_of("topk", plan_of(1 << 20))
    send(old, 0, 0, range(700), np.linspace(-1, 1, 700).astype(np.float32), 1.0)
    old.adopt(())
    plan = plan_of(20_000)
    itemsizes = [4] * len(plan.buckets)
    none = CodedSums(ENCODINGS["topk"], plan, [], itemsizes, 0, (2, 1))
    none.take_over(CodedSums(ENCODINGS["topk"], plan, [], itemsizes, 0, (2, 1)), HostOfTwo(old))
    assert not any(none.error_of(index).any() for index in range(len(SIZES)))
    new = sums_of("topk", plan)
    new.take_over(old, HostOfTwo(none))
    for index in range(len(SIZES)):
        assert_array_equal(new.error_of(index), old.error_of(index))
    assert any(new.error_of(index).any() for index in range(len(SIZES)))
