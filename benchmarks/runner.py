"""Runs the cases of a benchmark: starts all of them, then takes one sample of each per round.

A case that fails is removed, and the report shows its error; the others go on.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from benchmarks.job import CaseFailed, Job, Launch
from benchmarks.report import Machine, Report
from benchmarks.samples import iterations_for, ratio
from paceline.errors import ConfigError
from paceline.launch.placement import assign_cores
from paceline.launch.topology import read_machine

BEFORE = "before_"
"""Prefix of a case's key when it runs with the Paceline of `--before`."""

# Gradients are allocated anew in each step. By default malloc returns large blocks to the kernel, and in some
# cases, by chance, the page faults that follow take longer than the measured code.
STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def unbound(ranks: int) -> Launch:
    """Ranks that may use any core, as with torchrun."""
    return Launch()


def bound(ranks: int) -> Launch:
    """Ranks bound to cores of their own if there are enough, as with `paceline run`."""
    machine = read_machine()
    cores = None if machine.is_cut_by_quota else assign_cores(machine.cpus, ranks)
    return Launch(cores=tuple(cores or ()))


def no_torch() -> str:
    """Return why cases that need torch can't run, or ""."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def no_paddle() -> str:
    """Return why cases that need PaddlePaddle can't run, or ""."""
    return "" if importlib.util.find_spec("paddle") else "PaddlePaddle is not installed"


@dataclass(frozen=True)
class Case:
    """One library, with its options, that a benchmark measures.

    Attributes:
        key: Name on the command line and in JSON.
        label: Name in tables.
        target: `module:class` of the object that each rank creates.
        options: Keyword arguments for it.
        missing: Returns why the case can't run here, or "".
        launch: Returns how to start its processes, given the number of ranks.
        processes: Number of processes; 0: the number of ranks that the user asked for.
    """

    key: str
    label: str
    target: str
    options: dict[str, Any] = field(default_factory=dict)
    missing: Callable[[], str] = lambda: ""
    launch: Callable[[int], Launch] = unbound
    processes: int = 0

    @property
    def is_ours(self) -> bool:
        """Whether a failure of this case is a failure of this version of Paceline."""
        return self.key.startswith("paceline")

    def with_python(self, python: str) -> Case:
        """The same case with the Paceline that is installed in another interpreter."""
        return replace(
            self,
            key=f"{BEFORE}{self.key}",
            label=f"{self.label}, before",
            launch=lambda ranks: replace(self.launch(ranks), python=python),
        )


@dataclass(frozen=True)
class Benchmark:
    """The description of a benchmark for the command line.

    Attributes:
        help: What it measures.
        rounds: Default of `--rounds`.
        run: Measures, given the settings and the parsed arguments.
        cases: Returns the cases, given the parsed arguments; raises ConfigError if these are wrong.
        add_arguments: Declares the benchmark's own arguments.
        environment: Returns the environment of all cases, given the parsed arguments.
        has_ranks: Whether there is an option `--ranks`.
        has_starts: Whether there is an option `--starts`.
    """

    help: str
    rounds: int
    run: Callable[[Settings, argparse.Namespace], Report]
    cases: Callable[[argparse.Namespace], Sequence[Case]]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    environment: Callable[[argparse.Namespace], Mapping[str, str]] = lambda given: {}
    has_ranks: bool = True
    has_starts: bool = True


@dataclass(frozen=True)
class Settings:
    """The settings of one run.

    Attributes:
        cases: The cases to run.
        ranks: Number of processes of each case.
        rounds: Number of samples of each case.
        command: The command that reproduces the report.
        show: Called with each line of progress.
        environment: Environment variables of all cases.
        starts: How many times the processes of all cases are started for each measurement.
        machine: The machine, and its load before the benchmark.
    """

    cases: tuple[Case, ...]
    ranks: int
    rounds: int
    command: str = ""
    show: Callable[[str], None] = lambda line: None
    environment: Mapping[str, str] = field(default_factory=dict)
    starts: int = 1
    machine: Machine = field(default_factory=Machine.here)

    def able(self) -> tuple[list[Case], list[str]]:
        """Return the cases that can run here, and a note on each of the others."""
        absent = [f"{case.label} is absent: {case.missing()}." for case in self.cases if case.missing()]
        return [case for case in self.cases if not case.missing()], absent

    def report(
        self,
        theme: str,
        title: str,
        columns: list[str],
        rows: list[list[str]],
        *,
        notes: list[str],
        data: dict[str, Any],
        is_complete: bool,
        text_columns: int = 1,
    ) -> Report:
        """Make the report of a benchmark with these settings; the arguments are those of `Report`."""
        data = {"ranks": self.ranks, "rounds": self.rounds, **data}
        return Report(
            theme, title, self.command, self.machine, columns, rows, notes, data, is_complete, text_columns
        )


