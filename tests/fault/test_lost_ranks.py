"""A rank dies at every labelled step of the protocol: the others raise at once, and name it."""

from __future__ import annotations

import signal

import pytest

from tests.fault import programs
from tests.fault.cases import Case, run_cases
from tests.fault.faults import (
    ARRIVAL,
    BACKWARD,
    OPTIMIZER_STEP,
    REDUCTION,
    Point,
    kill,
    raise_error,
    segfault,
    stop,
)

# The points that each program passes.
_WAYS = {
    programs.small: (*ARRIVAL, *REDUCTION),
    programs.in_region: (*ARRIVAL, *REDUCTION),
    programs.in_pieces: (*ARRIVAL, *REDUCTION, Point.COPY_OUT),
    programs.movements: (Point.COPY_OUT, Point.BEFORE_REDUCE),
    programs.messages: (Point.SEND, Point.RECEIVE),
    programs.allocations: (Point.ALLOCATE, Point.BEFORE_ARRIVE),
    programs.steps: OPTIMIZER_STEP,
    programs.backwards: BACKWARD,
    programs.void_backwards: (Point.BEFORE_END, Point.AFTER_END),
}
_PROMISED_S = 0.1  # between a death and the survivors' errors
_BOUND_S = 30.0  # the same on a busy machine; the deadline is 60


def check_survivors(case, seen, kind, victims):
    """Every rank that was not struck raised `kind`, naming exactly the victims, at about the same time."""
    survivors = [rank for rank in range(case.world_size) if rank not in victims]
    shown = f"{case}: {seen}"
    for rank in survivors:
        assert (seen[rank].status, seen[rank].kind) == (0, kind), shown
        assert set(seen[rank].ranks) == set(victims), shown
        assert seen[rank].text.startswith("Rank"), shown
    times = [seen[rank].after_s for rank in survivors]
    assert max(times) - min(times) < _BOUND_S, shown


def test_every_point_is_on_the_way_of_some_program():
    assert {point for points in _WAYS.values() for point in points} == set(Point)


@pytest.mark.parametrize("program", _WAYS, ids=lambda program: program.__name__)
def test_killed_at_every_step(program):
    # Another rank in each case: rank 0 holds the counters, and decides allocations.
    cases = [Case(program, (kill(rank=i % 3, at=point),)) for i, point in enumerate(_WAYS[program])]
    cases += [Case(program, (kill(rank=1, at=point, step=2, nth=2),)) for point in _WAYS[program][-2:]]
    for case, seen in zip(cases, run_cases(cases)):
        victim = case.faults[0].rank
        assert seen[victim].status == -signal.SIGKILL, f"{case}: did not strike, {seen}"
        check_survivors(case, seen, "PeerLostError", [victim])


def test_killed_without_futex_waitv():
    cases = [
        Case(program, (kill(rank=2, at=point),), without_waitv=True)
        for program, point in (
            (programs.small, Point.BEFORE_ARRIVE),
            (programs.messages, Point.RECEIVE),
            (programs.backwards, Point.BEFORE_END),
        )
    ]
    for case, seen in zip(cases, run_cases(cases)):
        assert seen[2].status == -signal.SIGKILL
        check_survivors(case, seen, "PeerLostError", [2])


def test_crashed():
    cases = [
        Case(programs.small, (segfault(rank=0, at=Point.BEFORE_REDUCE),)),
        Case(programs.in_region, (segfault(rank=1, at=Point.AFTER_REDUCE),)),
        Case(programs.backwards, (segfault(rank=2, at=Point.CHUNK_CLAIMED),)),
    ]
    for case, seen in zip(cases, run_cases(cases)):
        victim = case.faults[0].rank
        assert seen[victim].status == -signal.SIGSEGV
        check_survivors(case, seen, "PeerLostError", [victim])
        assert "died" in seen[(victim + 1) % 3].text


def test_raised():
    """An exception in the middle of a call: the others quote it."""
    cases = [
        Case(programs.small, (raise_error(rank=0, at=Point.AFTER_ARRIVE),)),
        Case(programs.in_pieces, (raise_error(rank=1, at=Point.COPY_OUT),)),
        Case(programs.messages, (raise_error(rank=2, at=Point.SEND),)),
        Case(programs.allocations, (raise_error(rank=0, at=Point.ALLOCATE),)),
        Case(programs.backwards, (raise_error(rank=1, at=Point.CHUNK_CLAIMED),)),
        Case(programs.void_backwards, (raise_error(rank=2, at=Point.AFTER_END),)),
    ]
    for case, seen in zip(cases, run_cases(cases)):
        fault = case.faults[0]
        quoted = f"injected fault at {fault.at.name.lower()}"
        assert seen[fault.rank].kind == "CollectiveError"
        assert quoted in seen[fault.rank].text
        check_survivors(case, seen, "PeerLostError", [fault.rank])
        assert quoted in seen[(fault.rank + 1) % 3].text


