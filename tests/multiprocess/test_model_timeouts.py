"""A wrapped model's `timeout_s` applies to all of its waits, on a group that waits much longer."""

from __future__ import annotations

import importlib
import logging
import re
import threading
import time

import numpy as np
import pytest

from paceline.errors import CollectiveError, DeadlineError, RendezvousError
from tests.harness import ranks
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.test_conformance import adapter

ASKED_S = 1.5
GROUPS_S = 300.0
BOUND_S = 30.0  # on a busy machine

both = pytest.mark.parametrize("framework", ["torch", "paddle"])
on_two_ranks = ranks(2, framework="framework")


def waits_in_vain(call, group):
    """Rank 0, which alone makes the call, raises DeadlineError; the other rank learns of it on the group."""
    assert group._core.timeout_s == GROUPS_S
    if group.rank == 1:
        with pytest.raises(CollectiveError):
            group.recv(np.zeros(1), 0)
        return
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        call()
    assert ASKED_S <= time.monotonic() - began < BOUND_S
    waited = re.search(r"did not arrive within (\d+\.\d) s", str(caught.value))
    assert waited and ASKED_S <= float(waited[1]) < BOUND_S  # how long it waited: longer on a busy machine
    assert caught.value.late == (1,)


@both
@on_two_ranks
def test_a_rank_that_never_wraps(group, framework):
    do = adapter(framework)
    waits_in_vain(lambda: do.wrap(do.network(), group, timeout_s=ASKED_S), group)


@both
@ranks(3, framework="framework")
def test_all_ranks_that_wrap_name_the_rank_that_never_does(group, framework):
    """Also the rank that would only wait for rank 0, which itself waits for rank 2."""
    do = adapter(framework)
    group.barrier()
    if group.rank == 2:
        with pytest.raises(CollectiveError):
            group.recv(np.zeros(1), 0)
        return
    with pytest.raises(DeadlineError) as caught:
        do.wrap(do.network(), group, timeout_s=ASKED_S)
    assert caught.value.late == (2,)


@both
@pytest.mark.parametrize("view", [False, True])
@on_two_ranks
def test_a_rank_that_skips_a_backward(group, framework, view):
    do, x = adapter(framework), batch()
    patient = do.wrap(do.network(), group, gradient_as_bucket_view=view)
    group.barrier()
    model = do.wrap(do.network(), group, timeout_s=ASKED_S, gradient_as_bucket_view=view)
    for wrapped in (model, patient):
        do.backward(do.loss(wrapped, x))
    waits_in_vain(lambda: do.backward(do.loss(model, x)), group)


@both
@on_two_ranks
def test_a_rank_that_skips_sync_buffers(group, framework):
    do, x = adapter(framework), batch()
    group.barrier()
    model = do.wrap(do.normalised(), group, timeout_s=ASKED_S, buffers={"*": "average"})
    do.backward(do.loss(model, x))

    waits_in_vain(model.sync_buffers, group)


@both
@pytest.mark.parametrize("first", [0, 1, None])
@ranks(3, framework="framework")
def test_a_rank_in_another_call_than_the_others_is_named_by_any_deadline(group, framework, first):
    """It waits for the buffers of all ranks, and they wait for it at the end of backward.

    No rank waits for its deadline, unless that is nearer than the second after which a crossing is certain.
    """
    do, x = adapter(framework), batch()
    patience_s = 0.5 if group.rank == first else GROUPS_S
    model = do.wrap(do.normalised(), group, timeout_s=patience_s, buffers={"*": "average"})
    do.backward(do.loss(model, x))
    with pytest.raises(DeadlineError) as caught:
        loss = do.loss(model, x)
        if group.rank == 1:
            model.sync_buffers()
        do.backward(loss)
    assert caught.value.late == (1,)
    assert "Rank 1 of 3 did not arrive" in str(caught.value)
    assert "it waits in another call than the others" in str(caught.value)
    for rank in (0, 2):
        assert f"rank {rank} (pid " in caught.value.seen


