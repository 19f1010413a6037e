"""Ends and delays: close, forked children, Ctrl-C, ranks that are slow, late or gone."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import time
import warnings

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import paceline
from paceline.errors import ConfigError, DeadlineError, ForkedError, GroupClosedError, PeerLostError
from paceline.stacks import ask
from tests.harness import ranks, run_ranks
from tests.multiprocess.other_ranks import BARRIER, interrupt, until_calling


def init(rank, world_size, name="own", **options):
    """A group beside that of the harness."""
    return paceline.init(
        rank=rank, world_size=world_size, job_id=os.environ["PACELINE_JOB_ID"], name=name, **options
    )


@ranks(2)
def test_a_closed_group_says_so(group):
    assert repr(group) == f"<paceline.Group 'world': rank {group.rank} of 2, open>"
    with group.subgroup([0, 1]) as inner:
        array = inner.allocate(3)
        inner.barrier()
    inner.close()
    assert "closed" in repr(inner)
    for call in (
        lambda: inner.barrier(),
        lambda: inner.all_reduce(array),
        lambda: inner.allocate(3),
        lambda: inner.send(array, 1 - inner.rank),
        lambda: inner.recv(array, 1 - inner.rank),
        lambda: inner.subgroup([0, 1]),
    ):
        with pytest.raises(GroupClosedError):
            call()


@ranks(1)
def test_one_rank_needs_nobody(group):
    array = np.arange(5.0)
    group.all_reduce(array, "mean", weight=3.0)
    group.broadcast(array)
    group.barrier()
    assert_array_equal(array, np.arange(5.0))
    assert_array_equal(group.all_to_all(array[None])[0], array)
    assert group.subgroup([0]).world_size == 1
    alone = paceline.init(rank=0, world_size=1)
    alone.barrier()
    with pytest.raises(ConfigError, match="another rank than this one"):
        alone.send(array, 0)


def in_forked_child(check):
    """Exit status of a forked child that runs `check`; 77: it raised something else than it should."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        try:
            check()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@ranks(2)
def test_a_forked_child_is_refused_and_the_parent_unharmed(group):
    array = np.ones(3)
    reducer = paceline._core.Reducer(group._core, 64, [0], [16], [0], [(0, 64)])
    transfer = group.recv(np.zeros(1), 1 - group.rank, async_op=True)

    def misuse():
        for call in (
            lambda: group.barrier(),
            lambda: group.all_reduce(array),
            lambda: group.all_reduce(array, async_op=True),
            lambda: group.send(array, 1 - group.rank),
            lambda: group.allocate(4),
            lambda: transfer.wait(),
            lambda: group._core.records(),
            lambda: reducer.mark_ready(0, 0),
            lambda: reducer.finish(1, False),
            lambda: reducer.squared_norm(),
        ):
            with pytest.raises(ForkedError, match="forked child"):
                call()
        reducer.close()
        group._core.set_activity("nothing")
        group._core.abort("nothing")
        group.close()

    assert in_forked_child(misuse) == 0
    # Another thread of the parent is in the middle of a call.
    pending = group.all_reduce(array, async_op=True) if group.rank == 0 else None

    def misuse_while_pending():
        for call in (lambda: group.barrier(), lambda: group.allocate(4), lambda: group.all_gather(array)):
            with pytest.raises(ForkedError):
                call()

    assert in_forked_child(misuse_while_pending) == 0
    if pending is not None:
        pending.wait()
    else:
        group.all_reduce(array)
    assert_array_equal(array, 2)
    reducer.mark_ready(0, 0)
    assert reducer.finish(1, False).outcome == 0
    group.send(array[:1], 1 - group.rank)
    transfer.wait()
    group.barrier()


@ranks(2)
def test_a_forked_child_may_form_groups_of_its_own(group):
    def form():
        with init(0, 1, name=f"child of {group.rank}") as own:
            own.barrier()

    assert in_forked_child(form) == 0
    group.barrier()


@ranks(3, group=None)
def test_ctrl_c_ends_the_wait_and_is_reported_to_the_others(rank):
    group = init(rank, 3, timeout_s=60)
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        with pytest.raises(PeerLostError, match="interrupted"):
            group.barrier()
        return
    if rank == 2:  # never calls what rank 1 waits in; but a message wakes it
        until_calling(group, 1, BARRIER)
        interrupt(group, 1, signal.SIGINT)
        with pytest.raises(PeerLostError) as caught:
            group.recv(np.zeros(1), 0)
    else:
        with pytest.raises(PeerLostError) as caught:
            group.all_reduce(np.ones(100_000))
            group.all_reduce(np.ones(3))
    assert caught.value.lost == (1,)
    assert "interrupted by a signal" in str(caught.value)


