"""Runs one test of torch's on two ranks, which are forks of a process that has imported the tests.

The parent runs no thread and calls no function of torch, so that a rank starts in milliseconds. It polls all
ranks in turn, and ends those of a test whose time is over, or of which one has failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.incumbents import stand_ins

GRACE_S = 15.0
"""How long the other rank may continue after one has failed."""


@dataclass(frozen=True)
class Outcome:
    """The result of a test.

    Attributes:
        kind: "passes", "skips" itself, or "stops".
        seen: The reason for the skip; or, for each rank that stopped, its traceback, or how it ended.
        seconds: How long it took.
    """

    kind: str
    seen: str
    seconds: float

    @property
    def last_words(self) -> str:
        """The last line of the first traceback."""
        found = re.findall(r"^(\w[\w.]*(?:Error|Exception|Warning)\b.*|rank \d.*)$", self.seen, re.MULTILINE)
        return found[0] if found else self.seen.strip()[-200:]


@dataclass
class _Rank:
    pid: int
    messages: Connection  # torch's code sends the traceback
    text: str = ""
    status: int | None = None


@dataclass
class _Run:
    """A test under way."""

    name: str
    folder: Path
    ranks: list[_Rank]
    deadline_s: float
    began_s: float = field(default_factory=time.monotonic)
    limit_s: float = 0.0

    def __post_init__(self) -> None:
        self.limit_s = self.began_s + self.deadline_s

    def look(self) -> bool:
        """End ranks whose time is over; return whether all have ended."""
        now = time.monotonic()
        for number, rank in enumerate(self.ranks):
            self._listen(rank)
            if rank.status is None:
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    rank.status = os.waitstatus_to_exitcode(status)
                elif now > self.limit_s:
                    os.killpg(rank.pid, signal.SIGKILL)
                    os.waitpid(rank.pid, 0)
                    rank.status = -signal.SIGKILL
                    if now > self.began_s + self.deadline_s:
                        rank.text += f"\nrank {number} was still running after {self.deadline_s:g} s"
                if rank.status is not None:
                    self._listen(rank)
                    with contextlib.suppress(ProcessLookupError):  # its children
                        os.killpg(rank.pid, signal.SIGKILL)
        if any(rank.status not in (None, 0) for rank in self.ranks):
            self.limit_s = min(self.limit_s, now + GRACE_S)
        return all(rank.status is not None for rank in self.ranks)

    def _listen(self, rank: _Rank) -> None:
        with contextlib.suppress(EOFError, OSError):
            while rank.messages.poll():
                rank.text += str(rank.messages.recv())

    def outcome(self, skips: dict[int, str]) -> Outcome:
        statuses = [rank.status or 0 for rank in self.ranks]
        seconds = time.monotonic() - self.began_s
        if not any(statuses):
            return Outcome("passes", "", seconds)
        # Killed, in a skipped test: it had not reached the skip long after the other one had gone.
        if statuses[0] in skips and all(status in skips or status == -signal.SIGKILL for status in statuses):
            said = re.search(
                r"for following reason: (.*)", (self.folder / "log.0").read_text(errors="replace")
            )
            return Outcome("skips", said[1] if said else skips[statuses[0]], seconds)
        seen = []
        for number, rank in enumerate(self.ranks):
            log = (self.folder / f"log.{number}").read_text(errors="replace")
            if rank.text:
                seen.append(rank.text)
            elif rank.status not in (0, -signal.SIGKILL):
                seen.append(f"{log[-3000:]}\nrank {number} ended with status {rank.status}")
        return Outcome("stops", "\n".join(seen), seconds)


def run_all(
    tests: type[Any], names: Sequence[str], prepare: Callable[[], None], *, deadline_s: float, jobs: int
) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each test, as it ends.

    Args:
        tests: torch's test class.
        names: Of its methods.
        prepare: Called in each rank, before its test.
        deadline_s: Most seconds of one test; then its ranks are killed.
        jobs: How many tests run at a time.
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    waiting, running = list(names)[::-1], list[_Run]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(tests, waiting.pop(), prepare, deadline_s))
            for run in list(running):
                if run.look():
                    running.remove(run)
                    outcome = run.outcome(skips)
                    shutil.rmtree(run.folder, ignore_errors=True)
                    yield run.name, outcome
            time.sleep(0.01)
    finally:
        for run in running:
            for rank in run.ranks:
                if rank.status is None:
                    os.killpg(rank.pid, signal.SIGKILL)
                    os.waitpid(rank.pid, 0)
            shutil.rmtree(run.folder, ignore_errors=True)


def _start(tests: type[Any], name: str, prepare: Callable[[], None], deadline_s: float) -> _Run:
    folder = Path(tempfile.mkdtemp(prefix="incumbents-"))
    for each in ("barrier", "test_dir", "init_dir"):
        (folder / each).mkdir()
    sys.stdout.flush()
    ranks = []
    for number in range(stand_ins.WORLD_SIZE):
        theirs, ours = Pipe()
        pid = os.fork()
        if not pid:
            _be_rank(tests, name, number, folder, ours, prepare)
        with contextlib.suppress(PermissionError):  # the rank has done it itself, or does
            os.setpgid(pid, pid)
        ours.close()
        ranks.append(_Rank(pid, theirs))
    return _Run(name, folder, ranks, deadline_s)


def _be_rank(
    tests: type[Any], name: str, rank: int, folder: Path, pipe: Connection, prepare: Callable[[], None]
) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / f"log.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {"TEMP_DIR": str(folder), "TMPDIR": str(folder), "RANK": str(rank)}
        tempfile.tempdir = str(folder)
        sys.modules[stand_ins.TESTS].INIT_METHOD = f"file://{folder / 'init_dir' / 'again'}"  # type: ignore[attr-defined]
        logging.basicConfig(level=logging.INFO, format="%(message)s")  # torch's base class has a reason
        warnings.simplefilter("default")  # as torch's tests are run
        torch.set_num_threads(1)
        prepare()
        tests._run(rank, name, str(folder / "init_dir" / "store"), pipe)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        with contextlib.suppress(Exception):
            pipe.send(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
