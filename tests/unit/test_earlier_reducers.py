"""What is known of all backward passes of a model, whose reducers come and go."""

from __future__ import annotations

from types import SimpleNamespace

from paceline.reducer.backward.earlier_reducers import EarlierReducers


def reducer(scale: int) -> SimpleNamespace:
    """One of two ranks whose figures are multiples of a number."""
    return SimpleNamespace(
        waited_s=1.0 * scale,
        waited_for_ns=[0, 10 * scale],
        arrivals=(scale, (1 * scale, 2 * scale), (0, scale), (0, 5 * scale)),
        squared_norm=lambda: 4.0 * scale,
        nonfinite=lambda: [(1, scale)],
    )


def test_without_a_change_of_the_plan_all_is_what_the_reducer_says():
    earlier, now = EarlierReducers(2), reducer(3)
    assert earlier.waited_s(now) == 3.0
    assert earlier.waited_for_ns(now) == [0, 30]
    assert tuple(earlier.arrivals(now)) == (3, [3, 6], [0, 3], [0, 15])
    assert (earlier.squared_norm(now), earlier.nonfinite(now)) == (12.0, [(1, 3)])


def test_what_adds_up_is_added_up():
    earlier = EarlierReducers(2)
    earlier.add(reducer(1))
    earlier.add(reducer(10))
    now = reducer(100)
    assert earlier.waited_s(now) == 111.0
    assert earlier.waited_for_ns(now) == [0, 1110]
    assert tuple(earlier.arrivals(now)) == (111, [111, 222], [0, 111], [0, 555])


def test_the_last_backward_counts_until_the_next_one_ends():
    earlier, before, now = EarlierReducers(2), reducer(1), reducer(100)
    earlier.add(before)
    assert (earlier.squared_norm(now), earlier.nonfinite(now)) == (4.0, [(1, 1)])
    earlier.last_backward = None
    assert (earlier.squared_norm(now), earlier.nonfinite(now)) == (400.0, [(1, 100)])
