"""A rank is lost at each point of a sharded optimizer's step.

The others have a whole step, none, or an error on every use of a partial one. A partial step is never silent.
"""

from __future__ import annotations

import importlib.util
import signal

import pytest

from tests.fault import step_programs as programs
from tests.fault.cases import Case, run_cases
from tests.fault.faults import Action, Fault, Point, kill, raise_error, stop
from tests.fault.test_lost_ranks import check_survivors

# The points that a step of shared parameters passes: the point, its passage, and the remaining step.
SHARED = [
    (Point.CALL_BEGIN, 1, "none"),  # the barrier before
    (Point.BEFORE_ARRIVE, 1, "none"),
    (Point.STEP_MET, 1, "none or half"),  # the others may leave the barrier before or after they notice
    (Point.STEP_BEGUN, 1, "half"),
    (Point.BLOCK_WRITTEN, 1, "half"),  # in the middle of its shard
    (Point.STEP_WRITTEN, 1, "half"),  # all is written, and no rank knows
    (Point.STEP_DONE, 1, "whole"),
    (Point.CALL_BEGIN, 2, "whole"),  # the barrier after
    (Point.BEFORE_ARRIVE, 2, "whole"),
]
OWN = [
    (Point.CALL_BEGIN, 1, "none"),
    (Point.BEFORE_ARRIVE, 1, "none"),
    (Point.BLOCK_WRITTEN, 1, "half"),
    (Point.BEFORE_ARRIVE, 2, "half"),  # no rank receives its writes
]
PROGRAMS = {
    "torch": ((programs.torch_shared, SHARED), (programs.torch_own, OWN)),
    "paddle": ((programs.paddle_shared, SHARED), (programs.paddle_own, OWN)),
}
FRAMEWORKS = pytest.mark.parametrize(
    "framework",
    [
        "torch",
        pytest.param(
            "paddle",
            marks=pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="no PaddlePaddle"),
        ),
    ],
)


def found(text: str) -> str:
    return text.rpartition("found: ")[2].split()[0]


def check_found(case, seen, left_over, expected):
    """All survivors have found the same, and the expected result."""
    (one,) = {found(seen[rank].text) for rank in left_over}
    assert one in expected.split(" or "), f"{case}: {one}, {seen}"


@FRAMEWORKS
@pytest.mark.parametrize("is_shared", [True, False])
def test_killed(framework, is_shared):
    program, ways = PROGRAMS[framework][not is_shared]
    cases = [Case(program, (kill(rank=1, at=at, nth=nth),)) for at, nth, _ in ways]
    for (_, _, left), case, seen in zip(ways, cases, run_cases(cases, framework=framework)):
        assert seen[1].status == -signal.SIGKILL, f"{case}: did not strike, {seen}"
        check_survivors(case, seen, "PeerLostError", [1])
        check_found(case, seen, (0, 2), left)


@FRAMEWORKS
def test_raised(framework):
    """An exception in the middle: the others raise without waiting for the deadline."""
    program, ways = PROGRAMS[framework][0]
    cases = [Case(program, (raise_error(rank=1, at=at, nth=nth),)) for at, nth, _ in ways[2:7]]
    for (_, _, left), case, seen in zip(ways[2:7], cases, run_cases(cases, framework=framework)):
        check_survivors(case, seen, "PeerLostError", [1])
        assert "injected fault at" in seen[1].text and "injected fault at" in seen[0].text, f"{case}: {seen}"
        check_found(case, seen, (0, 1, 2), left)


@FRAMEWORKS
def test_stopped(framework):
    program, ways = PROGRAMS[framework][0]
    ways = [ways[number] for number in (1, 4, 6)]
    cases = [Case(program, (stop(rank=2, at=at, nth=nth),), timeout_s=2.0) for at, nth, _ in ways]
    for (_, _, left), case, seen in zip(ways, cases, run_cases(cases, at_once=3, framework=framework)):
        assert seen[2].kind == "stopped", f"{case}: did not strike, {seen}"
        check_survivors(case, seen, "DeadlineError", [2])
        check_found(case, seen, (0, 1), left)


@FRAMEWORKS
def test_two_at_once(framework):
    """One of three ranks is left, with the whole step or with the knowledge that it has half of one."""
    program, _ = PROGRAMS[framework][0]
    cases = [
        Case(program, (kill(rank=0, at=first), kill(rank=2, at=second)))
        for first, second in (
            (Point.STEP_DONE, Point.STEP_DONE),
            (Point.STEP_DONE, Point.BLOCK_WRITTEN),
            (Point.STEP_MET, Point.BEFORE_ARRIVE),
        )
    ]
    lefts = ({"whole"}, {"half"}, {"none"})
    for case, left, seen in zip(cases, lefts, run_cases(cases, framework=framework)):
        assert seen[1].kind == "PeerLostError" and set(seen[1].ranks) <= {0, 2}, f"{case}: {seen}"
        assert found(seen[1].text) in left, f"{case}: {seen}"


