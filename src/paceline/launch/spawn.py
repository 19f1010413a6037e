"""`paceline.spawn`: calls a function on several ranks.

The guardian process of `paceline run` does the work here too (environment, placement, output, finding the
first failure, leaving nothing behind). This process only sends it the call, and waits for the report.
"""

from __future__ import annotations

import codecs
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, TextIO

from paceline.arguments import Arguments
from paceline.errors import ConfigError, LaunchError
from paceline.launch import pickled_call, spawned
from paceline.launch.job_secret import with_secret
from paceline.launch.memory_file import write_memory_file
from paceline.launch.notebook_cells import with_cell_names
from paceline.launch.plan import Options, launch_seconds, make_plan
from paceline.launch.rank_process import open_missing_streams, python_command
from paceline.launch.spawn_context import SpawnContext
from paceline.rendezvous.resource_limits import start_thread

_MOST_AT_ONCE = 1 << 16  # bytes of output

_arguments = Arguments("spawn")


def spawn(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    *,
    master_port: int | None = None,
    threads: int | None = None,
    bind: str = "auto",
    prefix: str = "auto",
    log_dir: str | os.PathLike[str] | None = None,
    timeout_s: float | timedelta | None = None,
    grace_s: float | timedelta = 5.0,
    exit_timeout_s: float | timedelta = Options.exit_timeout_s,
    trace: str | os.PathLike[str] | None = None,
) -> SpawnContext | None:
    """Call `fn(rank, *args)` in `nprocs` new processes, each one rank of a job.

    Each rank has the environment that `paceline run` gives, so `paceline.init()` and torch's `env://` work in
    it. When a rank fails, the others are stopped. The ranks die with this process, however it ends.

    Args:
        fn: What to call. If it cannot be imported by name (defined in a notebook, a REPL, or another
            function), cloudpickle must be installed.
        args: Arguments after the rank. Copied, except tensors (if torch is loaded) and the queues and locks
            of multiprocessing's "spawn" context, which are shared.
        nprocs: Number of ranks; None: as many as there are cores.
        join: Wait for the ranks; else return at once.
        daemon: With join=False: stop the ranks, instead of waiting for them, when this process ends.
        start_method: Only "spawn": a forked rank would inherit threads and locks in an unknown state.
        master_port: Port of rank 0; None: a free one.
        threads: OMP_NUM_THREADS of each rank; None: as set, else cores divided by ranks.
        bind: "cores": each rank runs only on cores of its own. "none": ranks run on any core. "auto": like
            "cores" if there are enough cores, otherwise like "none".
        prefix: "always", "never" or "auto": whether each line of output begins with "[rank 1]".
        log_dir: A folder; each rank's output is also written to rankN.log in it.
        timeout_s: Stop the job after so many seconds, or a timedelta.
        grace_s: After a failure: seconds until SIGTERM, then until SIGKILL.
        exit_timeout_s: Stop the last ranks when all others have ended and they have used no processor time
            for so many seconds, or a timedelta.
        trace: A file for a timeline of all ranks, for ui.perfetto.dev; written when the last rank has ended.

    Returns:
        None, or with join=False a context to join later.

    Raises:
        ConfigError: An argument is wrong; nothing was started.
        RegionError: The thread that shows the output of the ranks (in a notebook) cannot be started.
        LaunchError: A rank failed. It carries the first failing rank, its traceback, exit status and signal.

    Example:
        >>> spawn(train, args=(0.1,), nprocs=2)
        Two processes run; one calls train(0, 0.1), the other train(1, 0.1).
    """
    open_missing_streams()
    _check_call(fn, start_method)
    join, daemon = _arguments.flag("join", join), _arguments.flag("daemon", daemon)
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        hint = "args=(1,) for a single one"
        raise _arguments.refuse("args", args, "the arguments after the rank, in a tuple", hint, is_type=True)
    options = Options(
        nprocs=nprocs,
        master_port=master_port,
        threads=threads,
        bind=bind,
        prefix=prefix,
        log_dir=str(log_dir) if isinstance(log_dir, os.PathLike) else log_dir,
        timeout_s=None if timeout_s is None else launch_seconds(_arguments, "timeout_s", timeout_s),
        grace_s=(grace := launch_seconds(_arguments, "grace_s", grace_s)),
        preempt_s=grace,  # a SIGTERM can only come from SpawnContext
        exit_timeout_s=launch_seconds(_arguments, "exit_timeout_s", exit_timeout_s),
        trace=str(trace) if isinstance(trace, os.PathLike) else trace,
    )
    context = _start(fn, tuple(args), options, is_daemon=daemon)
    if not join:
        return context
    try:
        context.join()
    except LaunchError as error:
        # Without our frames: the rank's traceback matters, and the message holds it.
        raise error.with_traceback(None) from None
    except BaseException as error:  # Ctrl-C, in a notebook too
        context.stop(signal.SIGINT)
        if isinstance(error, KeyboardInterrupt):
            raise error.with_traceback(None) from None
        raise
    return None


