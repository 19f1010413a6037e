"""A fault on one rank, at the moment when another rank is at a point of its own: see `tests/fault/pairs.py`.

`make test` runs a part of the pairs, the same each time; `make pairs` runs all of them.
"""

from __future__ import annotations

import os

import pytest

from tests.fault import pair_programs
from tests.fault.faults import Action, Point
from tests.fault.pairs import Ended, Pair, Strike, Told, every_pair, every_stop_with_a_death, judge, run_pairs

_POINTS = (
    Point.MARK_READY,
    Point.BEFORE_POST,
    Point.AFTER_POST,
    Point.CHUNK_CLAIMED,
    Point.CHUNK_REDUCED,
    Point.BEFORE_END,
    Point.AFTER_END,
)
_PROGRAMS = (
    pair_programs.Passes,
    pair_programs.AssignedPasses,
    pair_programs.VoidPasses,
    pair_programs.WrappedInView,
    pair_programs.WrappedByPointer,
)
_RUNS_ALL = os.environ.get("PACELINE_ALL_PAIRS") == "1"
_PRIME = 41  # coprime to the number of points and ranks, so that the part meets each of them


def check(pairs):
    """Nothing is wrong, and most strikes happened: who claims a chunk is nobody's plan, but somebody does."""
    found = run_pairs(pairs if _RUNS_ALL else pairs[::_PRIME])
    assert not found.wrong, "\n".join([f"{len(found.wrong)} of {len(pairs)}", *found.wrong])
    assert found.unstruck <= len(pairs) // 4


@pytest.mark.parametrize("action", [Action.KILL, Action.STOP, Action.HOLD], ids=lambda a: a.name.lower())
@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_a_pass_is_good_for_all_or_for_none(program, action):
    check(every_pair(program, action, _POINTS))


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_a_pass_in_which_one_rank_stops_and_another_dies(program):
    check(every_stop_with_a_death(program, _POINTS))


# What a review found: a continued rank that called a pass good which the others had given up, or that wrote
# into their gradients.


def test_a_rank_that_was_stopped_at_the_end_of_a_pass_goes_on():
    found = run_pairs(
        [
            Pair(program, (Strike(Action.STOP, 1, point, 0, Point.BEFORE_END),))
            for program in _PROGRAMS
            for point in (Point.CHUNK_CLAIMED, Point.CHUNK_REDUCED, Point.BEFORE_END)
        ]
    )
    assert not found.wrong, "\n".join(found.wrong)


# --- the judgement itself ---

_STOPPED = Pair(pair_programs.Passes, (Strike(Action.STOP, 1, Point.CHUNK_CLAIMED, 0, Point.BEFORE_END),))
_KILLED = Pair(pair_programs.Passes, (Strike(Action.KILL, 1, Point.CHUNK_CLAIMED),))
_HELD = Pair(pair_programs.Passes, (Strike(Action.HOLD, 1, Point.CHUNK_CLAIMED, 0, Point.BEFORE_END),))
_LOST = Told(1, "DeadlineError: ...", "a", True)


def _ended(*told: Told) -> list[Ended]:
    return [Ended(each, each) for each in told]


def test_a_strike_says_what_it_is():
    assert str(_STOPPED) == "Passes: stop rank 1 at chunk_claimed when rank 0 has passed before_end"
    assert str(_KILLED) == "Passes: kill rank 1 at chunk_claimed"


def test_survivors_that_disagree_are_found():
    assert judge(_STOPPED, _ended(_LOST, _LOST, _LOST)) == ""
    assert "good passes by rank" in judge(_STOPPED, _ended(_LOST, _LOST, Told(2, "", "a", True)))


def test_gradients_that_change_are_found():
    changed = Ended(_LOST, Told(1, "DeadlineError: ...", "b", True))
    assert "gradients of rank 2 changed" in judge(_STOPPED, [*_ended(_LOST, _LOST), changed])


def test_a_wrong_mean_is_found():
    wrong = Told(1, "AssertionError: ...", "a", False)
    assert "AssertionError" in judge(_STOPPED, _ended(_LOST, wrong, _LOST))


def test_a_failure_without_a_fault_is_found():
    good = Told(_HELD.steps, "", "a", True)
    assert judge(_HELD, _ended(good, good, good)) == ""
    assert "although nobody died" in judge(_HELD, _ended(_LOST, _LOST, _LOST))


def test_a_rank_that_hangs_is_found():
    dead = Ended(None, None, was_killed=True)
    assert judge(_KILLED, [*_ended(_LOST), dead, *_ended(_LOST)]) == ""
    assert "rank 2 ended without a word" in judge(_KILLED, [*_ended(_LOST), dead, Ended(None, None)])
    assert "rank 1 ended without a word" in judge(_STOPPED, [*_ended(_LOST), dead, *_ended(_LOST)])
