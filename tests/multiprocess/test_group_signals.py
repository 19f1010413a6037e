"""Signal handlers and threads during waits: their calls run if they can, and raise otherwise; none hangs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline import Group
from paceline.errors import CollectiveError, ConfigError, DeadlineError, GroupClosedError, PeerLostError
from tests.harness import ranks
from tests.multiprocess.other_ranks import (
    ALL_REDUCE,
    BARRIER,
    WAIT_S,
    interrupt,
    interrupt_sleep,
    until,
    until_calling,
)
from tests.multiprocess.reducer_world import World
from tests.multiprocess.torch_groups import needs_backend


def on_usr1(handler):
    signal.signal(signal.SIGUSR1, lambda *_: handler())


@ranks(2)
def test_a_collective_in_a_handler_runs_after_the_interrupted_one(group):
    """Like a handler that saves a checkpoint and ends with a barrier, which works with torch."""
    order = []
    if group.rank == 0:
        on_usr1(lambda: (order.append("handler"), group.barrier(), order.append("saved")))
        total = np.ones(10)
        group.all_reduce(total)
        assert_array_equal(total, 2)
        group.barrier()
        assert order == ["handler", "saved"]
        return
    until_calling(group, 0, ALL_REDUCE)
    interrupt_sleep(group, 0)
    group.all_reduce(np.ones(10))
    group.barrier()  # matches the barrier of the handler
    group.barrier()


@ranks(2)
def test_a_collective_in_a_handler_raises_if_the_interrupted_one_cannot_end(group):
    """The other rank joins the interrupted collective only after the handler has sent its message."""
    errors = []

    def handler():
        for call in (group.barrier, lambda: group.all_reduce(np.ones(3)), lambda: group.allocate(3)):
            with pytest.raises(CollectiveError, match="on a thread that is inside of another one") as caught:
                call()
            errors.append(str(caught.value))
        group.send(np.ones(1), 1)  # messages do not wait for their turn

    if group.rank == 0:
        on_usr1(handler)
        total = np.ones(10)
        group.all_reduce(total)
        assert_array_equal(total, 2)
        assert len(errors) == 3
        assert "under way: all_reduce(float64 x 10, sum)" in errors[0]
        assert "set a flag" in errors[0]
    else:
        until_calling(group, 0, ALL_REDUCE)
        interrupt(group, 0)
        group.recv(np.zeros(1), 0)
        group.all_reduce(np.ones(10))
    group.barrier()  # the group is still usable


@ranks(2, dies={0: 3})
def test_a_handler_that_exits_does_not_wait_for_the_deadline(group):
    if group.rank == 0:
        on_usr1(lambda: sys.exit(3))
        try:
            group.barrier()
        finally:
            os._exit(3)  # the harness would report the SystemExit
    until_calling(group, 0, BARRIER)
    interrupt(group, 0)
    with pytest.raises(PeerLostError, match=r"interrupted by a signal, whose handler raised SystemExit: 3"):
        group.recv(np.zeros(1), 0)


@ranks(2)
def test_collectives_in_handlers_run_during_waits_for_a_backward_or_a_message(group):
    """All ranks get the signal: one at the end of its backward, the other in the middle of it."""
    world = World(group)
    seen = []
    on_usr1(lambda: (group.barrier(), seen.append("saved")))
    group.barrier()  # both have set their handler
    if group.rank == 0:
        got = {param: world.mark(param, 0) for param in range(len(world.model))}
        assert world.reducer.finish(1, False).outcome == 0
    else:
        got = {param: world.mark(param, 0) for param in range(4)}
        interrupt(group, 0)
        signal.raise_signal(signal.SIGUSR1)  # rank 0 runs its handler, too
        got |= {param: world.mark(param, 0) for param in range(4, len(world.model))}
        assert world.reducer.finish(1, False).outcome == 0
    world.check(got, 0)
    assert seen == ["saved"]

    on_usr1(lambda: (group.barrier(), seen.append("again"), group.send(np.ones(1), 1 - group.rank)))
    group.barrier()
    if group.rank == 0:
        group.recv(np.zeros(1), 1)
    else:
        interrupt(group, 0)
        signal.raise_signal(signal.SIGUSR1)
        group.recv(np.zeros(1), 0)
    assert seen == ["saved", "again"]
    world.reducer.close()


@ranks(2)
def test_a_backward_in_a_handler_during_the_end_of_another_one_raises(group):
    world = World(group)
    errors = []

    def handler(*_):
        try:
            world.reducer.mark_ready(0, 0)
        except ConfigError:
            return  # finish() has not begun, and marking a gradient twice is a ConfigError
        except CollectiveError as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            errors.append(error)
        with pytest.raises(CollectiveError) as caught:
            world.reducer.finish(1, False)
        errors.append(caught.value)
        group.send(np.ones(1), 1)

    if group.rank == 1:
        group.recv(np.zeros(1), 0)
    got = {param: world.mark(param, 0) for param in range(len(world.model))}
    if group.rank == 0:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    assert world.reducer.finish(1, False).outcome == 0
    world.check(got, 0)
    assert all("under way: the end of a backward pass" in str(error) for error in errors)
    assert len(errors) == (2 if group.rank == 0 else 0)


@ranks(2)
def test_a_collective_in_a_handler_runs_after_the_awaited_asynchronous_one(group):
    total = np.ones(5)
    if group.rank == 0:
        on_usr1(group.barrier)
        group.all_reduce(total, async_op=True).wait()
    else:
        until_calling(group, 0, ALL_REDUCE)
        interrupt(group, 0)
        group.all_reduce(total)
        group.barrier()
    assert_array_equal(total, 2)
    group.barrier()


@needs_backend
@ranks(2, group=None)
def test_handlers_in_waits_of_the_torch_backend(rank):
    import torch
    import torch.distributed as dist

    import paceline.torch  # noqa: F401  (registers the backend)

    dist.init_process_group("paceline")
    core = dist.group.WORLD._get_backend(torch.device("cpu"))._core
    for is_asynchronous in (True, False):
        total = torch.ones(5)
        if rank == 0:
            on_usr1(dist.barrier)
            work = dist.all_reduce(total, async_op=is_asynchronous)
            if is_asynchronous:
                work.wait()
        else:
            until(lambda: core.records()[0]["call"]["kind"] == ALL_REDUCE)
            os.kill(core.records()[0]["pid"], signal.SIGUSR1)
            dist.all_reduce(total)
            dist.barrier()
        assert total.tolist() == [2.0] * 5
        dist.barrier()
    dist.destroy_process_group()


def in_thread(call):
    """Runs `call` in a thread. Returns the thread and a list that gets the error it raises."""
    raised = []

    def run():
        try:
            call()
        except CollectiveError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="the other thread")
    thread.start()
    return thread, raised


@ranks(2)
def test_a_call_that_waits_for_its_turn_has_its_own_deadline(group):
    if group.rank == 0:
        thread, raised = in_thread(group.barrier)
        until_calling(group, 0, BARRIER)
        for call in (group.barrier, lambda **kw: group.all_reduce(np.ones(3), **kw)):
            began = time.monotonic()
            with pytest.raises(DeadlineError) as caught:
                call(timeout_s=0.3)
            assert time.monotonic() - began < 30
            assert caught.value.late == ()
            assert "thread 'the other thread' is in barrier, call #" in str(caught.value)
        group.send(np.ones(1), 1)
        thread.join()
        assert not raised
    else:
        group.recv(np.zeros(1), 0)
        group.barrier()
    group.barrier()  # the calls that reached their deadline do not affect it


@ranks(2)
def test_a_synchronous_call_behind_asynchronous_ones_has_its_own_deadline(group):
    if group.rank == 0:
        work = group.all_reduce(np.ones(3), async_op=True)
        for call in (group.barrier, lambda **kw: group.allocate(3, **kw)):
            with pytest.raises(DeadlineError, match="Asynchronous calls made before") as caught:
                call(timeout_s=0.3)
            assert "all_reduce(float64 x 3, sum)" in str(caught.value)
        group.send(np.ones(1), 1)
        work.wait()
    else:
        group.recv(np.zeros(1), 0)
        group.all_reduce(np.ones(3))
    group.barrier()


def interrupt_the_barrier(_, frame):
    """Raises KeyboardInterrupt if this thread is in Group.barrier(), else leaves it to the next tick."""
    while frame is not None:
        if frame.f_code is Group.barrier.__code__:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
        frame = frame.f_back


@pytest.mark.parametrize("end", ["close", "abort", "signal"])
@ranks(2)
def test_a_call_that_waits_for_its_turn_ends_with_the_group_and_with_signals(group, end):
    """The thread whose turn it is hangs in Python (in a log handler), so it cannot end the call."""
    if group.rank == 1:
        group.recv(np.zeros(1), 0)
        if end == "abort":
            group._core.abort("rank 1 has had enough")
        return
    held, go_on = threading.Event(), threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record):
            held.set()
            go_on.wait(WAIT_S)

    logging.getLogger("paceline").addHandler(Stuck())
    impatient = group._core.with_patience(WAIT_S, 0.05)
    thread, _ = in_thread(impatient.barrier)
    assert held.wait(WAIT_S)
    if end == "close":
        group.send(np.ones(1), 1)
        threading.Timer(0.2, group._core.close).start()
        expected = GroupClosedError
    elif end == "abort":
        group.send(np.ones(1), 1)
        expected = PeerLostError
    else:
        signal.signal(signal.SIGALRM, interrupt_the_barrier)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        expected = KeyboardInterrupt
    with pytest.raises(expected):
        group.barrier()
    if end == "signal":
        group.send(np.ones(1), 1)
    go_on.set()
    thread.join()