def _check_call(fn: Callable[..., Any], start_method: str) -> None:
    if start_method != "spawn":
        hint = "leave start_method out: a forked rank would inherit threads and locks in an unknown state"
        raise _arguments.refuse("start_method", start_method, '"spawn"', hint)
    _arguments.function("fn", fn, "fn(rank, *args)")
    if spawned.is_importing_main():
        raise ConfigError(
            "spawn was called while a rank was importing the script that calls it.",
            likely="the call of spawn is at the top level of the script",
            hint='put it under `if __name__ == "__main__":`',
        )


def _start(
    fn: Callable[..., Any], args: tuple[Any, ...], options: Options, *, is_daemon: bool
) -> SpawnContext:
    # The plan comes first: it checks what the rest relies on.
    plan = make_plan(getattr(fn, "__qualname__", repr(fn)), (), options)
    call = pickled_call.pack(fn, args)
    payload_fd = write_memory_file("paceline-call", call.data)
    lifeline, lifeline_end = os.pipe()
    report_fd, report_end = os.pipe()
    opened = [payload_fd, lifeline, report_end]
    try:
        error_fds = tuple(write_memory_file("paceline-error", b"") for _ in range(plan.nprocs))
        opened += error_fds
        plan = replace(
            plan,
            command=python_command(f"from paceline.launch.spawned import run_rank; run_rank({payload_fd})"),
            environments=tuple(
                {**environment, "PACELINE_ERROR_FD": str(fd)}
                for environment, fd in zip(plan.environments, error_fds, strict=True)
            ),
            passes_stdin=False,
            error_fds=error_fds,
            report_fd=report_end,
        )
        plan = with_secret(plan)
        opened += plan.inherited_fds
        plan = replace(plan, inherited_fds=(*plan.inherited_fds, payload_fd, *call.fds))
        plan_fd = write_memory_file("paceline-plan", pickle.dumps(plan))
        opened.append(plan_fd)
        guardian, relays = _start_guardian(
            python_command(
                f"from paceline.launch.guardian import guard; guard({plan_fd}, {lifeline}, {os.getpid()})"
            ),
            (*opened, *call.fds),
        )
    except BaseException:
        os.close(lifeline_end)
        os.close(report_fd)
        raise
    finally:
        for fd in opened:
            os.close(fd)
    return SpawnContext(plan, guardian, report_fd, lifeline_end, relays, is_daemon=is_daemon)


def _start_guardian(
    command: tuple[str, ...], fds: tuple[int, ...]
) -> tuple[subprocess.Popen[bytes], list[threading.Thread]]:
    """Start it in a session of its own, so that the terminal's Ctrl-C reaches only this process.

    If sys.stdout or sys.stderr is not the process's own (a notebook, a test), threads relay the output there.
    """
    streams = (sys.stdout, sys.stderr)
    is_relayed = sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__
    for stream in streams:
        if stream is not None:
            stream.flush()
    guardian = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_relayed else None,
        stderr=subprocess.PIPE if is_relayed else None,
        pass_fds=fds,
        start_new_session=True,
    )
    if not is_relayed:
        return guardian, []
    relays = [
        threading.Thread(target=_relay, args=(pipe, stream), name="paceline-output", daemon=True)
        for pipe, stream in zip((guardian.stdout, guardian.stderr), streams, strict=True)
    ]
    for relay in relays:
        start_thread(relay)
    return guardian, relays


def _relay(pipe: Any, stream: TextIO | None) -> None:
    """Write what arrives, at once and in whole lines; lines that arrive together are written together.

    A stream that cannot be written is reported once. The pipe is still read, because the ranks would block.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    started: list[str] = []  # pieces of a line: a long one is joined once
    data, is_reported = None, False
    with pipe:
        while data != b"":
            data = pipe.read1(_MOST_AT_ONCE)
            text = decoder.decode(data, final=not data)
            end = text.rfind("\n") + 1 if data else len(text)
            if end or not data:
                try:
                    _show("".join([*started, text[:end]]), stream)
                except (OSError, ValueError) as error:  # a full disk; a stream that the program has closed
                    if not is_reported:
                        is_reported = True
                        _say_it_is_lost(error)
                started = []
            started.append(text[end:])


def _show(text: str, stream: TextIO | None) -> None:
    if text and stream is not None:
        stream.write(with_cell_names(text))
        stream.flush()


def _say_it_is_lost(error: OSError | ValueError) -> None:
    """Reports it on the process's own standard error: the present sys.stderr may be the one that fails."""
    reason = getattr(error, "strerror", None) or str(error)
    with suppress(OSError, ValueError, AttributeError):  # Python was started without it
        print(
            f"paceline: the output of the ranks cannot be written: {reason}. "
            "The job goes on; what the ranks print is lost as long as this lasts",
            file=sys.__stderr__,
            flush=True,
        )
