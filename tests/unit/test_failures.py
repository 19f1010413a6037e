"""The texts of the core's errors: facts in, one exception out."""

from __future__ import annotations

import doctest
import errno
import pickle
import threading

import pytest

from paceline import errors
from paceline.collectives import failures
from paceline.collectives.failures import (
    Reason,
    describe_call,
    describe_late,
    make_error,
    number_ranks,
)
from paceline.collectives.straggler_warning import describe_stragglers


def call(kind, number=7, **details):
    return {"kind": kind, "number": number, "dtype": 0, "op": 0, "root": 0, "count": 0} | details


def rank_facts(rank, state="alive", activity="", **details):
    same = details.pop("same_call", call(9))
    return {
        "rank": rank,
        "pid": 1000 + rank,
        "state": state,
        "activity": activity,
        "call": call(1, count=10),
        "same_call": same,
        "forwards": 0,
        "waits_at": 0,
        "waits_in": "",
        "waits_for": [],
    } | details


def waiting(rank, waits_in, waits_at, **details):
    return rank_facts(rank, waits_in=waits_in, waits_at=waits_at, **details)


def facts(reason, **details):
    """Rank 1 of 4 calls all_reduce; `late` and the rest as given."""
    return {
        "reason": int(reason),
        "culprit": 2,
        "late": [2],
        "waiting": [],
        "waited_s": 1.25,
        "left_s": 1740.0,
        "message": "",
        "errno": 0,
        "thread": threading.main_thread().ident,
        "group": "world",
        "rank": 1,
        "world_size": 4,
        "call": call(1, count=1000),
        "ranks": [rank_facts(rank) for rank in range(4)],
    } | details


def without_group(reason, **details):
    """Facts that are known outside of a group: its formation, or a forked child."""
    return {
        "reason": int(reason),
        "culprit": -1,
        "late": [],
        "waited_s": 0.0,
        "message": "",
        "errno": 0,
    } | details


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (call(1, count=1000), "all_reduce(float32 x 1000, sum), call #7"),
        (call(1, count=0, dtype=5, op=4), "all_reduce(int16 x 0, product), call #7"),
        (call(5, count=3, dtype=3, op=1, root=2), "reduce(bfloat16 x 3, mean, root 2), call #7"),
        (call(4, count=3, dtype=9, op=3), "reduce_scatter(bool x 3, max), call #7"),
        (call(2, count=12, root=3), "broadcast(12 bytes, root 3), call #7"),
        (call(3, count=12), "all_gather(12 bytes), call #7"),
        (call(6, count=0), "gather(root 0), call #7"),
        (call(7, count=8, root=1), "scatter(8 bytes, root 1), call #7"),
        (call(8), "all_to_all, call #7"),
        (call(9), "barrier, call #7"),
        (call(10, count=64), "allocate(64 bytes), call #7"),
        (call(0, number=0), "no call yet"),
    ],
)
def test_a_call_as_people_write_it(described, expected):
    assert describe_call(described) == expected


