"""The parent: starts the ranks, waits for them with a deadline, and judges every one of them.

Kept ranks (`kept=True`) run the programs of one test file one after the other. The costs of a process besides
its program (the fork, the pages that it copies, the framework's first-use set-up, its exit) are then paid
once. Each program has its own job, group, folder, environment and random numbers.
"""

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

# After an unexpected failure of one rank, the others have this long to notice before they count as hung.
_GRACE_S = 10.0
# The time for the processes of kept ranks to end, when no work is left.
_ENDING_S = 60.0
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
    kept: bool = False,
) -> list[Any]:
    """Run `program(group or rank, **kwargs)` in `world_size` processes; return each rank's result.

    `program` is a function of a module, or a test under `@ranks`. `warning_filters` are those of the ranks;
    None: the filters that this process has now. With `kept`, the processes are those of the latest such run
    of the same test file, and stay for the next one; `end_kept_ranks` finds leftovers that outlive them.
    Ranks of the framework "paddle.distributed" have separate processes, which stay in Paddle's group: a
    process can join it only once. The other arguments are those of `ranks`. Results are pickled; a rank that
    was to die returns None.

    Raises:
        RanksFailed: A rank raised, died, left early or hung, a rank that was to die did not, or something was
            left behind.
    """
    if "<locals>" in program.__qualname__ or "." in program.__qualname__:
        raise TypeError(
            f"{program.__qualname__} must be a function of a module: every rank imports it by name"
        )
    filters = list(warnings.filters) if warning_filters is None else warning_filters
    described = (program, world_size, dict(kwargs or {}), group, filters)
    if kept:
        if dies:
            raise TypeError(f"{program.__qualname__}: a rank that is to die is not kept")
        return _run_kept(described, framework, deadline_s)
    before = leftovers.shm_names()
    with _new_folder() as folder, _plan(*described, folder) as plan:
        run = _Run(plan, framework, dict(dies or {}), deadline_s)
        try:
            run.start()
            run.wait()
        finally:
            _kill(run.children)
        found = _left_behind(run.children, before, [folder])
        failures = run.failures()
        if failures or found:
            raise RanksFailed(plan.name, world_size, failures, found)
        return run.values()


def _run_kept(described: tuple[Any, ...], framework: str, deadline_s: float) -> list[Any]:
    program, world_size = described[:2]
    stays_joined = framework == "paddle.distributed"
    key = f"{framework} {world_size}" if stays_joined else framework.partition(".")[0]
    kept = _kept.get(key)
    if kept is None or kept.module != program.__module__:
        if any(each.module != program.__module__ for each in _kept.values()):
            end_kept_ranks()
        kept = _kept[key] = _KeptRanks(key, program.__module__)
    folder = kept.next_folder()
    earlier = list(kept.programs)
    kept.programs.append(os.environ.get("PYTEST_CURRENT_TEST", program.__name__).split("::")[-1].split()[0])
    with _plan(*described, folder, stays_joined) as plan:
        run = _Run(plan, framework, {}, deadline_s, kept.children[:world_size])
        try:
            run.start(are_kept=True)
            kept.children[:world_size] = run.children
            run.wait()
            failures = run.failures()
        except BaseException:
            kept.children[: len(run.children)] = run.children
            kept.forget()
            raise
        if failures:
            kept.forget()
            raise RanksFailed(plan.name, world_size, failures, [], earlier)
        if any(child.outcome is not None and child.outcome.is_used_up for child in run.children):
            kept.end()
        return run.values()


def end_kept_ranks() -> None:
    """End the kept ranks; their test file has ended.

    Raises:
        RanksFailed: One of them did not end as it should, or something was left behind.
    """
    while _kept:
        next(iter(_kept.values())).end()


@contextlib.contextmanager
def _new_folder() -> Iterator[Path]:
    # Short, because a Unix socket's path may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _plan(
    program: Callable[..., Any],
    world_size: int,
    kwargs: dict[str, Any],
    group: str | None,
    filters: list[Any],
    folder: Path,
    stays_joined: bool = False,
) -> Iterator[Plan]:
    temporary = folder / "tmp"
    temporary.mkdir()
    job_id = uuid.uuid4().hex
    with socket.socket() as reserved:
        # Bound but not listening: the kernel gives this port to no other process, and rank 0 may listen on
        # it.
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
        described = (program.__module__, name, world_size, group, kwargs)
        yield Plan(*described, job_id, folder, environ, filters, stays_joined)