# With a journal, survivors complete the step.
JOURNALED = [
    (Point.CALL_BEGIN, 1, "none"),
    (Point.BEFORE_ARRIVE, 1, "none"),
    (Point.STEP_MET, 1, "none or whole"),
    (Point.STEP_BEGUN, 1, "whole"),
    (Point.BLOCK_COPIED, 1, "whole"),
    (Point.BLOCK_OPENED, 1, "whole"),
    (Point.BLOCK_OPENED, 3, "whole"),
    (Point.BLOCK_WRITTEN, 1, "whole"),  # in the middle of a block
    (Point.BLOCK_WRITTEN, 3, "whole"),  # at its end
    (Point.BLOCK_WRITTEN, 5, "whole"),
    (Point.BLOCK_CLOSED, 3, "whole"),
    (Point.BLOCK_CLOSED, 6, "whole"),
    (Point.STEP_WRITTEN, 1, "whole"),
    (Point.STEP_DONE, 1, "whole"),
    (Point.BEFORE_ARRIVE, 2, "whole"),
]


JOURNALED_PROGRAMS = {"torch": programs.torch_journaled, "paddle": programs.paddle_journaled}
SURVIVING_PROGRAMS = {"torch": programs.torch_surviving, "paddle": programs.paddle_surviving}
# In the first step the optimizer is tried out on small tensors, and passes some points.
TRIED = {"torch": 24, "paddle": 22}


@FRAMEWORKS
@pytest.mark.parametrize("step", [0, 1], ids=["first", "later"])
def test_killed_with_a_journal(framework, step):
    """The survivors' parameters and state have the bits of an undisturbed run."""
    ways = [way for way in JOURNALED if step or way[0] not in (Point.CALL_BEGIN, Point.BEFORE_ARRIVE)]
    tried = {} if step else dict.fromkeys((Point.BLOCK_WRITTEN, Point.BLOCK_CLOSED), TRIED[framework])
    cases = [
        Case(JOURNALED_PROGRAMS[framework], (kill(number % 3, at, step, nth + tried.get(at, 0)),))
        for number, (at, nth, _) in enumerate(ways)
    ]
    for (_, _, left), case, seen in zip(ways, cases, run_cases(cases, at_once=4, framework=framework)):
        victim = case.faults[0].rank
        assert seen[victim].status == -signal.SIGKILL, f"{case}: did not strike, {seen}"
        check_survivors(case, seen, "PeerLostError", [victim])
        check_found(case, seen, {0, 1, 2} - {victim}, left)


@FRAMEWORKS
def test_killed_while_it_makes_the_part_of_another(framework):
    """The second of two survivors continues where the first was killed."""
    cases = [
        Case(
            JOURNALED_PROGRAMS[framework], (kill(rank=0, at=Point.BLOCK_OPENED), kill(rank=2, at=at, nth=nth))
        )
        for at, nth in ((Point.STEP_WRITTEN, 2), (Point.BLOCK_OPENED, 5), (Point.BLOCK_CLOSED, 14))
    ]
    for case, seen in zip(cases, run_cases(cases, framework=framework)):
        assert seen[1].kind == "PeerLostError" and set(seen[1].ranks) <= {0, 2}, f"{case}: {seen}"
        assert found(seen[1].text) == "whole", f"{case}: {seen}"


@FRAMEWORKS
def test_raised_with_a_journal(framework):
    cases = [
        Case(JOURNALED_PROGRAMS[framework], (raise_error(rank=1, at=at, nth=nth),))
        for at, nth in ((Point.STEP_BEGUN, 1), (Point.BLOCK_OPENED, 2), (Point.BLOCK_WRITTEN, 2))
    ]
    for case, seen in zip(cases, run_cases(cases, framework=framework)):
        check_survivors(case, seen, "PeerLostError", [1])
        check_found(case, seen, (0, 2), "whole")


def test_killed_after_the_model_was_wrapped_anew():
    """The journal and the notes on the step are in the present memory of the parameters."""
    cases = [
        Case(programs.torch_rewrapped, (kill(rank=rank, at=at, step=2),))
        for rank, at in ((1, Point.STEP_BEGUN), (0, Point.BLOCK_OPENED), (2, Point.STEP_DONE))
    ]
    for case, seen in zip(cases, run_cases(cases)):
        victim = case.faults[0].rank
        check_survivors(case, seen, "PeerLostError", [victim])
        check_found(case, seen, {0, 1, 2} - {victim}, "whole")


@FRAMEWORKS
def test_those_that_are_left_train_on(framework):
    """In a new group, with the state of the rank that was killed."""
    cases = [
        Case(SURVIVING_PROGRAMS[framework], (kill(rank=rank, at=at, step=2, nth=2),))
        for rank, at in ((0, Point.BLOCK_OPENED), (2, Point.BLOCK_WRITTEN))
    ]
    for case, seen in zip(cases, run_cases(cases, framework=framework)):
        for rank in {0, 1, 2} - {case.faults[0].rank}:
            assert seen[rank].text == "found: well, after all", f"{case}: {seen}"


def test_each_point_of_a_step_is_struck():
    names = [point for point in Point if point.name.startswith(("STEP_", "BLOCK_"))]
    assert set(names) <= {at for at, _, _ in (*SHARED, *JOURNALED)}
    assert str(Fault(1, Action.KILL, Point.STEP_MET)) == "kill rank 1 at step_met"