def check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError unless all `names` are known."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{option}: unknown {', '.join(unknown)}", expected=", ".join(known))


def choose(cases: Sequence[Case], only: Sequence[str], before: str = "") -> tuple[Case, ...]:
    """Return the cases with the keys `only`, or all cases.

    Args:
        cases: All cases of a benchmark.
        only: Keys of the cases to run; empty: all.
        before: An interpreter with another version of Paceline: each of our cases also runs with it.

    Raises:
        ConfigError: A key in `only` is unknown.
    """
    check_names("--only", only, [case.key for case in cases])
    chosen = [case for case in cases if not only or case.key in only]
    if not before:
        return tuple(chosen)
    # Next to each other, so that other load on the machine slows both.
    pairs = [[case, case.with_python(before)] if case.is_ours else [case] for case in chosen]
    return tuple(case for pair in pairs for case in pair)


@dataclass
class Timing:
    """The samples of one case: `samples[rank][round]`, in seconds per call; equally many for each start."""

    iterations: int
    samples: list[list[float]]
    starts: int = 1


class _Running:
    """A case, its job, and why it failed."""

    def __init__(self, case: Case, ranks: int, environment: Mapping[str, str]) -> None:
        self.case = case
        self.failure = ""
        self.ranks = case.processes or ranks
        launch = case.launch(self.ranks)
        self._launch = replace(launch, environment={**environment, **launch.environment})
        self.job = self._new_job()

    def _new_job(self) -> Job:
        return Job(self.case.label, self.case.target, self.ranks, self._launch, self.case.options)

    def restart(self) -> None:
        if not self.failure:
            self.job.close()
            self.job = self._new_job()
            self.attempt(lambda job: job.start(), "start")

    def attempt(self, action: Callable[[Job], Any], during: str) -> Any:
        """Call `action` with the job. If that fails, keep the reason, end the job and return None."""
        if self.failure:
            return None
        try:
            return action(self.job)
        except CaseFailed as error:
            self.take_out(f"{during}: {error}")
            return None

    def take_out(self, why: str) -> None:
        self.failure = why
        self.job.close()

    def sample(self, during: str, iterations: int) -> Sequence[float]:
        elapsed = self.attempt(lambda job: job.call("time", limit_s=120.0, iterations=iterations), during)
        return elapsed or []


