"""Ends of groups, and delays: close, forked children, Ctrl-C, and slow, late or lost ranks."""

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
    """Makes a group in addition to that of the harness."""
    return paceline.init(
        rank=rank, world_size=world_size, job_id=os.environ["PACELINE_JOB_ID"], name=name, **options
    )


@ranks(2)
def test_a_closed_group_refuses_calls(group):
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
def test_a_single_rank_needs_no_other(group):
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
    """Runs `check` in a forked child. Returns its exit status; 77: it raised an unexpected exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn about forks with threads
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
    if rank == 2:  # it never joins the barrier, but its recv() ends, too
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
        for peer in (0, 1, 0, 1):  # wait until each peer has warned twice
            group.recv(np.zeros(1), peer)
        own.barrier()
        return
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            if len(messages) <= 2:  # on a busy machine, more warnings come before rank 2 joins
                group.send(np.zeros(1), 2)

    logging.getLogger("paceline").addHandler(Handler())
    own.barrier()
    assert messages[0].startswith(f"paceline: rank {group.rank} of 3 has waited ")
    waited = [float(re.search(r"has waited ([\d.]+) s", each)[1]) for each in messages]
    assert waited[0] >= 0.1 and waited[1] >= 0.3
    assert "for rank 2 in group 'patient'" in messages[0]
    for each in messages:
        assert "is alive; in backward of step 7" in each
        assert "the wait ends with an error in " in each


@ranks(2)
def test_text_cut_within_a_character_is_reported_up_to_that_character(group):
    group._core.set_activity("é" * 100)  # 200 bytes, of which 127 fit
    group.barrier()
    activity = group._core.records()[1 - group.rank]["activity"]
    assert activity == "é" * 63 + "\ufffd"
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
        group.barrier()  # waits until the other ranks have raised
    with pytest.raises(DeadlineError) as caught:
        own.all_reduce(np.ones(3))
    if group.rank != 2:
        group.barrier()
    assert caught.value.late == (2,)
    waited = re.search(r"Rank 2 of 4 did not arrive within (\d+\.\d) s", str(caught.value))
    assert waited and 1.0 <= float(waited[1]) < 30.0  # the time waited, which is longer on a busy machine
    assert "last call: no call yet" in str(caught.value) or group.rank == 2
    with pytest.raises(DeadlineError):  # the group has failed, and repeats its error
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
def test_an_exception_caught_outside_of_a_group_ends_only_that_group(group):
    inner = group.subgroup([0, 1])
    if group.rank == 0:
        with contextlib.suppress(FileNotFoundError), inner:
            raise FileNotFoundError("no such shard: 17")
    else:
        with pytest.raises(PeerLostError, match="no such shard: 17"):
            inner.barrier()
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
    """Rank 1 exits as `how` says; the other ranks return the lost ranks and the text of their error."""
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
    ("how", "death", "expected"),
    [
        ("sys.exit(0) in the group", SystemExit, "left the group"),
        ("sys.exit(0)", SystemExit, "left the group"),
        ("sys.exit(3) in the group", SystemExit, "SystemExit: 3"),
        ("raise in the group", FileNotFoundError, "FileNotFoundError: no such shard: 17"),
        ("os._exit(4)", 4, "died"),
    ],
)
def test_how_a_rank_exits_is_reported_to_the_others(how, death, expected):
    results = run_ranks(leave, 3, {"how": how}, group=None, dies={1: death})
    for lost, text in (results[0], results[2]):
        assert lost == (1,)
        assert expected in text


def nest(rank):
    """Rank 1 exits, rank 0 raises in its group with rank 1, and rank 2 waits in another group with rank 0."""
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
    _, _, text = run_ranks(nest, 3, group=None, dies={0: PeerLostError, 1: 5})
    assert "Rank 0 of 2 raised" in text
    assert "PeerLostError: Rank 1 of 2 died" in text


@ranks(2)
def test_a_rank_that_others_wait_for_can_be_asked_where_it_is(group):
    pids = group.all_gather(np.array([os.getpid()]))
    if group.rank == 0:
        stacks = ask(int(pids[1, 0]))
        assert "test_a_rank_that_others_wait_for_can_be_asked_where_it_is" in stacks
    group.barrier()
