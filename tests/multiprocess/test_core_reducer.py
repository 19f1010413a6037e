"""The reducer in C++, driven with numpy arrays: means, weights, outcomes, statistics, and long runs."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline import _core
from paceline.errors import ConfigError, GroupClosedError
from paceline.reducer.reducer_interface import BackwardStatus
from tests.harness import kept_ranks, run_ranks
from tests.multiprocess.reducer_world import (
    FINISHED,
    FORWARDS_DIFFER,
    GLOBALLY_UNUSED,
    MODEL,
    NONFINITE,
    NOTES_DIFFER,
    UNUSED,
    World,
    cut,
)


def run_backward(world, step, *, order=None, elsewhere=(), forwards=1, allow_unused=False):
    """Run a backward that marks the parameters of `order`. Returns the flags and the arrays of the means."""
    got = {}
    for param in range(len(world.model)) if order is None else order:
        got[param] = world.mark(param, step, param in elsewhere)
    return world.reducer.finish(forwards, allow_unused).outcome, got


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@kept_ranks("world_size")
def test_mean_of_all_gradients(group, world_size):
    for cap_bytes in (1, 100_000, 1 << 30):
        world = World(group, cap_bytes=cap_bytes)
        for step in range(4):
            elsewhere = {step, step + 2}
            flags, got = run_backward(world, step, elsewhere=elsewhere)
            assert flags == 0
            world.check(got, step)
            assert world.reducer.last.globally_unused == world.reducer.last.unused[0] == []
            assert world.reducer.last.nonfinite == []
        assert world.reducer.times.waited_ns >= 0
        world.reducer.close()


@kept_ranks(2)
def test_assigned_chunks_give_the_bits_of_claimed_ones(group):
    """In large buckets each rank reduces its own chunks; some gradients lie in the gradient buffer."""
    model = [(300_000, "float32"), (10, "float32"), (200_001, "float64")]
    claimed, assigned = (World(group, model, 1 << 30, assigns_chunks=assigns) for assigns in (False, True))
    for step in range(8):
        elsewhere = {0, 1, 2} - {(step + group.rank) % 4}
        order = [0, 1] if step == 3 and group.rank == 1 else [2, 0, 1]
        results = []
        for world in (claimed, assigned):
            world.reducer.set_weight(1.0 + step * group.rank)
            flags, got = run_backward(world, step, order=order, elsewhere=elsewhere, allow_unused=step < 6)
            assert flags == (UNUSED if step == 3 else 0)
            results.append((flags, world.reducer.squared_norm(), {p: a.tobytes() for p, a in got.items()}))
            if step != 3:
                world.check(got, step, [1.0, 1.0 + step])
        assert results[0] == results[1]
    flags, _ = run_backward(assigned, 8, order=[0, 1], elsewhere={0})
    assert flags == UNUSED
    flags, got = run_backward(assigned, 9, elsewhere={0, 2})
    assert flags == 0
    assigned.check(got, 9, [1.0, 8.0])


@kept_ranks(3)
def test_notes_that_differ_are_reported_and_change_nothing(group):
    world = World(group)
    cases = [
        ([0, 0, 0], 0),
        ([7, 7, 7], 0),
        ([7, 7, 8], NOTES_DIFFER),
        ([0, 9, 9], 0),
        ([3, 0, 1 << 31], NOTES_DIFFER),
    ]
    for step, (notes, expected) in enumerate(cases):
        world.reducer.set_note(notes[group.rank])
        flags, got = run_backward(world, step)
        assert flags == expected
        world.check(got, step)
        assert world.reducer.last.notes == notes
        assert world.reducer.waiting_ranks() == []
        group.barrier()  # or a fast rank may be in the next backward already


@kept_ranks(2)
def test_waiting_ranks_of_a_backward_that_this_rank_has_not_ended(group):
    world = World(group)
    run_backward(world, 0)
    if group.rank == 0:
        run_backward(world, 1)
    else:
        while world.reducer.waiting_ranks() != [0]:
            time.sleep(0.001)
        run_backward(world, 1)


@kept_ranks(3)
def test_weights(group):
    world = World(group)
    all_weights = ([1.0, 2.0, 1.0], [1.0, 1.0, 1.0], [0.25, 0.0, 8.0], [3.0, 3.0, 3.0])
    for step, weights in enumerate(all_weights):
        world.reducer.set_weight(weights[group.rank])
        flags, got = run_backward(world, step, elsewhere={1})
        assert flags == 0
        world.check(got, step, weights)


@kept_ranks(3)
def test_unused_parameters(group):
    """Allowed: they count as zeros. Not allowed: nothing is reduced. All ranks see the lists of all."""
    world = World(group)
    everything = list(range(len(MODEL)))
    left_out = {0: [2], 1: [], 2: [0, 2, 7]}
    order = [param for param in everything if param not in left_out[group.rank]]

    flags, got = run_backward(world, 0, order=order, elsewhere={3}, allow_unused=True)
    assert flags == UNUSED
    assert [world.reducer.last.unused[rank] for rank in range(3)] == list(left_out.values())
    assert world.reducer.last.globally_unused == []
    expected = {
        param: sum(world.gradient(r, param, 0) for r in range(3) if param not in left_out[r]) / 3
        for param in got
    }
    for param, array in got.items():
        np.testing.assert_allclose(array, expected[param], rtol=1e-6, atol=1e-7)

    for step in range(1, 5):  # void and good backwards in turn
        flags, got = run_backward(world, step, order=order if step % 2 else everything)
        assert flags == (UNUSED if step % 2 else 0)
        assert world.reducer.last.unused[2] == (left_out[2] if step % 2 else [])
        if flags == 0:
            world.check(got, step)

    flags, _ = run_backward(world, 9, order=[p for p in everything if p not in (4, 6)], allow_unused=True)
    assert flags == UNUSED
    assert world.reducer.last.globally_unused == [4, 6]
    assert_array_equal(world.views[6], 0)


@pytest.mark.parametrize("assigns", [False, True])
@kept_ranks(3)
def test_globally_unused_parameters_are_left_alone_where_that_is_allowed(group, assigns):
    """The backward is void if a rank with data uses one of them.

    It does not matter whether a rank without data marks all parameters or none.
    """
    world = World(group, assigns_chunks=assigns)
    everything = list(range(len(MODEL)))
    most = [param for param in everything if param not in (2, 5)]
    cases = [  # what each rank marks, whether rank 1 has data, the expected flags
        ([most, most, most], True, GLOBALLY_UNUSED),
        ([most, everything, most], True, UNUSED),
        ([most, everything, most], False, GLOBALLY_UNUSED | FINISHED),
        ([most, [], most], False, GLOBALLY_UNUSED | FINISHED),
        ([everything, [], most], False, UNUSED | FINISHED),
        ([everything, everything, everything], True, 0),
        ([[], [], []], True, GLOBALLY_UNUSED),
        ([most, most, everything[1:]], True, UNUSED),
        ([everything, [], everything], False, GLOBALLY_UNUSED | FINISHED),
    ]
    for step, (orders, has_data, expected) in enumerate(cases * 2):
        got = {param: world.mark(param, step, param in (2, 3)) for param in orders[group.rank]}
        status = BackwardStatus(1, finished=not has_data and group.rank == 1)
        assert world.reducer.finish(status, False, True).outcome == expected, f"backward {step}"
        assert np.isnan(world.reducer.squared_norm()) == bool(expected & UNUSED)
        active = [rank for rank in range(3) if has_data or rank != 1]
        unused = set.intersection(*(set(everything) - set(orders[rank]) for rank in active))
        assert world.reducer.last.globally_unused == sorted(unused)
        if not expected & UNUSED and (has_data or orders[1]):
            world.check({param: array for param, array in got.items() if param not in unused}, step)
        group.barrier()


@kept_ranks(3)
def test_forwards_that_differ(group):
    """Nothing is reduced, all ranks learn the counts, and the next backwards succeed."""
    world = World(group)
    for step in range(6):
        is_void = step in (0, 1, 4)
        forwards = step + 1 + (is_void and group.rank == 2)
        flags, got = run_backward(world, step, forwards=forwards, allow_unused=step % 2 == 0)
        assert flags == (FORWARDS_DIFFER if is_void else 0)
        assert [status.forwards for status in world.reducer.last.statuses] == [
            step + 1,
            step + 1,
            step + 1 + is_void,
        ]
        if not is_void:
            world.check(got, step)
    # Rank 1 ran no backward at all, and calls finish() at once.
    flags, _ = run_backward(world, 6, order=[] if group.rank == 1 else None, forwards=group.rank != 1)
    assert flags == UNUSED | FORWARDS_DIFFER
    assert world.reducer.last.unused[1] == list(range(len(MODEL)))
    flags, got = run_backward(world, 7)
    assert flags == 0
    world.check(got, 7)


@kept_ranks(3)
def test_nonfinite_gradients_are_reported_by_rank_and_parameter(group):
    world = World(group)
    bad = {0: {2: np.inf}, 1: {}, 2: {2: np.nan, 7: -np.inf}}
    for step in range(3):
        for param in range(len(MODEL)):
            if step != 1 or param not in bad[group.rank]:
                world.mark(param, step)
            else:
                world.views[param][:] = world.gradient(group.rank, param, step)
                world.views[param][-1] = bad[group.rank][param]
                world.reducer.mark_ready(param, 0)
        flags = world.reducer.finish(1, False).outcome
        assert flags == (NONFINITE if step == 1 else 0)
        assert world.reducer.last.nonfinite == ([(0, 2), (2, 2), (2, 7)] if step == 1 else [])
        if step != 1:
            assert np.isfinite(world.reducer.squared_norm())


def squared_norms(group, cap_bytes, seed):
    """The squared norms of three backwards, in which gradients get ready in a random order on each rank."""
    world = World(group, cap_bytes=cap_bytes)
    norms = []
    for step in range(3):
        order = list(range(len(MODEL)))
        random.Random(f"{seed}/{group.rank}/{step}").shuffle(order)
        flags, _ = run_backward(world, step, order=order)
        assert flags == 0
        norms.append(world.reducer.squared_norm())
        mean = sum(float((world.mean(param, step) ** 2).sum()) for param in range(len(MODEL)))
        assert norms[-1] == pytest.approx(mean, rel=1e-6)
    return norms, [view.tobytes() for view in world.views]


def all_squared_norms(group):
    runs = [
        squared_norms(group, cap_bytes, seed)
        for seed, cap_bytes in enumerate([1, 50_000, 100_000, 1 << 20, 1 << 30, 50_000])
    ]
    isas = [isa for isa in _core.ISAS.values() if _core.set_isa(isa)]
    for isa in isas:
        _core.set_isa(isa)
        runs.append(squared_norms(group, 70_000, isa))
    return runs


def test_same_bits_for_all_bucket_sizes_orders_and_instruction_sets():
    for world_size in (2, 3):
        of_ranks = run_ranks(all_squared_norms, world_size)
        first = of_ranks[0][0]
        assert all(run == first for runs in of_ranks for run in runs)


@kept_ranks(3)
def test_several_reducers_in_one_group(group):
    """Two models interleave their steps; collectives run and a third reducer opens and closes in between."""
    small = [(100, "float32"), (40_000, "float16"), (5, "float64")]
    one, two = World(group, cap_bytes=40_000), World(group, small, cap_bytes=1)
    for step in range(3):
        got_one = {param: one.mark(param, step) for param in (5, 3, 0)}
        got_two = {param: two.mark(param, step) for param in (2, 0, 1)}
        got_one |= {param: one.mark(param, step, True) for param in (7, 6, 4, 2, 1)}
        assert two.reducer.finish(1, False).outcome == 0
        assert one.reducer.finish(1, False).outcome == 0
        one.check(got_one, step)
        two.check(got_two, step)
        total = np.full(50_000, group.rank)
        group.all_reduce(total)
        assert_array_equal(total, 3)
        three = World(group, small)
        flags, got = run_backward(three, step)
        assert flags == 0
        three.check(got, step)
        three.reducer.close()


@kept_ranks(3)
def test_closing_at_once_does_not_take_the_verdict_from_the_others(group):
    """The counters live in the memory of rank 0, which may close its reducer when its backward has ended."""
    for step in range(40):
        world = World(group, [(1000, "float32")])
        if group.rank == 1:
            time.sleep(0.002)
        flags, got = run_backward(world, step, elsewhere={0})
        if group.rank == 0:
            world.reducer.close()
        assert flags == 0
        world.check(got, step)
        if group.rank != 0:
            time.sleep(0.001 * group.rank)
            norm = world.reducer.squared_norm()
            assert norm == pytest.approx(float((world.mean(0, step) ** 2).sum()), rel=1e-6)


@kept_ranks(3)
def test_long_run_with_random_order_and_delays(group):
    """300 backwards, some of them void; each rank has its own order and its own pauses."""
    own, shared = random.Random(group.rank), random.Random(77)
    world = World(group, [(count // 8, dtype) for count, dtype in MODEL], cap_bytes=4000)
    for step in range(300):
        order = list(range(len(MODEL)))
        own.shuffle(order)
        kind = shared.choice(["good"] * 8 + ["unused", "forwards"])
        if kind == "unused" and group.rank == step % 3:
            order.pop()
        got = {}
        for param in order:
            if own.random() < 0.02:
                time.sleep(own.random() * 0.003)
            got[param] = world.mark(param, step, own.random() < 0.3)
        flags = world.reducer.finish(1 + (kind == "forwards" and group.rank == 1), False).outcome
        assert flags == {"good": 0, "unused": UNUSED, "forwards": FORWARDS_DIFFER}[kind], f"backward {step}"
        if flags == 0:
            world.check(got, step)


@kept_ranks(2)
def test_misuse(group):
    world = World(group, [(10, "float32"), (20, "float32")])
    world.mark(0, 0)
    with pytest.raises(ConfigError, match="parameter 0 was marked ready twice"):
        world.mark(0, 0)
    with pytest.raises(ConfigError, match="no parameter 2"):
        world.reducer.mark_ready(2, 0)
    assert world.reducer.in_backward
    world.mark(1, 0)
    assert world.reducer.finish(1, False).outcome == 0
    world.reducer.close()
    world.reducer.close()
    with pytest.raises(GroupClosedError):
        world.reducer.mark_ready(0, 0)
    with pytest.raises(GroupClosedError):
        world.reducer.finish(1, False)

    for change, problem in (
        ({"counts": [10, 2000]}, "ends outside the gradient buffer"),
        ({"dtypes": [0, 6]}, "not of a floating type"),
        ({"buckets": [(0, 64)]}, "do not cover"),
        ({"buckets": [(0, 64), (64, 192), (192, 256)]}, "bucket 2 is empty"),
        ({"buckets": [(0, 96), (96, 192)]}, "ends within a segment of parameter 1"),
        ({"counts": [10]}, "one entry per parameter"),
        ({"offsets": [0, 32]}, "overlap"),
    ):
        plan = {
            "offsets": [0, 64],
            "counts": [10, 20],
            "dtypes": [0, 0],
            "buckets": [(0, 64), (64, 192)],
        } | change
        with pytest.raises(ConfigError, match=problem):
            _core.Reducer(group._core, 192, **plan)
    group.barrier()  # all of this was refused before anything was shared


def test_cut_covers_the_buffer():
    for cap_bytes in (1, 100_000, 1 << 30):
        buckets = cut(MODEL, cap_bytes)
        assert buckets[0][0] == 0
        assert all(one[1] == two[0] for one, two in itertools.pairwise(buckets))
