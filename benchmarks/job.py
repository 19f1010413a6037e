"""Runs the processes of one case: starts them, sends them one command at a time, and ends them.

Commands and answers are JSON lines over a Unix socket in a private directory, so the same worker runs under
any launcher (plain processes here, `mpirun` for Open MPI). An exception, a crash or a hang of a rank raises a
`CaseFailed` here with the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.launch.topology import read_machine

START_LIMIT_S = 180.0
# A worker ends itself at the limit. If it has not, this process ends it this much later.
GRACE_S = 5.0
ROOT = Path(__file__).resolve().parents[1]


class CaseFailed(Exception):
    """A case can't be measured (any further); the message gives the reason in one line."""


@dataclass(frozen=True)
class Launch:
    """How the processes of a job are started.

    Attributes:
        prefix: The command before `python`, such as `mpirun -n 2`; empty: one plain process per rank.
        environment: Environment variables of the processes, added to those of this process.
        cores: The cores of each rank, by rank; empty: the ranks are not bound.
        python: The interpreter, which may have another version of Paceline installed.
    """

    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[frozenset[int], ...] = ()
    python: str = field(default_factory=lambda: sys.executable)


class _Channel:
    """The connection to one worker, which carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""

    def send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message. Raises EOFError if the worker is gone, TimeoutError after `deadline`."""
        while b"\n" not in self._pending:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                piece = self._socket.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError
            self._pending += piece
        line, self._pending = self._pending.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Job:
    """The processes of one case, one per rank, each with one object whose methods are called.

    Args:
        name: Name of the case.
        target: `module:class` of the object; each rank creates one with `rank`, `world_size`, `options`.
        world_size: Number of ranks.
        launch: How to start the processes.
        options: Further keyword arguments of the object; must be serializable as JSON.

    Example:
        with Job("Gloo", "benchmarks.workers.all_reduce:Gloo", 2) as job:
            job.call("prepare", nbytes=1024)
            seconds_by_rank = job.call("time", iterations=100)
    """

    def __init__(
        self,
        name: str,
        target: str,
        world_size: int,
        launch: Launch | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.pids: list[int] = []
        self._target = target
        self._launch = launch or Launch()
        self._options = dict(options or {})
        self._directory = tempfile.TemporaryDirectory(prefix="paceline-benchmark-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[_Channel] = []
        self._why_over = ""
        self._end_themselves_at_s = math.inf  # when workers still in the last command end themselves

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, limit_s: float = START_LIMIT_S) -> None:
        """Start the processes and create the object on each rank. Raises CaseFailed."""
        deadline = time.monotonic() + limit_s
        path = os.path.join(self._directory.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(self.world_size)
            self._start_processes(path)
            self._accept(listener, deadline)
        self.call("", limit_s=deadline - time.monotonic(), target=self._target, options=self._options)

    def call(self, method: str, *, limit_s: float = 60.0, **arguments: Any) -> list[Any]:
        """Call a method of the object on every rank at once and return the results by rank.

        Raises:
            CaseFailed: A rank raised, died, or took longer than `limit_s`; the error is the first one.
        """
        self.send(method, limit_s=limit_s, **arguments)
        answers = self.collect(limit_s)
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            first = min(failed, key=lambda answer: float(answer["moment_s"]))
            why = f"rank {answers.index(first)} {first['error']}"
            # The ranks may be in any state now, so no later measurement would be fair.
            raise self._give_up(why)
        return [answer["result"] for answer in answers]

    def send(self, method: str, *, limit_s: float = 60.0, **arguments: Any) -> None:
        """Send every rank a command without waiting; a `collect` must follow."""
        if self._why_over:
            raise CaseFailed(self._why_over)
        command = {"method": method, "arguments": arguments, "limit_s": limit_s}
        self._end_themselves_at_s = time.monotonic() + limit_s  # or later, if this process is slow
        for channel in self._channels:
            with contextlib.suppress(OSError):  # collect() reports a dead rank
                channel.send(command)

    def collect(self, limit_s: float, patience_s: float = GRACE_S) -> list[dict[str, Any]]:
        """Return one answer per rank: `{"result": ...}`, or `{"error": ..., "moment_s": ...}`.

        The answer of a dead or silent rank is an error made here. After the first error, the other ranks have
        `patience_s` more: they wait for that rank, and its error is the one that matters.
        """
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s + GRACE_S
        while len(answers) < self.world_size:
            waiting = {self._channels[r]: r for r in range(self.world_size) if r not in answers}
            ready = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                answers.update({rank: _error(_too_long(limit_s)) for rank in waiting.values()})
            for channel in ready:
                rank = waiting[channel]
                answers[rank] = self._answer_of(rank, deadline)
                if "gone" in answers[rank] and time.monotonic() >= self._end_themselves_at_s:
                    answers[rank] = _error(_too_long(limit_s))
                if "error" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + patience_s)
        return [answers[rank] for rank in range(self.world_size)]

    def _answer_of(self, rank: int, deadline: float) -> dict[str, Any]:
        try:
            return self._channels[rank].receive(deadline)
        except EOFError:
            return {**_error(self._end_of(rank)), "gone": True}
        except TimeoutError:
            return _error("stopped in the middle of an answer")

    def kill(self, rank: int) -> float:
        """SIGKILL one rank and return the time just before, by time.monotonic()."""
        moment = time.monotonic()
        os.kill(self.pids[rank], signal.SIGKILL)
        return moment

    def close(self) -> None:
        """End the processes, by SIGKILL if they do not exit by themselves, and remove the directory."""
        self._why_over = self._why_over or "closed"
        for channel in self._channels:
            channel.close()  # the worker exits at the end of its input
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._end_processes()
        self._directory.cleanup()

    def _start_processes(self, path: str) -> None:
        worker = [self._launch.python, "-m", "benchmarks.workers", path]
        common = {
            **os.environ,
            **self._launch.environment,
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            # The same for all cases, and small enough that all ranks together fit the cores.
            "OMP_NUM_THREADS": str(max(1, read_machine().num_cores // self.world_size)),
            "PACELINE_JOB_ID": secrets.token_hex(8),
            "BENCHMARK_DIRECTORY": self._directory.name,
        }
        if self._launch.prefix:
            self._processes.append(self._popen([*self._launch.prefix, *worker], common))
            return
        for rank in range(self.world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if self._launch.cores:
                own["BENCHMARK_CORES"] = ",".join(map(str, sorted(self._launch.cores[rank])))
            self._processes.append(self._popen(worker, {**common, **own}))

    def _popen(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            # A session of its own, so that all its descendants can be ended at once.
            return subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        """Wait for all workers to connect. Raise CaseFailed if one ends before."""
        ranks: dict[int, tuple[_Channel, int]] = {}
        while len(ranks) < self.world_size:
            if select.select([listener], [], [], 0.2)[0]:
                channel = _Channel(listener.accept()[0])
                hello = channel.receive(deadline)
                ranks[hello["rank"]] = (channel, hello["pid"])
                continue
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = "a process ended at once" if ended else f"only ranks {sorted(ranks)} connected in time"
                raise self._give_up(why + self._last_words())
        self._channels = [ranks[rank][0] for rank in range(self.world_size)]
        self.pids = [ranks[rank][1] for rank in range(self.world_size)]

    @property
    def _log(self) -> Path:
        return Path(self._directory.name, "log")

    def _last_words(self) -> str:
        """The last line that the processes wrote, which is the most likely cause."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:200]})" if said else ""

    def _end_of(self, rank: int) -> str:
        if self._launch.prefix:
            return "died" + self._last_words()
        try:
            code = self._processes[rank].wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}" + self._last_words()
        return f"ended with exit code {code}" + self._last_words()

    def _give_up(self, why: str) -> CaseFailed:
        self._why_over = self._why_over or why
        self._end_processes()
        return CaseFailed(why)

    def _end_processes(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                # Its whole session, to include mpirun's own children.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _error(text: str) -> dict[str, Any]:
    return {"error": text, "moment_s": time.monotonic()}


def _too_long(limit_s: float) -> str:
    return f"took longer than {limit_s:.0f} s"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
