"""A signal to one rank stops all of them after the same step."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline
from paceline.collectives.group import Group
from paceline.errors import ConfigError
from tests.harness import kept_ranks, ranks
from tests.multiprocess.test_checkpointer import (
    _PATIENCE_S,
    STEPS,
    files_of,
    names_in,
    patient_ranks,
    pid_of_writer,
    settle,
    take_steps,
    warm_writer,
    warnings_of,
)
from tests.multiprocess.test_conformance import adapter
from tests.multiprocess.test_conformance_hosts import backward
from tests.multiprocess.test_training_state import begin, begin_elsewhere, frameworks
from tests.several_hosts import be_on_host

__all__ = ["warm_writer"]  # a fixture

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
stopped_ranks = functools.partial(ranks, deadline_s=2 * _PATIENCE_S)  # for processes that end in the test


@frameworks
@stopped_ranks(2, framework="framework")
def test_a_checkpointer_saves_the_step_and_exits(
    group: Group, framework: str, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    undisturbed = begin(framework, group)
    losses = undisturbed.steps(STEPS)
    run = begin(framework, group)
    with paceline.Checkpointer(tmp_path, run.ddp, every_steps=4) as checkpointer:
        assert take_steps(run, checkpointer, 4) == losses[:4]
        run.step()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step()  # not all ranks have received it yet
        with pytest.raises(SystemExit) as ended:
            take_steps(run, checkpointer, STEPS)
    assert ended.value.code == PREEMPTED
    assert names_in(tmp_path) == files_of(framework, 4, 6)
    resumed = begin_elsewhere(framework, group)
    with paceline.Checkpointer(tmp_path, resumed.ddp) as checkpointer:
        assert checkpointer.resume() == 6
        assert resumed.steps(STEPS - 6) == losses[6:]
    assert resumed.digest() == undisturbed.digest()


@frameworks
@stopped_ranks(1, framework="framework")
def test_a_single_rank_stops_after_its_step(
    group: Group, framework: str, tmp_path: Path, warm_writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_writer)
    run = begin(framework, group)
    with paceline.Checkpointer(tmp_path, run.ddp) as checkpointer:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)  # again, as schedulers do
        with pytest.raises(SystemExit) as ended:
            take_steps(run, checkpointer, 1)
    assert ended.value.code == PREEMPTED and names_in(tmp_path) == files_of(framework, 1)


@stopped_ranks(2)
def test_the_stop_ends_at_the_models_timeout_if_the_writer_hangs(group: Group, tmp_path: Path) -> None:
    run = begin("torch", group, timeout_s=6)
    checkpointer = paceline.Checkpointer(tmp_path, run.ddp)
    take_steps(run, checkpointer, 1)
    checkpointer.save()
    settle(group, checkpointer)
    if group.rank == 0:
        writer = pid_of_writer()
        os.kill(writer, signal.SIGSTOP)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    run.step()
    endings = []

    def stop() -> None:
        with pytest.raises(SystemExit) as ended:
            checkpointer.step()
        endings.append(ended.value.code)

    said = warnings_of(stop)
    assert endings == [PREEMPTED]
    assert len(said) == (group.rank == 0) and all("is still being written" in each for each in said)
    if group.rank == 0:
        os.kill(writer, signal.SIGCONT)


PATHS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "memory": ((0, 0, 0), {}),
    "group": ((0, 0, 0), {"reduce_through": "group"}),
    "hosts": ((0, 1, 1), {}),
}


@pytest.mark.parametrize("path", PATHS)
@frameworks
@ranks(3, group=None, framework="framework")
def test_a_callback_is_called_on_all_ranks_before_the_same_forward(
    rank: int, framework: str, path: str
) -> None:
    layout, options = PATHS[path]
    be_on_host(layout[rank])
    adapter(f"{framework}.distributed").join(rank, len(layout))
    do: ModuleType = adapter(framework)
    wrapped = do.wrap(do.network(), None, **options)
    made, called, users = [], [], []
    signal.signal(signal.SIGUSR1, lambda *_: users.append(rank))
    wrapped.on_preemption(lambda: called.append(len(made)))
    for step in range(8):
        if (rank, step) == (2, 4):
            os.kill(os.getpid(), signal.SIGUSR1)
        backward(do, wrapped, step, rank)
        made.append(step)
    assert called == [5]
    assert users == [2] * (rank == 2)


@kept_ranks(1)
def test_a_callback_that_cannot_be_called_is_refused(group: Group) -> None:
    with pytest.raises(ConfigError, match="on_preemption"):
        begin("torch", group).ddp.on_preemption(5)


@patient_ranks(1)
def test_the_signal_ends_forked_children(group: Group, tmp_path: Path) -> None:
    """As a pool or a loader ends its processes."""
    run = begin("torch", group)
    with paceline.Checkpointer(tmp_path, run.ddp):
        for _ in range(100):  # Python loses a signal that arrives before the child runs
            if (child := os.fork()) == 0:
                time.sleep(5.0)
                os._exit(1)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
