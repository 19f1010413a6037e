"""Starts the layouts, gives them their turns, and ends them, as compare.py decides.

In any case all jobs are over within the given time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launch.topology import read_memory_limit
from paceline.launch.tune_answers import Layout, fill_in
from paceline.tune import compare
from paceline.tune.compare import Standing
from paceline.tune.job import Job
from paceline.tune.rates import LEAST_STEPS, steps_so_far, turn_of

_LOOK_EVERY_S = 0.1
_WARM_STEPS = 8
_WARM_S = 3.0
_FOR_THE_END_S = 2.0  # for stopped ranks to end


@dataclass(frozen=True)
class Task:
    """What is to be measured.

    Attributes:
        layouts: The layouts, in the order in which they are started.
        options: Options of `paceline run` for all of them.
        command: The script or module and its arguments.
        seconds: Time within which everything must be over.
        folder: An empty folder, for the recordings and the output of the jobs.
        environment: The variables that the jobs inherit.
    """

    layouts: Sequence[Layout]
    options: Sequence[str]
    command: Sequence[str]
    seconds: float
    folder: Path
    environment: Mapping[str, str]


@dataclass
class Measured:
    """The outcome of a measurement.

    Attributes:
        standings: One for each layout, in the order of the task.
        output: The last lines of output of the first job that failed.
        took_s: Seconds that it took.
    """

    standings: list[Standing] = field(default_factory=list)
    output: str = ""
    took_s: float = 0.0


def measure(task: Task, say: Callable[[str], None]) -> Measured:
    """Measure all layouts. No process of any job is left when this returns or raises.

    Args:
        task: What is to be measured.
        say: Called with lines that describe the progress.
    """
    return _Measurement(task, say).run()


class _Measurement:
    def __init__(self, task: Task, say: Callable[[str], None]) -> None:
        self._task, self._say = task, say
        self._began_s = time.monotonic()
        self._until_s = self._began_s + max(task.seconds - _FOR_THE_END_S, 0.5 * task.seconds)
        self._jobs: dict[Layout, Job] = {}
        self._longest_start_s = 0.0
        self._found = Measured([Standing(layout) for layout in task.layouts])

    def run(self) -> Measured:
        try:
            for standing in self._found.standings:
                self._start(standing)
                if self._is_hopeless():
                    break
            self._take_turns()
        finally:
            for job in self._jobs.values():
                job.ask_to_end()
            for job in self._jobs.values():
                job.wait_for_end()
        self._found.took_s = time.monotonic() - self._began_s
        return self._found

    def _left_s(self) -> float:
        return self._until_s - time.monotonic()

    def _start(self, standing: Standing) -> None:
        """Start a job, and pause it once it is warm."""
        layout, before = standing.layout, [each for each in self._found.standings if each.is_running]
        if not compare.has_time_for_another(before, self._longest_start_s, self._left_s()):
            standing.out = "not tried: no time left (--seconds)"
            return
        if not self._has_room_for(layout):
            standing.out = "not tried: no memory left beside the others (--ranks)"
            return
        command = fill_in(self._task.command, layout.ranks)
        if command is None:
            standing.out = "not tried: an argument is not divisible by the ranks"
            return
        self._say(f"starting {layout}")
        folder = self._task.folder / str(layout.ranks)
        folder.mkdir()
        job = Job(layout, self._task.options, command, folder, self._task.environment)
        self._jobs[layout] = job
        started_s = time.monotonic()
        self._warm_up(standing, job)
        self._longest_start_s = max(self._longest_start_s, time.monotonic() - started_s)

    def _warm_up(self, standing: Standing, job: Job) -> None:
        """Wait for a job's first steps, and pause it then. It may end, or take too long, before that."""
        began_s, first_s = time.monotonic(), 0.0
        is_last = standing is self._found.standings[-1]
        may_take_s = compare.start_seconds(self._found.standings, self._left_s(), is_last=is_last)
        while not job.has_ended_within(_LOOK_EVERY_S):
            now_s = time.monotonic()
            recordings = job.recordings()
            steps = steps_so_far(recordings, job.layout.ranks)
            first_s = first_s or (now_s if steps else 0.0)
            is_warm = steps >= _WARM_STEPS or (
                first_s and now_s - first_s > _WARM_S and steps > LEAST_STEPS + 1
            )
            if is_warm:
                job.pause()
                turn = turn_of(job.recordings(), job.layout.ranks)
                standing.step_s = turn.samples_per_step / turn.samples_per_s if turn else now_s - first_s
                standing.is_running = True
                return
            if now_s - began_s > may_take_s:
                made = f"{_steps_in_words(steps)} within {may_take_s:.0f} s"
                self._leave(standing, job, f"{made} (--seconds gives it longer)")
                return
        self._note_end(standing, job)

    def _take_turns(self) -> None:
        standings = self._found.standings
        while not compare.is_decided(standings):
            standing = compare.next_turn(standings)
            running = sum(each.is_running for each in standings)
            if standing is None:
                return
            seconds = compare.turn_seconds(standing, running, self._left_s())
            if seconds is None:
                return
            self._say(f"round {len(standing.turns) + 1}: {standing.layout}; {self._left_s():.0f} s left")
            self._take_turn(standing, seconds)
            if standing.is_running and compare.is_out(standing, standings):
                self._leave(standing, self._jobs[standing.layout], "")

    def _take_turn(self, standing: Standing, seconds: float) -> None:
        job, begin_ns = self._jobs[standing.layout], time.monotonic_ns()
        job.resume()
        has_ended = job.has_ended_within(seconds)
        end_ns = time.monotonic_ns()
        if not has_ended:
            job.pause()
        standing.turns.append(turn_of(job.recordings(), job.layout.ranks, begin_ns, end_ns))
        if has_ended:
            self._note_end(standing, job)

    def _leave(self, standing: Standing, job: Job, why: str) -> None:
        """End a job that is not to be measured any more."""
        standing.is_running, standing.out = False, why
        job.ask_to_end()
        job.wait_for_end()

    def _note_end(self, standing: Standing, job: Job) -> None:
        """Note the outcome of a job that has ended by itself."""
        standing.is_running = False
        recordings = job.recordings()
        if job.exit_status:
            standing.out = f"failed: {_last_words(job.output())}"
            self._found.output = self._found.output or job.output()
            return
        standing.whole = turn_of(recordings, job.layout.ranks)
        steps = steps_so_far(recordings, job.layout.ranks)
        standing.out = "the script ended " + (
            f"after {_steps_in_words(steps)}" if steps else "without a backward"
        )

    def _is_hopeless(self) -> bool:
        """Whether at least two layouts were tried, and none of them could be measured."""
        tried = [each for each in self._found.standings if each.layout in self._jobs]
        return len(tried) >= 2 and not any(each.is_running or each.whole for each in tried)

    def _has_room_for(self, layout: Layout) -> bool:
        """Whether there is enough memory for one more job beside the running ones."""
        alive = {key: job for key, job in self._jobs.items() if job.exit_status is None}
        needs = max((job.memory_bytes() // key.ranks for key, job in alive.items()), default=0)
        return needs * layout.ranks * 1.2 < _available_bytes()


def _steps_in_words(steps: int) -> str:
    return {0: "no backward of a wrapped model", 1: "1 step"}.get(steps, f"{steps} steps")


def _available_bytes() -> float:
    """Memory that may still be used, by the machine's figure and by the limit of the control group."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    machine = int(match[1]) * 1024 if match else float("inf")
    limit = read_memory_limit()
    return machine if limit is None else min(machine, limit)


def _last_words(output: str) -> str:
    """The line that says why a script failed: the last line that names an exception, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (named or lines or ["it has written nothing"])[-1][:200]