def inherited_variables() -> dict[str, str]:
    """The variables that ranks inherit from this process: all except those of a launcher.

    pytest sets and deletes one of its own around each test, in the main thread, while runs begin in other
    threads. A name may be gone when it is read, so `os.environ.items()` would raise.
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
    lifeline: connection.Connection  # when we close it, or die, the rank is killed
    plans: connection.Connection | None = None  # of a kept rank, which receives its programs here
    pid: int = 0
    outcome: Outcome | None = None
    ended_s: float | None = None  # when its program ended; a kept rank then lives on
    hung_because: str = ""
    has_reported: bool = False  # a kept rank has reported that its program has ended

    def begin(self, plan: Plan) -> None:
        """Send a kept rank its next program."""
        assert self.plans is not None
        self.outcome, self.ended_s, self.has_reported = None, None, False
        with contextlib.suppress(OSError):  # it has died; the wait for its end notices that
            self.plans.send(plan)

    def await_end(self) -> None:
        """Wait until the process has ended, or until a kept rank has reported the end of its program."""
        if self.plans is not None and self.plans.poll():
            with contextlib.suppress(EOFError, OSError):
                self.has_reported = bool(self.plans.recv_bytes())
        if not self.has_reported:
            _reap(self.process)

    def status(self) -> int | None:
        """The exit status of the process; for a kept rank, the status it would have if it ended now."""
        if self.has_reported:
            return 1 if self.outcome is not None and self.outcome.error else 0
        with server.lock:
            return self.process.exitcode


@dataclass
class _Run:
    plan: Plan
    framework: str
    dies: dict[int, Death]
    deadline_s: float
    children: list[_Child] = field(default_factory=list)
    started_s: float = 0.0

    def start(self, *, are_kept: bool = False) -> None:
        """Start the ranks, or those that have not been kept from an earlier run."""
        with server.starting_from(self.framework.partition(".")[0]):
            self.started_s = time.monotonic()  # the import happens once, in the server, and delays no rank
            for child in self.children:
                child.begin(self.plan)
            for number in range(len(self.children), self.plan.world_size):
                self._start_rank(number, are_kept)

    def _start_rank(self, number: int, is_kept: bool) -> None:
        context = server.context()
        theirs, ours = context.Pipe(duplex=False)
        their_plans, our_plans = context.Pipe() if is_kept else (None, None)
        arguments = (self.plan, number, theirs, their_plans)
        process = context.Process(target=rank_main.main, args=arguments, daemon=False)
        child = _Child(number, process, ours, our_plans)
        process.start()
        theirs.close()
        if their_plans is not None:
            their_plans.close()
        child.pid = process.pid or 0
        self.children.append(child)

    def wait(self) -> None:
        """Wait until all ranks have ended, the deadline has passed, or the grace period after a failure is
        over."""
        limit_s = self.started_s + self.deadline_s
        because = f"after {self.deadline_s:g} s"
        while running := self._running():
            ends: dict[Any, _Child] = {child.process.sentinel: child for child in running}
            ends |= {child.plans: child for child in running if child.plans is not None}
            ready = connection.wait(list(ends), max(0.0, limit_s - time.monotonic()))
            if not ready:
                self._dump_stacks(running, because)
                return
            for child in {id(ends[end]): ends[end] for end in ready}.values():
                self._collect(child)
                grace_s = time.monotonic() + _GRACE_S
                if grace_s < limit_s and self._judge(child) is not None:
                    limit_s = grace_s
                    because = f"{_GRACE_S:g} s after rank {child.rank} had failed"

    def failures(self) -> list[Failure]:
        return [failure for child in self.children if (failure := self._judge(child)) is not None]

    def values(self) -> list[Any]:
        """The result of each rank."""
        return [child.outcome.value if child.outcome else None for child in self.children]

    def _running(self) -> list[_Child]:
        return [child for child in self.children if child.ended_s is None]

    def _collect(self, child: _Child) -> None:
        child.await_end()
        child.ended_s = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            child.outcome = pickle.loads(self.plan.outcome(child.rank).read_bytes())

    def _judge(self, child: _Child) -> Failure | None:
        """The failure of a rank that ended or hung; None if it ended as it should."""
        verdict = judge(child.status(), child.outcome, self.dies.get(child.rank), child.hung_because)
        if verdict is None:
            return None
        at_s = child.outcome.at_s if child.outcome else child.ended_s or time.monotonic()
        text = _text_of(self.plan.folder, child.rank)
        details = child.outcome.error if child.outcome else ""
        return Failure(child.rank, *verdict, at_s - self.started_s, details, text)

    def _dump_stacks(self, running: list[_Child], because: str) -> None:
        """Make the ranks that still run write their stacks into their logs."""
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


@dataclass
class _KeptRanks:
    """Ranks that run programs of one test file, one after the other."""

    key: str
    module: str
    children: list[_Child] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ranks-")))
    shm_before: frozenset[str] = field(default_factory=leftovers.shm_names)

    def next_folder(self) -> Path:
        """The TMPDIR of one program. It stays until the ranks have ended: see `end`."""
        folder = self.folder / str(len(self.programs))
        folder.mkdir()
        return folder

    def _folders(self) -> list[Path]:
        return [self.folder / str(number) for number in range(len(self.programs))]

    def end(self) -> None:
        """End the ranks; an error unless all end well, with nothing left behind."""
        for child in self.children:
            assert child.plans is not None
            child.plans.close()
        limit_s = time.monotonic() + _ENDING_S
        for child in self.children:
            _reap(child.process, max(0.0, limit_s - time.monotonic()))
        failures = [failure for child in self.children if (failure := self._judge_end(child)) is not None]
        _kill(self.children)
        found = _left_behind(self.children, self.shm_before, self._folders())
        self.forget()
        if failures or found:
            name = f"kept ranks of {self.module}, after their last program"
            raise RanksFailed(name, len(self.children), failures, found, self.programs)

    def forget(self) -> None:
        """Make the next run start new ranks; those that still run are killed."""
        _kept.pop(self.key, None)
        _kill(self.children)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _judge_end(self, child: _Child) -> Failure | None:
        with server.lock:
            status = child.process.exitcode
        hung_because = f"{_ENDING_S:g} s after it was to end" if status is None else ""
        verdict = judge(status, Outcome(0.0), None, hung_because)
        if verdict is None:
            return None
        logs = [_text_of(folder, child.rank) for folder in self._folders()]
        return Failure(child.rank, *verdict, log="".join(logs))


_kept: dict[str, _KeptRanks] = {}  # by framework, and by world size for ranks that stay joined


def _kill(children: list[_Child]) -> None:
    """Kill all ranks that still run. Idempotent."""
    for child in children:
        child.process.kill()
    for child in children:
        _reap(child.process, 10.0)
        child.lifeline.close()
        if child.plans is not None:
            child.plans.close()


def _left_behind(children: list[_Child], shm_before: frozenset[str], folders: list[Path]) -> list[str]:
    """Leftovers that outlived the ranks; called when no rank is left."""
    ranks = {child.pid: child.rank for child in children if child.pid}
    running = leftovers.left_running(ranks)
    found = [
        f"process {pid}, started by rank {ranks[pgid]}" for pgid, pids in running.items() for pid in pids
    ]
    found += [f"/dev/shm/{name}" for name in leftovers.left_in_shm(shm_before)]
    found += [f"$TMPDIR/{name}" for each in folders for name in leftovers.left_in_folder(each / "tmp")]
    return found


def _text_of(folder: Path, rank: int) -> str:
    """The rank's output in the log of a program."""
    log = folder / f"rank-{rank}.log"
    return log.read_text(errors="replace") if log.exists() else ""


def _reap(process: ForkServerProcess, timeout_s: float | None = None) -> None:
    """Wait until the process has ended, and set its status."""
    connection.wait([process.sentinel], timeout_s)
    with server.lock:
        process.join(0.0)


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