@pytest.mark.parametrize(
    ("reason", "kind", "summary"),
    [
        (Reason.DIED, errors.PeerLostError, "Rank 2 of 4 died."),
        (Reason.RAISED, errors.PeerLostError, "Rank 2 of 4 raised."),
        (Reason.LEFT, errors.PeerLostError, "Rank 2 of 4 left the group while rank 1 waited for it."),
        (Reason.DEADLINE, errors.DeadlineError, "Rank 2 of 4 did not arrive within 1.2 s."),
        (Reason.MISMATCH, errors.MismatchError, "The ranks of group 'world' made different calls."),
        (Reason.CLOSED, errors.GroupClosedError, "The group is closed."),
        (Reason.FORKED, errors.ForkedError, "A group was used in a forked child."),
        (Reason.INTERRUPTED, errors.CollectiveError, "The call was interrupted by a signal."),
        (Reason.NO_MEMORY, errors.RegionError, "Rank 2 of 4 could not reserve shared memory."),
        (Reason.MISUSE, errors.ConfigError, "The core refused a call: too odd."),
        (Reason.TOO_MANY, errors.RegionError, "too odd arrays are alive, as many as a group holds."),
        (Reason.INJECTED, errors.CollectiveError, "too odd."),
        (
            Reason.NESTED,
            errors.CollectiveError,
            "A collective was called on a thread that is inside of another one.",
        ),
        (
            Reason.NO_TURN,
            errors.DeadlineError,
            "Another thread of this process was in a collective for 1.2 s, so this call could not begin.",
        ),
    ],
)
def test_every_reason_has_its_error(reason, kind, summary):
    error = make_error(facts(reason, message="too odd"))
    assert type(error) is kind
    assert error.summary == summary
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.fields) == (kind, str(error), error.fields)
    if reason is Reason.NO_TURN:  # the last call is the other thread's
        assert error.where == "rank 1 of 4, group 'world'"
        assert error.seen == "thread 'MainThread' is in all_reduce(float32 x 1000, sum), call #7"
        assert error.late == ()
    elif reason is not Reason.FORKED:
        assert error.where == "rank 1 of 4, group 'world', all_reduce(float32 x 1000, sum), call #7"


def test_every_reason_is_known():
    assert {int(reason) for reason in Reason} == set(range(1, 15))
    for reason in (Reason.CLOSED, Reason.FORKED, Reason.NO_MEMORY, Reason.MISUSE):  # possible without a group
        assert make_error(without_group(reason, message="x")).where == ""


def test_the_limit_of_another_rank_is_not_looked_for_in_this_process():
    message = "rank 2 could not reserve 4096 bytes: File too large"
    others = make_error(facts(Reason.NO_MEMORY, message=message, errno=errno.EFBIG))
    assert others.ranks == (2,)
    assert others.seen == message
    assert "what rank 2 raised" in others.hint
    own = make_error(facts(Reason.NO_MEMORY, message=message, errno=errno.EFBIG, rank=2))
    assert "`ulimit -f unlimited`" in own.hint
    machine = make_error(facts(Reason.NO_MEMORY, errno=errno.ENOSPC))
    assert "free -h" in machine.hint
    everybodys = make_error(facts(Reason.NO_MEMORY, late=[]))
    assert everybodys.summary == "Shared memory could not be reserved."
    assert everybodys.ranks == ()


def test_the_lost_and_the_late_are_fields():
    many = {"late": [0, 2, 3], "culprit": 2}
    died = make_error(facts(Reason.DIED, **many))
    assert died.lost == (0, 2, 3) and died.rank == 1
    assert died.summary == "Ranks 0, 2-3 of 4 died."
    assert "pid 1000, 1002, 1003" in died.seen
    late = make_error(facts(Reason.DEADLINE, **many))
    assert late.late == (0, 2, 3)
    assert isinstance(late, TimeoutError)
    raised = make_error(facts(Reason.RAISED, message="ValueError: 7", **many))
    assert raised.lost == (2,)  # the others are its consequence
    assert raised.seen == "ValueError: 7"


def test_the_hint_of_a_deadline_can_be_copied():
    error = make_error(facts(Reason.DEADLINE, late=[0, 2], ranks=[rank_facts(0, "missing", pid=0), *RANKS]))
    assert error.hint.startswith("`paceline stacks 1002` shows where rank 2 is; ")
    assert error.hint.endswith(
        "`timeout_s` of the wrapper or the group (or `timeout` of init_process_group) gives them longer"
    )
    gone = make_error(facts(Reason.DEADLINE, late=[0], ranks=[rank_facts(0, "missing", pid=0), *RANKS]))
    assert "PID" not in gone.hint and "paceline stacks" not in gone.hint
    no_rank = make_error(facts(Reason.DEADLINE, late=[], culprit=-1))
    assert no_rank.hint.startswith("`paceline stacks 1000` shows where rank 0 is; ")


RANKS = [rank_facts(rank) for rank in range(1, 4)]


