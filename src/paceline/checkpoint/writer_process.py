"""Starts and feeds the process that writes checkpoints while training continues."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.checkpoint.snapshot import SharedMemory, copy_state

# Signals that end a job also reach the writing process. It blocks them, and ends after the training process.
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class WriterProcess:
    """Copies states, and passes them to a process that writes them to the disk.

    It starts that process with the first state, and again if it has died.

    Args:
        ops: The framework's operations.
        folder: The folder to write to.
        keep: How many checkpoints to keep.

    Attributes:
        memory: The memory to which states are copied.
        written: Steps of the newest checkpoint that is known to be whole; -1: there is none.
        failures: Why checkpoints could not be written, since the last `take_failures`.
    """

    def __init__(self, ops: CheckpointOps, folder: Path, keep: int) -> None:
        self.memory = SharedMemory()
        self.written = -1
        self.failures: list[str] = []
        self._ops, self._folder, self._keep = ops, folder, keep
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._received = b""
        self._errors: Any = None
        self._writing: int | None = None  # the steps of the checkpoint that is being written
        self._is_closed = False

    def begin(self, state: Mapping[str, Any], steps: int, also: Collection[int]) -> None:
        """Copy a state, and start writing it.

        Args:
            state: A training state.
            steps: How many steps were made.
            also: Steps of older checkpoints that must stay.
        """
        try:
            described = copy_state(state, self.memory, self._ops)
            process = self._start() if self._process is None else self._process
        except OSError as error:
            self.failures.append(f"the checkpoint of step {steps} was not begun: {error}")
            return
        job = {"steps": steps, "described": described, "keep": self._keep, "also": sorted(also)}
        self._writing = steps
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            self._note_end()

    def is_busy(self) -> bool:
        self._read(0.0)
        return self._writing is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; returns whether that is so."""
        until = time.monotonic() + timeout_s
        while self._writing is not None and (left := until - time.monotonic()) > 0:
            self._read(left)
        return self._writing is None

    def take_failures(self) -> list[str]:
        """Return the failures since the last such call, and clear them."""
        taken, self.failures = self.failures, []
        return taken

    def close(self, timeout_s: float) -> bool:
        """Let the process end after it has written everything; returns whether it has done so in time."""
        if self._is_closed:
            return True
        self._is_closed = True
        until = time.monotonic() + timeout_s
        is_idle = self.wait(timeout_s)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                # Closing the pipe is not enough, because forked children of this process may hold it open.
                self._process.stdin.write(b"null\n")
                self._process.stdin.close()
            # No file depends on its exit, which on a busy machine may take longer than a preempted job has.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
                self._forget()
        self.memory.close()
        return is_idle

    def _start(self) -> subprocess.Popen[bytes]:
        self._answers, answers = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process lives)
        # Import modules from the same paths as this process. The writer needs no GPU and no compute threads.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        environment |= {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = [type(self._ops).__module__, str(self.memory.fd), str(answers), str(self._folder)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # the process inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.checkpoint.writer", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
                pass_fds=(self.memory.fd, answers),
                start_new_session=True,  # so that Ctrl-C reaches only the training process
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(answers)
        return self._process

    def _read(self, timeout_s: float) -> None:
        """Read answers; wait at most this long for one."""
        if self._writing is None or not select.select([self._answers], [], [], timeout_s)[0]:
            return
        received = os.read(self._answers, 1 << 16)
        if not received:
            self._note_end()
            return
        *lines, self._received = (self._received + received).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._writing = None
            if answer["failed"]:
                self.failures.append(
                    f"the checkpoint of step {answer['steps']} could not be written: {answer['failed']}"
                )
            else:
                self.written = answer["steps"]

    def _note_end(self) -> None:
        """Record that the process has ended unexpectedly."""
        assert self._process is not None
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        ended = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.failures.append(
            f"the checkpoint of step {self._writing} was not written: the process that wrote it has ended "
            f"({ended}{': ' + said[-1] if said else ''})"
        )
        self._forget()

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._answers)
        self._errors.close()
        self._process, self._writing, self._received = None, None, b""