@both
@pytest.mark.parametrize("first", [0, 1, None])  # None: no deadline is reached
@on_two_ranks
def test_two_ranks_in_different_calls_are_not_blamed(group, framework, first):
    do, x = adapter(framework), batch()
    patience_s = 0.5 if group.rank == first else GROUPS_S
    model = do.wrap(do.normalised(), group, timeout_s=patience_s, buffers={"*": "average"})
    do.backward(do.loss(model, x))
    crossed = "Ranks 0-1 of 2 wait for each other in different calls"
    with pytest.raises(DeadlineError, match=crossed) as caught:
        loss = do.loss(model, x)
        if group.rank == 1:
            model.sync_buffers()
        do.backward(loss)
    assert caught.value.late == ()
    at_end, in_call = caught.value.seen.splitlines()
    assert at_end.startswith("rank 0 ") and "waits at the end of a backward" in at_end
    assert in_call.startswith("rank 1 ") and "; in forward of iteration 2" in in_call


@both
@on_two_ranks
def test_calls_of_several_threads_are_not_a_crossing(group, framework):
    """A rank waits in one thread at the end of backward, the other rank in a collective of another thread.

    Each thread reaches both in time, so nothing is wrong.
    """
    do, x = adapter(framework), batch()
    model = do.wrap(do.network(), group, timeout_s=60.0)
    do.backward(do.loss(model, x))

    def reduce():
        group.all_reduce(np.ones(1, np.float32), timeout_s=60.0)

    def start():
        thread = threading.Thread(target=reduce)
        thread.start()
        return thread

    start().join()  # so the group has seen both threads
    other = start() if group.rank == 1 else None
    loss = do.loss(model, x)
    if group.rank == 1:  # rank 0 is at the end of its backward meanwhile, longer than a crossing takes
        until_waiting(group, 0, 2.5)
    do.backward(loss)
    if other is None:
        other = start()
    other.join()


def until_waiting(group, rank, for_s):
    """Return when this rank has published for so long that it waits."""
    begun = None
    while begun is None or time.monotonic() - begun < for_s:
        is_waiting = group._core.records()[rank]["activity"].startswith("in backward")
        begun = (begun or time.monotonic()) if is_waiting else None
        time.sleep(0.05)


@both
@ranks(2, group=None, framework="framework")
def test_a_rank_that_never_joins_the_group(rank, framework):
    if rank == 1:
        return
    do = adapter(framework)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=f"within {ASKED_S:.1f} s") as caught:
        do.wrap(do.network(), None, timeout_s=ASKED_S)
    assert ASKED_S <= time.monotonic() - began < BOUND_S
    assert caught.value.missing == (1,)


@both
@ranks(2, group=None, framework="framework")
def test_the_group_that_a_model_formed_keeps_the_default_timeout(rank, framework):
    do, x = adapter(framework), batch()
    model = do.wrap(do.network(), None, timeout_s=20.0)
    do.backward(do.loss(model, x))
    peers = importlib.import_module(f"paceline.{framework}.communicator.find_peers")
    assert peers._environment.formed._core.timeout_s == GROUPS_S


@both
@on_two_ranks
def test_warn_after_s_belongs_to_the_model(group, framework):
    do, x, logged = adapter(framework), batch(), []
    model = do.wrap(do.network(), group, warn_after_s=0.1)
    do.backward(do.loss(model, x))
    handler = logging.Handler()

    def emit(record):
        logged.append(record.getMessage())
        if len(logged) == 1:  # the log ends the wait: only then does the other rank start its backward
            group.send(np.ones(1), 1)

    handler.emit = emit
    if group.rank == 0:
        logging.getLogger("paceline").addHandler(handler)
    else:
        group.recv(np.zeros(1), 0)
    do.backward(do.loss(model, x))
    if group.rank == 0:
        assert float(re.search(r"has waited ([\d.]+) s", logged[0])[1]) < 9  # the group's own are 10
    logging.getLogger("paceline").removeHandler(handler)