def test_late_ranks_are_described_by_their_activity():
    ranks = [
        rank_facts(0, "missing"),
        rank_facts(1, "alive", "in backward of step 912"),
        rank_facts(2, "dead"),
        rank_facts(3, "left"),
    ]
    text = describe_late(facts(Reason.DEADLINE, late=[0, 1, 2, 3], ranks=ranks)).splitlines()
    assert text == [
        "rank 0 has not joined the group",
        "rank 1 (pid 1001) is alive; in backward of step 912",
        "rank 2 (pid 1002) is dead; last call: all_reduce(float32 x 10, sum), call #7",
        "rank 3 (pid 1003) has left; last call: all_reduce(float32 x 10, sum), call #7",
    ]


@pytest.mark.parametrize(
    ("activity", "waits_in", "is_shown"),
    [
        ("in backward of iteration 2", "backward", False),
        ("in backward of iteration 2", "", False),
        ("in backward of iteration 2", "call", True),  # SyncBatchNorm, say
        ("after backward of iteration 2", "", True),
    ],
)
def test_an_earlier_call_is_not_where_a_backward_fails(activity, waits_in, is_shown):
    own = rank_facts(1, activity=activity, waits_in=waits_in)
    ranks = [rank_facts(0), own, rank_facts(2), rank_facts(3)]
    where = make_error(facts(Reason.DIED, ranks=ranks)).where
    last = "; last call: all_reduce(float32 x 1000, sum), call #7" * is_shown
    assert where == f"rank 1 of 4, group 'world', {activity}{last}"
    where = make_error(facts(Reason.DIED, ranks=ranks, call=call(10, count=64))).where
    assert where == f"rank 1 of 4, group 'world', {activity}"


def crossed(*ranks, **details):
    """The last rank has given up on rank 0; all wait."""
    all_ranks = range(len(ranks))
    given = {"ranks": list(ranks), "waiting": list(all_ranks), "late": [0], "world_size": len(ranks)}
    return make_error(facts(Reason.DEADLINE, **(given | details)))


def test_most_of_the_ranks_that_wait_are_right():
    at_end = {"activity": "in backward of iteration 2", "forwards": 1}
    error = crossed(
        waiting(0, "backward", 2, **at_end),
        waiting(1, "call", 7, activity="in forward 2 of iteration 2", forwards=2),
        waiting(2, "backward", 2, **at_end),
    )
    assert type(error) is errors.DeadlineError
    assert error.late == (1,)
    assert error.summary == (
        "Rank 1 of 3 did not arrive within 1.2 s: it waits in another call than the others."
    )
    assert error.seen.splitlines() == [
        "rank 0 (pid 1000) waits at the end of a backward; in backward of iteration 2",
        "rank 1 (pid 1001) waits in all_reduce(float32 x 10, sum), call #7; in forward 2 of iteration 2",
        "rank 2 (pid 1002) waits at the end of a backward; in backward of iteration 2",
    ]
    assert error.expected == "the same calls in the same order on every rank"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_with_more_forwards_is_out_of_step(rank):
    at_end, too_many = waiting(0, "backward", 2, forwards=1), waiting(1, "call", 7, forwards=2)
    error = crossed(at_end, too_many, rank=rank, late=[1 - rank])
    assert (error.late, error.rank) == ((1,), rank)
    assert error.summary.endswith("it waits in another call than rank 0.")
    # A rank that has no more data makes no forwards.
    assert crossed(waiting(0, "backward", 2), waiting(1, "call", 7, forwards=2)).late == (1,)


