"""A fault on one rank, at the moment when another rank is at a certain point: see `tests/fault/pairs.py`.

Here a fixed part of the pairs runs; `make pairs` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.fault import pair_programs
from tests.fault.faults import Action, Point
from tests.fault.pair_driver import run_cases, run_pairs
from tests.fault.pair_parts import KINDS, PROGRAMS, Part, all_parts, framework_of
from tests.fault.pairs import CaseReport, Ended, Pair, Strike, has_struck, judge

_BY_NAME = {"argnames": "program", "argvalues": PROGRAMS, "ids": lambda program: program.__name__}


def sample(program):
    """Some pairs of each kind. The strides share no factor with the numbers of points and ranks."""
    chosen = []
    for number, kind in enumerate(KINDS):
        pairs = Part(program, kind).pairs()
        chosen += pairs[3 * number :: 151 if len(pairs) > 500 else 53 if len(pairs) > 100 else 7]
    return chosen


@pytest.mark.parametrize(**_BY_NAME)
def test_a_step_is_good_for_all_or_for_none(program):
    pairs = sample(program)
    found = run_pairs(pairs, framework_of(program))
    assert not found.wrong, "\n".join([f"{len(found.wrong)} of {len(pairs)}", *found.wrong])
    # Any rank may claim a chunk, so the struck rank may not reach the point; some rank does.
    assert found.unstruck <= len(pairs) // 4


# --- coverage ---


def test_every_labelled_point_is_in_the_pairs():
    assert {point for program in PROGRAMS for point in program.points} == set(Point)


def test_every_pair_of_points_is_in_the_pairs_of_one_program():
    """A step of training passes all points: each point of each rank, with each of each other rank."""
    for kind in KINDS:
        if kind == "stopped, another killed":
            continue
        strikes = [pair.strikes[0] for pair in Part(pair_programs.Training, kind).pairs()]
        found = {(strike.rank, strike.at, strike.peer, strike.peer_at) for strike in strikes}
        assert len(found) == len(strikes) == 3 * 2 * len(Point) ** 2


@pytest.mark.parametrize(**_BY_NAME)
def test_a_program_comes_by_the_points_that_it_names_and_no_others(program):
    (ended,) = run_cases([Pair(program, ())], framework_of(program))
    assert judge(Pair(program, ()), ended) == ""
    passed = {point for each in ended for point in each.first.passed}
    assert {point.name for point in passed} == {point.name for point in program.points}


def test_the_parts_are_all_programs_with_all_kinds():
    parts = all_parts()
    assert len(parts) == len(set(parts)) == len(PROGRAMS) * len(KINDS)
    assert [str(part) for part in parts[:2]] == ["Training, killed", "Training, stopped"]


# --- past findings ---


def test_a_rank_that_was_stopped_at_the_end_of_a_backward_goes_on():
    """It called a backward good which the others had given up, or wrote into their gradients."""
    programs = [program for program in PROGRAMS if Point.CHUNK_CLAIMED in program.points]
    for framework in ("numpy", "torch"):
        found = run_pairs(
            [
                Pair(program, (Strike(Action.STOP, 1, point, 0, Point.BEFORE_END),))
                for program in programs
                if framework_of(program) == framework
                for point in (Point.CHUNK_CLAIMED, Point.CHUNK_REDUCED, Point.BEFORE_END)
            ],
            framework,
        )
        assert not found.wrong, "\n".join(found.wrong)


def test_a_rank_that_was_stopped_in_a_collective_goes_on():
    """It returned a sum of arrays that the others had freed meanwhile: they had given up, and it had not."""
    found = run_pairs(
        [
            Pair(pair_programs.Training, (Strike(Action.STOP, rank, Point.BEFORE_REDUCE, peer, point),))
            for rank, peer in ((0, 1), (1, 2), (2, 0))
            for point in (Point.AFTER_REDUCE, Point.ALLOCATE)
        ],
        "numpy",
    )
    assert not found.wrong, "\n".join(found.wrong)
    assert found.unstruck == 0


# --- the judgement itself ---

_STOPPED = Pair(pair_programs.Backwards, (Strike(Action.STOP, 1, Point.CHUNK_CLAIMED, 0, Point.BEFORE_END),))
_KILLED = Pair(pair_programs.Backwards, (Strike(Action.KILL, 1, Point.CHUNK_CLAIMED),))
_HELD = Pair(pair_programs.Backwards, (Strike(Action.HOLD, 1, Point.CHUNK_CLAIMED, 0, Point.BEFORE_END),))
_LOST = CaseReport(1, "DeadlineError: ...", "a", True)


def _ended(*reports: CaseReport) -> list[Ended]:
    return [Ended(each, each) for each in reports]


def test_a_strike_says_what_it_is():
    assert str(_STOPPED) == "Backwards: stop rank 1 at chunk_claimed when rank 0 has passed before_end"
    assert str(_KILLED) == "Backwards: kill rank 1 at chunk_claimed"


def test_survivors_that_disagree_are_found():
    assert judge(_STOPPED, _ended(_LOST, _LOST, _LOST)) == ""
    assert "good steps by rank" in judge(_STOPPED, _ended(_LOST, _LOST, CaseReport(2, "", "a", True)))
    # In calls outside of a backward, one rank may have returned and another raised.
    calls = Pair(pair_programs.SmallCalls, _STOPPED.strikes)
    assert judge(calls, _ended(_LOST, _LOST, CaseReport(2, "", "a", True))) == ""
    assert "good steps by rank" in judge(calls, _ended(_LOST, _LOST, CaseReport(3, "", "a", True)))


def test_memory_that_changes_is_found():
    changed = Ended(_LOST, CaseReport(1, "DeadlineError: ...", "b", True))
    assert "memory of rank 2 changed" in judge(_STOPPED, [*_ended(_LOST, _LOST), changed])


def test_a_wrong_mean_is_found():
    wrong = CaseReport(1, "AssertionError: ...", "a", False)
    assert "AssertionError" in judge(_STOPPED, _ended(_LOST, wrong, _LOST))


def test_a_failure_without_a_fault_is_found():
    good = CaseReport(_HELD.steps, "", "a", True)
    assert judge(_HELD, _ended(good, good, good)) == ""
    assert "although no rank died" in judge(_HELD, _ended(_LOST, _LOST, _LOST))


def test_a_rank_that_hangs_is_found():
    dead = Ended(None, None, was_killed=True)
    assert judge(_KILLED, [*_ended(_LOST), dead, *_ended(_LOST)]) == ""
    assert "rank 2 ended without a word" in judge(_KILLED, [*_ended(_LOST), dead, Ended(None, None)])
    assert "rank 1 ended without a word" in judge(_STOPPED, [*_ended(_LOST), dead, *_ended(_LOST)])


def test_whether_the_faults_struck():
    struck = CaseReport(1, "", "a", True, was_struck=True)
    dead = Ended(None, None, was_killed=True)
    both = (*_STOPPED.strikes, Strike(Action.KILL, 2, Point.BEFORE_END))
    assert not has_struck(_STOPPED.strikes, _ended(_LOST, _LOST, _LOST))
    assert has_struck(_STOPPED.strikes, _ended(_LOST, struck, _LOST))
    assert not has_struck(both, _ended(_LOST, struck, _LOST))
    assert has_struck(both, [*_ended(_LOST, struck), dead])