def test_stopped():
    """SIGSTOP at every kind of step: at the deadline all raise, and name the rank that is stopped."""
    ways = [
        (programs.small, Point.CALL_BEGIN),
        (programs.small, Point.AFTER_ARRIVE),
        (programs.in_region, Point.BEFORE_REDUCE),
        (programs.in_pieces, Point.AFTER_REDUCE),
        (programs.movements, Point.COPY_OUT),
        (programs.allocations, Point.ALLOCATE),
        (programs.backwards, Point.MARK_READY),
        (programs.backwards, Point.CHUNK_CLAIMED),
        (programs.backwards, Point.CHUNK_REDUCED),
        (programs.backwards, Point.BEFORE_END),
        (programs.void_backwards, Point.AFTER_END),
    ]
    cases = [
        Case(program, (stop(rank=i % 3, at=point),), timeout_s=2.0) for i, (program, point) in enumerate(ways)
    ]
    for case, seen in zip(cases, run_cases(cases, at_once=len(cases))):
        victim = case.faults[0].rank
        assert seen[victim].kind == "stopped", f"{case}: did not strike, {seen}"
        check_survivors(case, seen, "DeadlineError", [victim])
        assert "is alive" in seen[(victim + 1) % 3].text


def stopped_and_killed(program, at, victims, world_size):
    faults = tuple(stop(rank, at) for rank in victims)
    return Case(program, faults, world_size, kills_stopped=True)


def test_several_at_once():
    """All victims are named, and only they, although the survivors end soon after."""
    cases = [
        stopped_and_killed(programs.small, Point.BEFORE_ARRIVE, (1, 3), 5),
        stopped_and_killed(programs.in_region, Point.BEFORE_REDUCE, (0, 1, 2, 3), 5),
        stopped_and_killed(programs.messages, Point.SEND, (1, 2), 4),
        stopped_and_killed(programs.backwards, Point.BEFORE_END, (0, 2), 4),
    ]
    for case, seen in zip(cases, run_cases(cases)):
        victims = {fault.rank for fault in case.faults}
        assert {rank for rank, each in enumerate(seen) if each.status == -signal.SIGKILL} == victims, case
        for rank in set(range(case.world_size)) - victims:
            assert seen[rank].kind == "PeerLostError"
            # The last victim may die after a survivor has raised.
            assert seen[rank].ranks and set(seen[rank].ranks) <= victims, f"{case}: {seen}"
            assert 0 < seen[rank].after_s < _BOUND_S


def test_all_of_them():
    """Nothing is left behind; the harness checks that."""
    cases = [
        stopped_and_killed(program, at, (0, 1, 2), 3)
        for program, at in (
            (programs.small, Point.BEFORE_ARRIVE),
            (programs.in_region, Point.AFTER_REDUCE),
            (programs.messages, Point.SEND),
            (programs.allocations, Point.ALLOCATE),
            (programs.backwards, Point.AFTER_POST),
        )
    ]
    for case, seen in zip(cases, run_cases(cases)):
        assert [each.status for each in seen] == [-signal.SIGKILL] * 3, f"{case}: {seen}"


def test_a_death_is_known_within_milliseconds():
    """Also if futex_waitv is missing, and if the victim's memory takes long to tear down.

    On an idle machine 0.001 s, and 0.02 without waitv. Time in which a survivor was ready to run and had no
    core does not count; the median excludes the remaining noise.
    """
    ways = [(programs.small, False), (programs.small, True), (programs.heavy, False)]
    cases = [
        Case(program, (stop(1, Point.BEFORE_ARRIVE),), kills_stopped=True, without_waitv=without)
        for program, without in ways
        for _ in range(5)
    ]
    seen = run_cases(cases, at_once=1)
    for number, way in enumerate(ways):
        deaths = seen[5 * number : 5 * number + 5]
        delays = [max(each.after_s - each.queued_s for each in ranks) for ranks in deaths]
        assert sorted(delays)[2] < _PROMISED_S, (way, deaths)
        assert all(each.after_s < _BOUND_S for ranks in deaths for each in ranks), (way, deaths)
