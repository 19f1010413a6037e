"""Starts the ranks, relays their output, and ends the job when one of them fails.

Runs in a process of its own below the guardian: one loop that waits in `selectors` for output, for signals
(SIGCHLD among them), for the next deadline and for the next check of the ranks' totals.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import stacks
from paceline.errors import format_ranks
from paceline.health.stop_signals import EXIT_STATUS as PREEMPTED
from paceline.launch import failure_report
from paceline.launch.dashboard_process import DashboardProcess
from paceline.launch.forked import StoppedError, fork_ranks
from paceline.launch.last_ranks import LastRanks
from paceline.launch.memory_file import read_memory_file
from paceline.launch.output import Screen
from paceline.launch.output_pipes import OutputPipe, OutputPipes, RankLog, connect, copy_window_size
from paceline.launch.plan import Plan
from paceline.launch.process_tree import end_leftovers, pass_on, reap_children, send
from paceline.launch.rank_process import ForkedRank, RankStart, Streams, start_rank
from paceline.launch.trace_file import JobRecording

_STOPS = frozenset((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_KILLED_WITHIN_S = 30.0
_LONGEST_SLEEP_S = 86_400.0  # poll() counts milliseconds in 31 bits
_WRITING = "paceline/checkpoint/writer_process.py"  # in the stacks of a rank that waits for its writer
_SHOWN_STACKS = 4  # one is often enough, and those of 128 ranks would bury the report


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes] | ForkedRank
    outputs: OutputPipes
    started_at: float
    stopped_by: int = 0  # the last signal that we sent it
    end: failure_report.RankEnd | None = None
    is_traceback_held: bool = False  # the traceback that ended it is left to the report


@dataclass(frozen=True)
class _Stop:
    """How ranks are stopped: a sequence of signals, each sent only if ranks still run by then."""

    exit_status: int | None  # None: the first failing rank's
    steps: tuple[int, ...]  # signals still to send
    next_at: float
    grace_s: float  # before each of them


class Supervisor:
    def __init__(self, plan: Plan, screen: Screen, terminal_group: int = 0) -> None:
        self._plan = plan
        self._screen = screen
        self._terminal_group = terminal_group
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._stop: _Stop | None = None
        self._started_at = time.monotonic()
        self._wakeup = -1
        self._blocked: dict[int, int] = {}  # streams whose reader accepts nothing now, with their descriptors
        self._last_ranks = LastRanks(plan.options.exit_timeout_s)
        self._is_asked_to_stop = False  # by a signal
        self._is_given_up = False  # a rank did not even end by SIGKILL
        self._recording = JobRecording(
            plan.recording,
            is_own=plan.owns_recording,
            output=plan.options.trace,
            name=plan.name,
            nprocs=plan.nprocs,
            launcher=os.getppid(),
            say=screen.say,
        )
        self._dashboard: DashboardProcess | None = None
        if plan.dashboard is not None:
            self._dashboard = DashboardProcess(plan.recording, *plan.dashboard, screen.say)

    def run(self) -> int:
        self._listen_for_signals()
        self._recording.begin()
        if self._dashboard is not None:
            self._dashboard.begin()
        try:
            self._start_ranks()
        except OSError as error:
            self._screen.say(f"paceline: rank {len(self._ranks)} could not be started: {error}")
            self._begin_stop(1, signal.SIGKILL)
        except StoppedError as stopped:
            self._on_request_to_stop(stopped.signum)
        self._report(pids=[rank.process.pid for rank in self._ranks])
        while self._running() and not self._is_given_up:
            for key, _ in self._selector.select(self._seconds_to_sleep()):
                key.data()
            self._mind_readers()
            self._screen.report_unread()
            self._take_due_step()
            if self._stop is None:
                self._show_survived_tracebacks()
                self._recording.look()
                self._look_at_last_ranks()
        return self._finish()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.end is None]

    # Starting

    def _start_ranks(self) -> None:
        plan = self._plan
        if plan.shared is None:
            for rank in range(plan.nprocs):
                self._start(rank, self._connect(rank))
            return
        outputs_of_ranks = [self._connect(rank) for rank in range(plan.nprocs)]
        starts = [self._start_of(rank, outputs) for rank, outputs in enumerate(outputs_of_ranks)]
        forked = fork_ranks(plan.shared, plan.command, starts, self._wakeup)
        for rank, outputs in enumerate(outputs_of_ranks):
            self._start(rank, outputs, None if forked is None else forked[rank])
        self._on_ended()  # the SIGCHLD of a rank that has ended by now was read before the rank was known

    def _connect(self, rank: int) -> OutputPipes:
        return connect(self._screen, rank, self._plan.nprocs, self._plan.options.prefix, self._open_log(rank))

    def _start_of(self, rank: int, outputs: OutputPipes) -> RankStart:
        plan = self._plan
        return RankStart(
            plan.environments[rank],
            Streams(
                subprocess.DEVNULL if rank or not plan.passes_stdin else 0, outputs.stdout, outputs.stderr
            ),
            cores=plan.cores[rank],
            process_group=0 if rank else self._terminal_group,
            inherited_fds=plan.inherited_fds + plan.error_fds[rank : rank + 1],
        )

    def _start(self, rank: int, outputs: OutputPipes, forked: ForkedRank | None = None) -> None:
        started_at = time.monotonic() if forked is None else self._started_at
        try:
            process = forked or start_rank(self._plan.command, self._start_of(rank, outputs))
        finally:
            outputs.close_rank_ends()
        self._ranks.append(_Rank(rank, process, outputs, started_at))
        for pipe in outputs.pipes:
            self._listen_to(pipe)

    def _open_log(self, rank: int) -> RankLog | None:
        if self._plan.options.log_dir is None:
            return None
        return RankLog(Path(self._plan.options.log_dir) / f"rank{rank}.log", self._screen)

    # Events

    def _listen_for_signals(self) -> None:
        self._wakeup, writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the guardian blocked them until here
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)

    def _on_signals(self) -> None:
        for signum in os.read(self._wakeup, 512):
            if signum == signal.SIGCHLD:
                self._on_ended()
            elif signum == signal.SIGWINCH and self._ranks:
                copy_window_size(self._ranks[0].outputs)
                send(self._ranks[0].process.pid, signal.SIGWINCH)
            elif signum in (signal.SIGUSR1, signal.SIGUSR2):
                self._pass_on(signum)
            elif signum in _STOPS:
                self._on_request_to_stop(signum)

    def _pass_on(self, signum: int) -> None:
        """Send ranks a signal that schedulers send as a warning, except ranks that it would end."""
        ranks = {rank.process.pid: rank.rank for rank in self._running()}
        deaf = [ranks[pid] for pid in pass_on(ranks, signum)]
        if deaf:
            self._screen.say(
                failure_report.not_passed_on(signum, f"{format_ranks(deaf)} of {self._plan.nprocs}")
            )

    def _on_request_to_stop(self, signum: int) -> None:
        if signum == signal.SIGTERM and self._stop is not None and self._stop.exit_status == 128 + signum:
            # A service manager sends it to all processes of a job, so it arrives twice, and a rank that saves
            # its work must not be interrupted again.
            return
        self._is_asked_to_stop = True
        name, options = signal.Signals(signum).name, self._plan.options
        text = f"paceline: {name}: stopping {self._plan.nprocs} ranks"
        if signum == signal.SIGTERM:
            text += f"; SIGKILL follows in {options.preempt_s:g} s (--preempt-s)"
        self._screen.say(text)
        self._begin_stop(128 + signum, signum, options.preempt_s if signum == signal.SIGTERM else None)

    def _on_ended(self) -> None:
        ended = reap_children()  # the ranks, and orphans that they have left
        for rank in self._running():
            status = ended.get(rank.process.pid)
            if status is not None:
                rank.process.returncode = status  # Popen did not reap it
                self._on_rank_ended(rank, status)

    def _on_rank_ended(self, rank: _Rank, status: int) -> None:
        ended_at = time.monotonic()
        output = self._caught_exception(rank.rank)
        for pipe in rank.outputs.pipes:
            pipe.drain()
            if pipe.is_error_output:
                output = output or pipe.tail.decode(errors="replace")
                if status == 1 and pipe.traceback_at is not None:
                    ended_at = pipe.traceback_at  # the time after it is the interpreter's shutdown
        end = rank.end = failure_report.RankEnd(
            rank=rank.rank,
            pid=rank.process.pid,
            status=status,
            after_s=ended_at - rank.started_at,
            stopped_by=rank.stopped_by,
            output=output,
        )
        for pipe in rank.outputs.pipes:
            if failure_report.traceback_of(end) and pipe.take_held():
                rank.is_traceback_held = True
            else:
                pipe.show_held()
        if end.is_failure and self._stop is None:
            # The others normally raise within milliseconds: give them the time to print their errors.
            options = self._plan.options
            grace_s = options.preempt_s if status == PREEMPTED else options.grace_s
            self._stop = _Stop(None, (signal.SIGTERM, signal.SIGKILL), ended_at + grace_s, grace_s)
        running = self._running()
        if self._stop is None and running:
            is_most = 2 * len(running) > self._plan.nprocs
            self._last_ranks.begin([other.process.pid for other in running], is_most=is_most)

    def _show_survived_tracebacks(self) -> None:
        for pipe in self._pipes():
            if pipe.seconds_to_hold() == 0.0:
                pipe.show_held()

    def _pipes(self) -> list[OutputPipe]:
        return [pipe for rank in self._ranks for pipe in rank.outputs.pipes]

    def _caught_exception(self, rank: int) -> str:
        if not self._plan.error_fds:
            return ""
        return read_memory_file(self._plan.error_fds[rank]).decode(errors="replace")

    def _mind_readers(self) -> None:
        """Read what ranks write to a stream only while that stream is read itself; otherwise they block."""
        blocked = self._screen.blocked()
        if blocked == self._blocked:
            return
        for stream, fd in self._blocked.items():
            if stream not in blocked:
                self._selector.unregister(fd)
        for stream, fd in blocked.items():
            if stream not in self._blocked:
                self._selector.register(fd, selectors.EVENT_WRITE, self._screen.write_kept)
        for pipe in self._pipes():
            was_blocked, is_blocked = pipe.stream in self._blocked, pipe.stream in blocked
            if pipe.is_open and is_blocked and not was_blocked:
                self._selector.unregister(pipe.fd)
            elif pipe.is_open and was_blocked and not is_blocked:
                self._listen_to(pipe)
        self._blocked = blocked

    def _waits_for_reader(self, rank: _Rank) -> bool:
        pipes = [pipe for pipe in rank.outputs.pipes if pipe.stream in self._blocked]
        return any(pipe.is_unread() for pipe in pipes)

    def _listen_to(self, pipe: OutputPipe) -> None:
        self._selector.register(pipe.fd, selectors.EVENT_READ, lambda: self._read(pipe))

    def _read(self, pipe: OutputPipe) -> None:
        if not pipe.read() and not pipe.is_open:
            self._selector.unregister(pipe.fd)
            pipe.close()
        if self._screen.has_lost_reader and self._stop is None:
            self._begin_stop(128 + signal.SIGPIPE, signal.SIGTERM)

    # Stopping

    def _begin_stop(self, exit_status: int, signum: int, grace_s: float | None = None) -> None:
        """Send `signum` now, and stronger signals to the remaining ranks after each grace period."""
        grace_s = self._plan.options.grace_s if grace_s is None else grace_s
        if self._stop is not None:
            # A failure remains the reason.
            self._stop = replace(self._stop, steps=self._steps_after(signum), grace_s=grace_s)
        else:
            self._stop = _Stop(exit_status, self._steps_after(signum), 0.0, grace_s)
        self._send(signum)

    def _look_at_last_ranks(self) -> None:
        running = self._running()
        after_s, has_hung = self._last_ranks.look(
            [rank.process.pid for rank in running], is_unread=any(map(self._waits_for_reader, running))
        )
        if after_s is None and not has_hung:
            return
        ranks = f"{format_ranks(rank.rank for rank in running)} of {self._plan.nprocs}"
        timeout = f"{self._plan.options.exit_timeout_s:g} s (--exit-timeout-s)"
        if has_hung:
            self._screen.say(
                f"paceline: {ranks} did not end after all others, and used no processor for {timeout}; "
                f"sending SIGTERM"
            )
        else:
            self._screen.say(
                f"paceline: {ranks} did not end within {after_s:g} s of all others. "
                f"The job is stopped when they have used no processor for {timeout}"
            )
        self._show_stacks()
        if has_hung:
            self._begin_stop(failure_report.TIMED_OUT, signal.SIGTERM)

    @staticmethod
    def _steps_after(signum: int) -> tuple[int, ...]:
        if signum == signal.SIGKILL:
            return ()
        return (signal.SIGKILL,) if signum == signal.SIGTERM else (signal.SIGTERM, signal.SIGKILL)

    def _send(self, signum: int) -> None:
        assert self._stop is not None
        for rank in self._running():
            rank.stopped_by = signum
            # The terminal has sent its Ctrl-C to rank 0 already, and a second one would disturb its clean-up.
            if not (signum == signal.SIGINT and rank.rank == 0 and self._terminal_group):
                send(rank.process.pid, signum)
            send(rank.process.pid, signal.SIGCONT)  # a stopped process reacts to nothing but SIGKILL
        grace_s = self._stop.grace_s
        if signum == signal.SIGKILL:  # freeing much memory takes long
            grace_s = max(grace_s, _KILLED_WITHIN_S)
        self._stop = replace(self._stop, next_at=time.monotonic() + grace_s)

    def _seconds_to_sleep(self) -> float:
        seconds = [_LONGEST_SLEEP_S, self._seconds_to_deadline(), self._screen.seconds_to_report()]
        if self._stop is None:
            seconds += [pipe.seconds_to_hold() for pipe in self._pipes()]
            seconds += [self._recording.seconds_to_look(), self._last_ranks.seconds_to_look()]
        return min(each for each in seconds if each is not None)

    def _seconds_to_deadline(self) -> float | None:
        due = []
        if self._stop is not None:
            due = [self._stop.next_at]
        elif self._plan.options.timeout_s is not None:
            due = [self._started_at + self._plan.options.timeout_s]
        return max(0.0, due[0] - time.monotonic()) if due else None

    def _take_due_step(self) -> None:
        if self._seconds_to_deadline() != 0.0 or not self._running():
            return
        ranks = format_ranks(rank.rank for rank in self._running())
        if self._stop is None:
            self._screen.say(
                f"paceline: the job did not end within {self._plan.options.timeout_s:g} s; stopping {ranks}"
            )
            self._show_stacks()
            self._begin_stop(failure_report.TIMED_OUT, signal.SIGTERM)
            return
        if not self._stop.steps:
            self._screen.say(
                f"paceline: {ranks} did not end by SIGKILL: stuck in the kernel, on a disk perhaps"
            )
            self._is_given_up = True
            return
        signum, *steps = self._stop.steps
        self._screen.say(
            f"paceline: {ranks} did not end within {self._stop.grace_s:g} s; "
            f"sending {signal.Signals(signum).name}"
        )
        if signum == signal.SIGTERM:
            self._show_stacks()
        self._stop = replace(self._stop, steps=tuple(steps))
        self._send(signum)

    def _show_stacks(self) -> None:
        for rank in self._running()[:_SHOWN_STACKS]:
            if self._waits_for_reader(rank):
                self._screen.say(
                    f"paceline: rank {rank.rank} has written more than was read, and may wait for that"
                )
            text = stacks.ask_if_ready(rank.process.pid, timeout_s=1.0)
            if text is not None and _WRITING in text:
                self._screen.say(f"paceline: rank {rank.rank} waits until a checkpoint is written")
            elif text is not None:
                self._screen.say(f"paceline: where rank {rank.rank} is:\n{text.rstrip()}")
            elif stacks.process_state(rank.process.pid) in stacks.STOPPED:
                self._screen.say(
                    f"paceline: rank {rank.rank} (pid {rank.process.pid}) is stopped: a signal or a debugger"
                )

    # The end

    def _finish(self) -> int:
        pipes = self._pipes()
        for pipe in pipes:
            pipe.drain()
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        exit_status, is_failure = self._exit_status(ends)
        if self._dashboard is not None:
            self._dashboard.end(exit_status)
        left = end_leftovers(self._wakeup)
        for pipe in pipes:
            pipe.drain()
            pipe.close()
        if left:
            self._screen.say(f"paceline: ended what the ranks left behind: {', '.join(left)}")
        self._recording.end(exit_status)
        if self._plan.report_fd is not None:
            self._report(
                ends=[failure_report.to_json(end) for end in ends],
                exit_status=exit_status,
                is_failure=is_failure,
            )
        elif is_failure:
            raw = [r.rank for r in self._ranks if any(pipe.is_raw for pipe in r.outputs.pipes)]
            held = [rank.rank for rank in self._ranks if rank.is_traceback_held]
            report = failure_report.render(ends, raw=raw, held=held, log_dir=self._plan.options.log_dir)
            # Its first line is blank, to separate it from what stands above.
            self._screen.say(report if self._screen.has_shown_anything else report.lstrip("\n"))
        elif exit_status == PREEMPTED:
            self._screen.say(
                f"paceline: the job was preempted: all {self._plan.nprocs} ranks ended with exit status "
                f"{PREEMPTED}; the same command resumes it"
            )
        self._wait_for_readers()
        return exit_status

    def _wait_for_readers(self) -> None:
        """Wait until all output is read, as any program does; but not for long after a signal to stop."""
        waits = select.poll()
        waits.register(self._wakeup, select.POLLIN)
        is_stopped = self._is_asked_to_stop
        ends_at = time.monotonic() + self._plan.options.grace_s
        while blocked := self._screen.blocked():
            for fd in blocked.values():
                waits.register(fd, select.POLLOUT)
            if is_stopped and ends_at <= time.monotonic():
                return
            left_s = ends_at - time.monotonic() if is_stopped else self._screen.seconds_to_report()
            left_s = _LONGEST_SLEEP_S if left_s is None else min(max(0.0, left_s), _LONGEST_SLEEP_S)
            ready = dict(waits.poll(1000 * left_s))
            if self._wakeup in ready and not _STOPS.isdisjoint(os.read(self._wakeup, 512)):
                is_stopped, ends_at = True, 0.0
            self._screen.write_kept()
            self._screen.report_unread()
            for fd in blocked.values():
                waits.unregister(fd)

    def _exit_status(self, ends: Sequence[failure_report.RankEnd]) -> tuple[int, bool]:
        if self._stop is None:
            return 0, False
        if len(ends) == self._plan.nprocs and all(end.status == PREEMPTED for end in ends):
            return PREEMPTED, False
        if self._stop.exit_status is not None:
            return self._stop.exit_status, False
        first = failure_report.first_failure(ends)
        assert first is not None
        return first.exit_status, True

    def _report(self, **facts: Any) -> None:
        if self._plan.report_fd is not None:
            with os.fdopen(os.dup(self._plan.report_fd), "w") as file:
                file.write(json.dumps(facts) + "\n")
