"""The child: one rank. Sets its process up, runs the program, and files its outcome.

A kept rank then waits for the next program.

The outcome goes through a file that is renamed when it is complete. So the parent never waits on a pipe into
which a stopped or killed rank has written half a message.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import pytest

STACKS_SIGNAL = signal.SIGRTMAX
_TESTS = str(Path(__file__).resolve().parents[1]) + os.sep


@dataclass(frozen=True)
class Plan:
    """The plan that all ranks of a run share."""

    module: str
    name: str
    world_size: int
    group: str | None
    kwargs: dict[str, Any]
    job_id: str
    folder: Path
    environ: dict[str, str]
    warning_filters: list[Any]
    stays_joined: bool = False  # in the framework's process group, once a program has joined it

    def log(self, rank: int) -> Path:
        """The rank's output, and its stacks when they were requested."""
        return self.folder / f"rank-{rank}.log"

    def outcome(self, rank: int) -> Path:
        """The rank's outcome; missing if it never got that far."""
        return self.folder / f"rank-{rank}.outcome"


@dataclass(frozen=True)
class Outcome:
    """The end of a rank's program, as the rank itself reports it."""

    at_s: float  # time.monotonic(), one clock for all processes
    value: Any = None
    error: str = ""  # the traceback; empty: the program returned
    error_type: str = ""
    is_used_up: bool = False  # no other program may follow in this process: see `use_up`


_after_test: list[Callable[[], object]] = []
_is_used_up = False
_stays_joined = False


def after_test(undo: Callable[[], object]) -> None:
    """Make this rank call `undo` after its program has ended, before the next one begins."""
    _after_test.append(undo)


def use_up(*, joined: bool = False) -> None:
    """Make this process end with this program, because the program's effects on it cannot be undone.

    With `joined`, the effect is that it joined the framework's process group: some ranks are kept in there.
    """
    global _is_used_up
    _is_used_up |= not (joined and _stays_joined)


def main(plan: Plan, rank: int, lifeline: Connection, plans: Connection | None = None) -> None:
    """Run the program of `rank`; exit status 1 if it raised.

    With `plans`, the rank is kept: it reports there that the program has ended, and receives the next plan,
    until the other end is closed.
    """
    global _stays_joined
    _stays_joined = plan.stays_joined
    die_with(lifeline.fileno())
    os.setsid()  # the parent finds leftover processes of the rank by its process group
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if plans is None:
        sys.exit(1 if _run(plan, rank).error else 0)
    restore = _random_state()
    while True:
        restore()
        _run(plan, rank, _undo)
        gc.collect()  # collect the program's cycles now, and not during the next program
        plans.send_bytes(b"ended")
        try:
            plan = plans.recv()
        except EOFError:
            sys.exit(0)


def _random_state() -> Callable[[], None]:
    """Resets the frameworks' random numbers to their present state, which is the same on all ranks."""
    of_numpy = numpy.random.get_state()
    torch, paddle = sys.modules.get("torch"), sys.modules.get("paddle")
    of_torch = torch and torch.get_rng_state()
    of_paddle = paddle and paddle.get_rng_state()

    def restore() -> None:
        numpy.random.set_state(of_numpy)
        if torch:
            torch.set_rng_state(of_torch)
        if paddle:
            paddle.set_rng_state(of_paddle)

    return restore


def _run(plan: Plan, rank: int, undo: Callable[[Plan], object] = lambda _: None) -> Outcome:
    _set_up(plan, rank)
    try:
        program = find_program(plan.module, plan.name)
        with _first_argument(plan, rank) as first:
            value = program(first, **plan.kwargs)
        undo(plan)
        outcome = Outcome(time.monotonic(), value, is_used_up=_is_used_up)
        filed = pickle.dumps(outcome)
    except BaseException as error:  # SystemExit and pytest's Skipped are failures of a rank, too
        outcome = Outcome(time.monotonic(), None, describe(error, plan.module), type(error).__name__)
        filed = pickle.dumps(outcome)
    complete = plan.outcome(rank)
    partial = complete.with_suffix(".partial")
    partial.write_bytes(filed)
    partial.rename(complete)
    return outcome


def _undo(plan: Plan) -> None:
    """Undo the program's changes to this process."""
    for value in plan.kwargs.values():
        if isinstance(value, pytest.MonkeyPatch):
            value.undo()
    while _after_test:
        _after_test.pop()()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def find_program(module: str, name: str) -> Callable[..., Any]:
    """The function that a rank runs: that of a `@ranks` test, or a plain one."""
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return getattr(found, "program", found)


def die_with(fd: int, *, is_group: bool = False) -> None:
    """Make the kernel kill this process as soon as the other end of the pipe `fd` is closed.

    With `is_group`, it kills the whole process group that this process leads.

    The parent holds the other end, and loses it however it dies. PR_SET_PDEATHSIG would follow the fork
    server instead, and a thread could not act while another one holds the interpreter lock.
    """
    # Open the pipe anew. Forks that share one open file share its owner for signals, which would be the last
    # fork.
    fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpid() if is_group else os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it was closed before O_ASYNC was set
        os.kill(os.getpid(), signal.SIGKILL)


def _set_up(plan: Plan, rank: int) -> None:
    log = os.open(plan.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(plan.environ, RANK=str(rank), LOCAL_RANK=str(rank))
    tempfile.tempdir = None
    warnings.resetwarnings()
    warnings.filters.extend(plan.warning_filters)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _first_argument(plan: Plan, rank: int) -> Iterator[Any]:
    if plan.group == "paceline":
        import paceline

        with paceline.init(rank=rank, world_size=plan.world_size, job_id=plan.job_id) as group:
            yield group
    elif plan.group is not None:
        import torch.distributed as dist

        store = f"file://{plan.folder}/store"
        dist.init_process_group(plan.group, init_method=store, rank=rank, world_size=plan.world_size)
        yield rank
        import torch

        if (
            torch.__version__ < "2.8"
        ):  # drops references to tensors of the tests; see `keep` in paceline/torch/communicator/calls.py
            time.sleep(0.1)
        dist.destroy_process_group()
    else:
        yield rank


def describe(error: BaseException, module: str) -> str:
    """The traceback, with the local variables of frames that belong to the tests.

    It replaces pytest's rewritten assertions, which exist only in the parent.
    """
    shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    ours = [frame for frame in shown.stack if frame.filename != __file__]
    shown.stack = traceback.StackSummary.from_list(ours)
    test_file = getattr(sys.modules.get(module), "__file__", None)
    for frame in shown.stack:
        if frame.locals and (frame.filename == test_file or frame.filename.startswith(_TESTS)):
            frame.locals = {name: _crop(value) for name, value in frame.locals.items()}
        else:
            frame.locals = None
    cause = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    while cause is not None:
        for frame in cause.stack:
            frame.locals = None
        cause = cause.__cause__ or cause.__context__
    return "".join(shown.format()).rstrip()


def _crop(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text)} characters)"