def test_where_nothing_shows_which_rank_is_right_no_rank_is_blamed():
    for forwards in ((0, 0), (1, 1), (0, 1)):
        of_each = [{"forwards": number} for number in forwards]
        error = crossed(waiting(0, "backward", 2, **of_each[0]), waiting(1, "call", 7, **of_each[1]))
        assert error.late == ()
        assert error.summary == (
            "Ranks 0-1 of 2 wait for each other in different calls, and did not meet within 1.2 s."
        )
        assert "rank 0" in error.seen and "rank 1" in error.seen
    sides = [waiting(rank, "call", 7 + rank // 2) for rank in range(4)]
    assert crossed(*sides).late == ()


@pytest.mark.parametrize(("rank", "late"), [(0, (1,)), (1, (0,)), (2, (1,))])
def test_each_end_of_a_message_names_the_other(rank, late):
    to_0 = waiting(1, "message", 9, waits_for=[0])
    error = crossed(waiting(0, "call", 7), to_0, waiting(2, "call", 7), rank=rank)
    assert error.late == late
    assert "rank 1 (pid 1001) waits for a message from or to rank 0" in error.seen


def test_a_rank_that_does_not_wait_is_late_by_itself():
    ranks = [waiting(0, "backward", 2), waiting(1, "call", 7), rank_facts(2)]
    error = make_error(facts(Reason.DEADLINE, ranks=ranks, waiting=[0, 1], world_size=3))
    assert error.late == (2,)
    assert error.summary == "Rank 2 of 3 did not arrive within 1.2 s."


def test_a_deadline_at_which_no_rank_looks_late_blames_no_rank():
    number_ranks("host 2", (2, 3), 4)
    ranks = [waiting(0, "call", 2), rank_facts(1)]
    seen = facts(Reason.DEADLINE, ranks=ranks, late=[], waiting=[0], culprit=-1, group="host 2", rank=0)
    error = make_error(seen)
    assert isinstance(error, errors.DeadlineError)
    assert error.summary == "Rank 2 of 4 waited 1.2 s in vain; no rank is known to be late."
    assert "rank 3 (pid 1001) is alive" in error.seen
    assert error.late == ()
    warning = describe_stragglers(seen)
    assert "has waited 1.2 s for something of which no rank is known to be late in" in warning


def test_a_slow_wait_for_what_other_hosts_send_is_reported_as_such():
    number_ranks("host 3", (2,), 4)
    seen = facts(
        Reason.DEADLINE, ranks=[waiting(0, "host_sums", 2)], late=[], culprit=-1, group="host 3", rank=0
    )
    text = describe_stragglers(seen)
    assert "rank 2 of 4 has waited 1.2 s for its peers on other hosts in" in text
    assert text.endswith("the wait ends with an error in 29 min (timeout_s)")


def test_ranks_of_a_host_that_wait_have_the_numbers_of_all():
    number_ranks("host 1", (4, 6), 8)
    ranks = [waiting(0, "host_sums", 2, forwards=1), waiting(1, "message", 9, waits_for=[0])]
    error = crossed(*ranks, group="host 1", rank=0, culprit=1)
    assert (error.rank, error.late) == (4, (6,))
    assert "rank 6 (pid 1001) waits for a message from or to rank 4" in error.seen


def test_a_slow_wait_is_described_in_one_line_and_what_was_seen():
    text = describe_stragglers(facts(Reason.DEADLINE, waited_s=10.04))
    first, second, third = text.splitlines()
    assert first == (
        "rank 1 of 4 has waited 10.0 s for rank 2 in group 'world', all_reduce(float32 x 1000, sum), call #7"
    )
    assert second.startswith("rank 2 (pid 1002) is alive")
    assert third.startswith("the wait ends with an error in 29 min (timeout_s).")
    assert third.endswith("`paceline stacks 1002` shows where it is")


def test_a_mismatch_lists_each_call_once():
    ranks = [
        rank_facts(rank, same_call=call(9 if rank == 3 else 3, count=8 * (rank == 1))) for rank in range(4)
    ]
    error = make_error(facts(Reason.MISMATCH, ranks=ranks))
    assert error.seen.splitlines() == [
        "ranks 0, 2: all_gather, call #7",
        "rank 1: all_gather(8 bytes), call #7",
        "rank 3: barrier, call #7",
    ]
    assert error.rank == 1
    of_two = make_error(facts(Reason.MISMATCH, message="receive from rank 2 expected 8 bytes"))
    assert of_two.seen == "receive from rank 2 expected 8 bytes"


def test_when_a_late_rank_is_named_again_and_how_times_are_spelled():
    assert doctest.testmod(failures).failed == 0
