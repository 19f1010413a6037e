"""The parent: starts the ranks, waits for them with a deadline, and judges every one of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.harness import leftovers, rank_main, server
from tests.harness.rank_main import STACKS_SIGNAL, Outcome, Plan
from tests.harness.report import Failure, RanksFailed
from tests.harness.verdict import Death, judge

# When a rank failed unexpectedly, the others get this long to notice before they count as hung.
_GRACE_S = 10.0
_LAUNCHER_PREFIXES = ("PADDLE_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")


def run_ranks(
    program: Callable[..., Any],
    world_size: int,
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: str | None = "paceline",
    framework: str = "torch",
    dies: Mapping[int, Death] | None = None,
    deadline_s: float = 120.0,
    warning_filters: list[Any] | None = None,
) -> list[Any]:
    """Run `program(group or rank, **kwargs)` in `world_size` processes; return what each rank returned.

    `program` is a function of a module, or a test under `@ranks`. `warning_filters` are those of the ranks;
    None: the filters that this process has now. The other arguments are those of `ranks`. What a rank returns
    is pickled; a rank that was to die returns None.

    Raises:
        RanksFailed: Some rank raised, died, left early or hung, a rank that was to die did not, or
            something was left behind.
    """
    if "<locals>" in program.__qualname__ or "." in program.__qualname__:
        raise TypeError(
            f"{program.__qualname__} must be a function of a module: every rank imports it by name"
        )
    before = leftovers.shm_names()
    filters = list(warnings.filters) if warning_filters is None else warning_filters
    with _plan(program, world_size, dict(kwargs or {}), group, filters) as plan:
        run = _Run(plan, framework, dict(dies or {}), deadline_s)
        try:
            run.start()
            run.wait()
        finally:
            run.kill()
        found = run.left_behind(before)
        failures = run.failures()
        if failures or found:
            raise RanksFailed(plan.name, world_size, failures, found)
        return [ended.outcome.value if ended.outcome else None for ended in run.children]


@contextlib.contextmanager
def _plan(
    program: Callable[..., Any],
    world_size: int,
    kwargs: dict[str, Any],
    group: str | None,
    filters: list[Any],
) -> Iterator[Plan]:
    # Short, because a Unix socket's path ends at 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    job_id = uuid.uuid4().hex
    with socket.socket() as reserved:
        # Bound but not listening: nobody is given this port by chance, and rank 0 may listen on it.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        environ = inherited_variables() | server.ONE_THREAD
        environ |= {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reserved.getsockname()[1]),
            "PACELINE_JOB_ID": job_id,
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(temporary),
        }
        name = program.__name__
        try:
            yield Plan(program.__module__, name, world_size, group, kwargs, job_id, folder, environ, filters)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def inherited_variables() -> dict[str, str]:
    """The variables that ranks get from here: all but those of a launcher.

    pytest sets and deletes one of its own around each test, in the main thread, while runs begin in others:
    a name may be gone when it is read, so `os.environ.items()` would raise.
    """
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {
        name: value
        for name, value in found.items()
        if value is not None and not name.startswith(_LAUNCHER_PREFIXES)
    }


@dataclass
class _Child:
    """One rank, seen from the parent."""

    rank: int
    process: ForkServerProcess
    lifeline: connection.Connection  # closed, by us or by our death: the rank is killed
    pid: int = 0
    outcome: Outcome | None = None
    ended_s: float | None = None
    hung_because: str = ""


@dataclass
class _Run:
    plan: Plan
    framework: str
    dies: dict[int, Death]
    deadline_s: float
    children: list[_Child] = field(default_factory=list)
    started_s: float = 0.0

    def start(self) -> None:
        with server.starting_from(self.framework):
            self.started_s = time.monotonic()  # importing it once, in the server, is nobody's delay
            for number in range(self.plan.world_size):
                self._start_rank(number)

    def _start_rank(self, number: int) -> None:
        context = server.context()
        theirs, ours = context.Pipe(duplex=False)
        process = context.Process(target=rank_main.main, args=(self.plan, number, theirs), daemon=False)
        child = _Child(number, process, ours)
        process.start()
        theirs.close()
        child.pid = process.pid or 0
        self.children.append(child)

    def wait(self) -> None:
        """Until every rank ended, or the deadline passed, or a failed rank's peers had their grace."""
        limit_s = self.started_s + self.deadline_s
        because = f"after {self.deadline_s:g} s"
        while running := self._running():
            sentinels = {child.process.sentinel: child for child in running}
            ready = connection.wait(list(sentinels), max(0.0, limit_s - time.monotonic()))
            if not ready:
                self._dump_stacks(running, because)
                return
            for sentinel in ready:
                child = sentinels[sentinel]  # type: ignore[index]
                self._collect(child)
                grace_s = time.monotonic() + _GRACE_S
                if grace_s < limit_s and self._judge(child) is not None:
                    limit_s = grace_s
                    because = f"{_GRACE_S:g} s after rank {child.rank} had failed"

    def kill(self) -> None:
        """End whatever still runs. Idempotent."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            _reap(child.process, 10.0)
            child.lifeline.close()

    def failures(self) -> list[Failure]:
        return [failure for child in self.children if (failure := self._judge(child)) is not None]

    def left_behind(self, shm_before: frozenset[str]) -> list[str]:
        """What outlived the ranks; called when none of them is left."""
        ranks = {child.pid: child.rank for child in self.children if child.pid}
        running = leftovers.left_running(ranks)
        found = [
            f"process {pid}, started by rank {ranks[pgid]}" for pgid, pids in running.items() for pid in pids
        ]
        found += [f"/dev/shm/{name}" for name in leftovers.left_in_shm(shm_before)]
        found += [f"$TMPDIR/{name}" for name in leftovers.left_in_folder(self.plan.folder / "tmp")]
        return found

    def _running(self) -> list[_Child]:
        return [child for child in self.children if child.ended_s is None]

    def _collect(self, child: _Child) -> None:
        _reap(child.process)
        child.ended_s = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            child.outcome = pickle.loads(self.plan.outcome(child.rank).read_bytes())

    def _judge(self, child: _Child) -> Failure | None:
        """The failure of a rank that ended or hung, None if it did what it should."""
        with server.lock:
            status = child.process.exitcode
        verdict = judge(status, child.outcome, self.dies.get(child.rank), child.hung_because)
        if verdict is None:
            return None
        at_s = child.outcome.at_s if child.outcome else child.ended_s or time.monotonic()
        log = self.plan.log(child.rank)
        text = log.read_text(errors="replace") if log.exists() else ""
        details = child.outcome.error if child.outcome else ""
        return Failure(child.rank, *verdict, at_s - self.started_s, details, text)

    def _dump_stacks(self, running: list[_Child], because: str) -> None:
        """Have the ranks that still run write their stacks into their logs."""
        asked = {}
        for child in running:
            state = _process_state(child.pid)
            child.hung_because = f"{because}, stopped by a signal" if state in "Tt" else because
            if state not in "TtZX":
                asked[child.rank] = self._log_bytes(child.rank)
                os.kill(child.pid, STACKS_SIGNAL)
        until = time.monotonic() + 5.0
        before: dict[int, int] = {}
        while time.monotonic() < until:
            time.sleep(0.1)
            now = {number: self._log_bytes(number) for number in asked}
            if now == before and all(now[number] > asked[number] for number in asked):
                return
            before = now

    def _log_bytes(self, number: int) -> int:
        log = self.plan.log(number)
        return log.stat().st_size if log.exists() else 0


def _reap(process: ForkServerProcess, timeout_s: float | None = None) -> None:
    """Wait until the process has ended, and learn how."""
    connection.wait([process.sentinel], timeout_s)
    with server.lock:
        process.join(0.0)


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