@ranks(3)
def test_a_slow_rank_is_logged_again_and_again(group):
    own = init(group.rank, 3, name="patient", timeout_s=60, warn_after_s=0.1)
    if group.rank == 2:
        own._core.set_activity("in backward of step 7")
        for peer in (0, 1, 0, 1):  # each of them has warned twice
            group.recv(np.zeros(1), peer)
        own.barrier()
        return
    told = []

    class Handler(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
            if len(told) <= 2:  # on a busy machine more come before rank 2 does
                group.send(np.zeros(1), 2)

    logging.getLogger("paceline").addHandler(Handler())
    own.barrier()
    assert told[0].startswith(f"paceline: rank {group.rank} of 3 has waited ")
    waited = [float(re.search(r"has waited ([\d.]+) s", each)[1]) for each in told]
    assert waited[0] >= 0.1 and waited[1] >= 0.3
    assert "for rank 2 in group 'patient'" in told[0]
    for each in told:
        assert "is alive; in backward of step 7" in each
        assert "the wait ends with an error in " in each


@ranks(2)
def test_words_that_are_cut_in_a_character_are_told_as_far_as_they_go(group):
    group._core.set_activity("é" * 100)  # 200 bytes, of which 127 fit
    group.barrier()
    told = group._core.records()[1 - group.rank]["activity"]
    assert told == "é" * 63 + "\ufffd"
    group.barrier()
    own = init(group.rank, 2)
    if group.rank == 0:
        own._core.abort("x" + "é" * 600)  # of 1201 bytes, 1023 fit
    group.barrier()
    if group.rank == 1:
        with pytest.raises(PeerLostError, match="xéé"):
            own.barrier()
    group.barrier()


@ranks(4)
def test_a_late_rank_is_named_on_every_rank(group):
    own = init(group.rank, 4, name="strict", timeout_s=1.0, forming_timeout_s=60)
    group.barrier()
    if group.rank == 2:
        group.barrier()  # the others come here when they have raised
    with pytest.raises(DeadlineError) as caught:
        own.all_reduce(np.ones(3))
    if group.rank != 2:
        group.barrier()
    assert caught.value.late == (2,)
    waited = re.search(r"Rank 2 of 4 did not arrive within (\d+\.\d) s", str(caught.value))
    assert waited and 1.0 <= float(waited[1]) < 30.0  # what it has waited, on a busy machine longer
    assert "last call: no call yet" in str(caught.value) or group.rank == 2
    with pytest.raises(DeadlineError):  # the group is over, and keeps saying why
        own.barrier()


@ranks(3)
def test_a_timeout_of_one_call(group):
    own = init(group.rank, 3, timeout_s=60)
    own.barrier(timeout_s=float("inf"))
    own.barrier(timeout_s=1e30)
    started = time.monotonic()
    if group.rank == 0:
        group.barrier()
    else:
        with pytest.raises(DeadlineError) as caught:
            own.all_reduce(np.ones(100_000), timeout_s=1.0)
        assert caught.value.late == (0,)
        assert 0.9 < time.monotonic() - started < 30
        group.barrier()


@ranks(2)
def test_an_exception_that_is_caught_outside_of_a_group_ends_that_group_alone(group):
    part = group.subgroup([0, 1])
    if group.rank == 0:
        with contextlib.suppress(FileNotFoundError), part:
            raise FileNotFoundError("no such shard: 17")
    else:
        with pytest.raises(PeerLostError, match="no such shard: 17"):
            part.barrier()
    total = np.ones(2)
    group.all_reduce(total)
    assert_array_equal(total, 2)


@ranks(3)
def test_a_rank_that_closes_early_has_left(group):
    own = init(group.rank, 3, timeout_s=60)
    own.barrier()
    if group.rank == 1:
        own.close()
    else:
        with pytest.raises(PeerLostError, match="Rank 1 of 3 left the group") as caught:
            own.barrier()
        assert caught.value.lost == (1,)


def leave(rank, how):
    """Rank 1 goes, in one way or another; the others tell what they learned of it."""
    group = init(rank, 3, timeout_s=60)
    group.barrier()
    if rank == 1:
        if how == "sys.exit(0) in the group":
            with group:
                sys.exit(0)
        if how == "sys.exit(0)":
            sys.exit(0)
        if how == "sys.exit(3) in the group":
            with group:
                sys.exit(3)
        if how == "raise in the group":
            with group:
                raise FileNotFoundError("no such shard: 17")
        os._exit(4)
    try:
        group.all_reduce(np.ones(3))
    except PeerLostError as error:
        return error.lost, str(error)


@pytest.mark.parametrize(
    ("how", "death", "told"),
    [
        ("sys.exit(0) in the group", SystemExit, "left the group"),
        ("sys.exit(0)", SystemExit, "left the group"),
        ("sys.exit(3) in the group", SystemExit, "SystemExit: 3"),
        ("raise in the group", FileNotFoundError, "FileNotFoundError: no such shard: 17"),
        ("os._exit(4)", 4, "died"),
    ],
)
def test_how_a_rank_goes_is_reported_to_the_others(how, death, told):
    answers = run_ranks(leave, 3, {"how": how}, group=None, dies={1: death})
    for lost, text in (answers[0], answers[2]):
        assert lost == (1,)
        assert told in text


def nest(rank):
    """Rank 0 dies of what it learned in one group; rank 2 is with it in another."""
    one = init(rank, 2, "one", timeout_s=60) if rank < 2 else None
    two = init(rank // 2, 2, "two", timeout_s=60) if rank != 1 else None
    if rank == 1:
        os._exit(5)
    if rank == 0:
        with one, two:
            one.barrier()
    try:
        two.barrier()
    except PeerLostError as error:
        return str(error)


def test_a_loss_in_one_group_is_quoted_in_the_others():
    _, _, told = run_ranks(nest, 3, group=None, dies={0: PeerLostError, 1: 5})
    assert "Rank 0 of 2 raised" in told
    assert "PeerLostError: Rank 1 of 2 died" in told


@ranks(2)
def test_a_rank_that_others_wait_for_can_be_asked_where_it_is(group):
    pids = group.all_gather(np.array([os.getpid()]))
    if group.rank == 0:
        stacks = ask(int(pids[1, 0]))
        assert "test_a_rank_that_others_wait_for_can_be_asked_where_it_is" in stacks
    group.barrier()
