"""Forked ranks that run one program after the other. Independent of the framework.

A world is a set of ranks, forked from this process, which has imported the framework and runs nothing of it.
The reference is a world of one. Each rank waits for a program on a pipe and answers with its record. After a
program that raised, the world is thrown away: a fork and new groups cost tens of milliseconds.

A rank whose program ends with an exception reports that and exits at once, as a script would; so its peers
notice. If a rank has reached the end while others still wait, it is asked to leave after `GRACE_S`; then the
world runs no further program, even if the other ranks reach the end. A rank that has not answered at the
deadline prints its stacks on request and is killed.
"""

from __future__ import annotations

import contextlib
import encodings.ascii  # with paceline's two: a group imports them when it forms, in every fork
import encodings.idna  # noqa: F401
import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import paceline.collectives.init
import paceline.rendezvous.unix_socket_exchange  # noqa: F401
from tests.differential.programs import Program
from tests.differential.records import Lost, Record
from tests.harness.rank_main import die_with

GRACE_S = 0.5
DEADLINE_S = 40.0
TAIL_CHARS = 40_000
STACKS_SIGNAL = signal.SIGRTMAX

Run = Callable[[Program, dict[str, Any]], Any]
"""Runs a program with options, in a worker."""


_lifeline: list[int] = []  # both ends of a pipe; the kernel kills the workers when this process loses its end


class Worker:
    """A forked process that answers.

    Args:
        make: Called in the child; returns the function that runs programs.
        log: The file for the child's output.
        others: Ends of pipes that the child must not hold.
    """

    def __init__(self, make: Callable[[], Run], log: Path, others: Sequence[Connection]) -> None:
        self.pipe, theirs = Pipe()
        if not _lifeline:
            _lifeline.extend(os.pipe())
        self._log = log
        self._ending = ""
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # otherwise each collection walks all of the framework's objects, and copies their pages
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                for connection in (*others, self.pipe):
                    connection.close()
                os.close(_lifeline[1])
                _follow_parent()
                status = _serve(make, theirs, log)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        theirs.close()

    def ask(self, task: object) -> None:
        """Make it run a task: the arguments of the function that `make` returned."""
        self.pipe.send_bytes(pickle.dumps(task))

    def answer(self) -> Any:
        """Wait for its answer; None: it has ended without one."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, STACKS_SIGNAL)

    def tail(self) -> str:
        """The end of its output: an error of a library, and all stacks after it."""
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-TAIL_CHARS:]
        return ""

    def end(self, *, kills: bool = True) -> str:
        """Wait until it has ended, and return how it did."""
        if not self._ending:
            self.pipe.close()
            if kills:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self._ending = _spell(status)
        return self._ending


def _follow_parent() -> None:
    """Die when the parent does; drop the lifeline, so that this process makes its own for its forks."""
    os.setsid()
    die_with(_lifeline[0])
    _lifeline.clear()


def _serve(make: Callable[[], Run], pipe: Connection, log: Path) -> int:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    run: Run | None = None
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return 0
        if task is None:
            return 0
        try:
            run = run or make()
            answer = run(*task)
        except BaseException:
            answer = Lost("failed outside of the program", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        if isinstance(answer, Lost) or getattr(answer, "raised", None) is not None:
            return 3
        gc.collect()


class World:
    """Some ranks, ready for programs.

    Args:
        make_rank: Called as make_rank(rank, world_size, job, folder) in each rank.
        world_size: Number of ranks.
        deadline_s: For each program.
    """

    def __init__(
        self, make_rank: Callable[[int, int, str, Path], Run], world_size: int, deadline_s: float
    ) -> None:
        self._deadline_s = deadline_s
        self._make_rank = make_rank
        self._world_size = world_size
        self._workers: list[Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, program: Program, options: dict[str, Any]) -> list[Record | Lost]:
        """Run a program, and return the record of every rank."""
        self._start()
        for worker in self._workers:
            worker.ask((program, options))
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        answers: list[Record | Lost | None] = [None] * self._world_size
        until = time.monotonic() + self._deadline_s
        leaves_at, has_left = None, False
        while waiting and (now := time.monotonic()) < until:
            ready = wait(list(waiting), timeout=max(0.0, min(until, leaves_at or until) - now))
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._workers[rank].answer()
                leaves_at = time.monotonic() + GRACE_S
            if not ready and leaves_at is not None and time.monotonic() >= leaves_at:
                self._send_back(answers)
                leaves_at, has_left = None, True
        self._kill_late(answers, list(waiting.values()))
        records = [answer or Lost("left without a word") for answer in answers]
        if has_left or any(isinstance(record, Lost) or record.errors() for record in records):
            self._explain(records)
            self.close()
        return records

    def close(self) -> None:
        """End all its processes."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._workers:
            return
        job = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        folder = Path(self._folder.name)
        for rank in range(self._world_size):
            make = _bound(self._make_rank, rank, self._world_size, job, folder)
            pipes = [worker.pipe for worker in self._workers]
            self._workers.append(Worker(make, folder / f"rank-{rank}.log", pipes))

    def _send_back(self, answers: list[Record | Lost | None]) -> None:
        """Make the ranks that have reached the end leave, as a script that has finished does."""
        for worker, answer in zip(self._workers, answers):
            if answer is not None:
                with contextlib.suppress(OSError):
                    worker.ask(None)

    def _kill_late(self, answers: list[Record | Lost | None], late: list[int]) -> None:
        if not late:
            return
        for rank in late:
            self._workers[rank].ask_for_stacks()
        time.sleep(0.5)  # for the stacks to be written; only a report depends on it
        for rank in late:
            answers[rank] = Lost("hung", self._workers[rank].tail())

    def _explain(self, records: list[Record | Lost]) -> None:
        for rank, record in enumerate(records):
            if isinstance(record, Lost) and record.how == "left without a word":
                worker = self._workers[rank]
                records[rank] = Lost(worker.end(kills=False), worker.tail())


def _bound(function: Callable[..., Run], *arguments: Any) -> Callable[[], Run]:
    return lambda: function(*arguments)


def _spell(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"