class Runner:
    """The started cases of a benchmark, as a context manager that ends every process that it started.

    Attributes:
        running: The cases that could be started here.
        absent: Why the other cases can't run here, by label.
    """

    def __init__(self, settings: Settings) -> None:
        self.absent: dict[str, str] = {}
        self.running: list[_Running] = []
        self._settings = settings
        self._changes: list[str] = []
        self._prepare: Callable[[], object] = lambda: None
        for case in settings.cases:
            why = case.missing()
            if why:
                self.absent[case.label] = why
            else:
                self.running.append(_Running(case, settings.ranks, settings.environment))

    def __enter__(self) -> Runner:
        try:
            for each in self.running:
                self._settings.show(f"starting {each.case.label}")
                each.attempt(lambda job: job.start(), "start")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for each in self.running:
            each.job.close()

    @property
    def cases(self) -> list[Case]:
        """The cases that could be started here."""
        return [each.case for each in self.running]

    @property
    def failures(self) -> dict[str, str]:
        """Why cases failed, by label."""
        return {each.case.label: each.failure for each in self.running if each.failure}

    @property
    def is_complete(self) -> bool:
        """Whether no case of Paceline failed."""
        return not any(each.failure and each.case.is_ours for each in self.running)

    def notes(self) -> list[str]:
        """Return notes for every report: changes since `--before`, too few cores, absent and failed cases."""
        settings, cores = self._settings, read_machine().num_cores
        notes = [*self._changes]
        if settings.ranks > cores:
            notes.append(f"{settings.ranks} ranks share {cores} cores.")
        if settings.starts > 1:
            notes.append(
                f"All processes were started {settings.starts} times, and the rounds divided among the "
                "starts: two processes that run the same program differ by a few percent for their lifetime."
            )
        notes += [f"{label} is absent: {why}." for label, why in self.absent.items()]
        return notes + [f"{label} failed: {why}" for label, why in self.failures.items()]

    def among(self, keys: Iterable[str]) -> Runner:
        """Return a runner of the cases with these keys. Leaving its context ends no process."""
        chosen = set(keys)
        some = copy.copy(self)
        some.running = [each for each in self.running if each.case.key.removeprefix(BEFORE) in chosen]
        return some

    def prepare(self, during: str, **arguments: Any) -> dict[str, list[Any]]:
        """Let every case prepare the next measurement, now and after each restart."""
        self._settings.show(f"{during}: checking results")
        self._prepare = lambda: self.on_all("prepare", during, **arguments)
        return self.on_all("prepare", during, **arguments)

    def on_all(self, method: str, during: str, **arguments: Any) -> dict[str, list[Any]]:
        """Call a method on every case in turn; return the results of those without a failure, by key."""
        results = {}
        for each in self.running:
            result = each.attempt(
                lambda job: job.call(method, limit_s=120.0, **arguments), f"{during}, {method}"
            )
            if result is not None:
                results[each.case.key] = result
        return results

    def take_out_unequal(self, facts: Mapping[str, list[dict[str, Any]]], what: str) -> None:
        """Remove cases whose ranks have different digests, except `alone`, which averages nothing."""
        for each in self.running:
            digests = {fact["digest"] for fact in facts.get(each.case.key, [])}
            if len(digests) > 1 and each.case.key != "alone":
                each.take_out(f"{what} differ between ranks")

    def take_out(self, key: str, why: str) -> None:
        """Remove one case."""
        for each in self.running:
            if each.case.key == key:
                each.take_out(why)

    def measure(self, during: str, sample_s: float, at_most: int = 10_000) -> dict[str, Timing]:
        """Time every case in turn, round after round; return the timings of those without a failure, by key.

        Args:
            during: What is measured, for progress and notes.
            sample_s: Intended length of a sample in seconds.
            at_most: The maximum number of calls in one sample.
        """
        settings = self._settings
        timings: dict[str, Timing] = {}
        for each in self.running:
            iterations = self._calibrate(each, during, sample_s, at_most)
            timings[each.case.key] = Timing(iterations, [[] for _ in range(each.ranks)], settings.starts)
        rounds = math.ceil(settings.rounds / settings.starts)
        for start in range(settings.starts):
            if start > 0:
                self._restart(during, sample_s, at_most)
            for number in range(start * rounds, (start + 1) * rounds):
                settings.show(f"{during}: round {number + 1} of {rounds * settings.starts}")
                for each in self.running:
                    timing = timings[each.case.key]
                    for rank, seconds in enumerate(each.sample(during, timing.iterations)):
                        timing.samples[rank].append(seconds / timing.iterations)
        measured = {each.case.key: timings[each.case.key] for each in self.running if not each.failure}
        self._note_changes(during, measured)
        return measured

    def _note_changes(self, during: str, timings: Mapping[str, Timing]) -> None:
        """Compare our cases with those of `--before`.

        The interval is the 95 % confidence interval over rounds; with several starts, it reaches from the
        smallest to the largest of their medians.
        """
        for case in self.cases:
            now, before = timings.get(case.key), timings.get(f"{BEFORE}{case.key}")
            if now and before:
                change = ratio(now.samples, before.samples, now.starts)
                self._changes.append(
                    f"{during}, {case.label}: {change.median:.3f} ({change.low:.3f} .. {change.high:.3f}) of "
                    "the time that it took before."
                )

    def _restart(self, during: str, sample_s: float, at_most: int) -> None:
        for each in self.running:
            self._settings.show(f"{during}: restarting {each.case.label}")
            each.restart()
        self._prepare()
        for each in self.running:
            self._calibrate(each, during, sample_s, at_most)  # warms caches

    def _calibrate(self, running: _Running, during: str, sample_s: float, at_most: int) -> int:
        iterations = 1
        for goal_s in (sample_s / 4, sample_s):  # the first calls also warm caches and pages
            elapsed = running.sample(during, iterations)
            if elapsed:
                iterations = iterations_for(max(elapsed) / iterations, goal_s, at_most)
        return iterations


def rows_of(
    cases: Iterable[Case],
    measured: Mapping[str, Any],
    width: int,
    cells: Callable[[str], list[str]],
    heading: str = "",
) -> list[list[str]]:
    """Return a table row for each case: its label and `cells(key)`, or "failed" if it was not measured.

    Args:
        cases: The cases.
        measured: Contains the keys of the cases without a failure.
        width: Number of cells after the label.
        cells: Returns the cells of a case.
        heading: First cell of the first row; empty: rows begin with the label.
    """
    rows: list[list[str]] = []
    for case in cases:
        first = [heading if not rows else ""] if heading else []
        measures = cells(case.key) if case.key in measured else ["failed", *["-"] * (width - 1)]
        rows.append([*first, case.label, *measures])
    return rows


_shown = ""  # the text before the colon of the last line of progress


def show_progress(text: str) -> None:
    """Show progress: on a terminal in one line, elsewhere one line for each measurement."""
    global _shown
    what = text.partition(":")[0]
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text and what != _shown:
        print(text, file=sys.stderr, flush=True)
    _shown = what
