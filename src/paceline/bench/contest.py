"""Runs contenders against each other: start all, then round after round, one sample each.

Imports the rest of the bench, and launch. A contender that fails is taken out, its reason kept; the others go
on.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from paceline.bench.conductor import PACKAGE, ContenderFailed, Job, Launch
from paceline.bench.machine import usable_cores
from paceline.bench.rounds import iterations_for, ratio
from paceline.launch.placement import assign_cores
from paceline.launch.process import WITHOUT_FOLDER
from paceline.launch.topology import read_machine


def unbound(ranks: int) -> Launch:
    """As torch's launcher starts processes: anywhere."""
    return Launch()


def bound(ranks: int) -> Launch:
    """As `paceline run` starts processes: each on cores of its own, where there are enough."""
    machine = read_machine()
    cores = None if machine.is_cut_by_quota else assign_cores(machine.cpus, ranks)
    return Launch(cores=tuple(cores or ()))


def no_torch() -> str:
    """Why contenders that need torch can't run, or ""."""
    return "" if importlib.util.find_spec("torch") else "torch is not installed"


def no_paddle() -> str:
    """Why contenders that need PaddlePaddle can't run, or ""."""
    return "" if importlib.util.find_spec("paddle") else "PaddlePaddle is not installed"


@dataclass(frozen=True)
class Installation:
    """Another version of Paceline.

    Attributes:
        python: Its interpreter.
        package: The package in which it has its bench.
    """

    python: str
    package: str = PACKAGE

    @staticmethod
    def of(python: str) -> Installation:
        """The one that this interpreter imports."""
        look = f"import importlib.util as util; print(util.find_spec({PACKAGE!r}) is not None)"
        code = f"{WITHOUT_FOLDER}; {look}"
        ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        # Until 2026-11-22 the bench was a part of another package.
        return Installation(python, PACKAGE if ended.stdout.strip() == "True" else "paceline.observe.bench")


@dataclass(frozen=True)
class Entry:
    """One line of a bench's list of contenders.

    Attributes:
        key: Name on the command line and in JSON.
        label: Name in tables.
        target: `module:class` of the object that each rank makes.
        options: Keyword arguments for it.
        missing: Returns why it can't run here, or "".
        launch: Returns how to start its processes, given the number of ranks.
        processes: How many they are; 0: as many as the user wants ranks.
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
        """Whether a failure of it is a failure of Paceline."""
        return self.key.startswith("paceline")

    def before(self, other: Installation) -> Entry:
        """The same with the Paceline of another installation."""
        return replace(
            self,
            key=f"{BEFORE}{self.key}",
            label=f"{self.label}, before",
            target=self.target.replace(f"{PACKAGE}.", f"{other.package}."),
            launch=lambda ranks: replace(self.launch(ranks), python=other.python, package=other.package),
        )


@dataclass(frozen=True)
class Plan:
    """What the user asked for, of every bench.

    Attributes:
        ranks: Number of processes of each contender.
        rounds: Samples of each contender.
        only: Keys of the contenders to run; empty: all.
        command: The command that makes the same report again.
        say: Called with a line whenever something worth telling happens.
        environment: What all contenders find in their environment.
        before: Another version of Paceline, which takes part beside this one.
        starts: How often the processes of all contenders are started anew for each measurement.
    """

    ranks: int
    rounds: int
    only: tuple[str, ...]
    command: str
    say: Callable[[str], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Installation | None = None
    starts: int = 1

    def chosen(self, entries: Iterable[Entry]) -> list[Entry]:
        """The `entries` that the user wants."""
        chosen = [entry for entry in entries if not self.only or entry.key in self.only]
        if self.before is None:
            return chosen
        # Side by side, so that the two meet the same moments.
        twins = [[entry, entry.before(self.before)] if entry.is_ours else [entry] for entry in chosen]
        return [entry for pair in twins for entry in pair]

    def able(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[str]]:
        """Those chosen that can run here, and a note on each that can't."""
        chosen = self.chosen(entries)
        absent = [f"{entry.label} is absent: {entry.missing()}." for entry in chosen if entry.missing()]
        return [entry for entry in chosen if not entry.missing()], absent

    def contest(self, entries: Iterable[Entry]) -> Contest:
        """A contest of those chosen; start it with `with`."""
        return Contest(self.chosen(entries), self.ranks, self.say, self.environment, self.starts)

    def notes(self, contest: Contest) -> list[str]:
        """What every report says of its contest: too few cores, who is absent, who failed and why."""
        cores = usable_cores()
        notes = [f"{self.ranks} ranks share {cores} cores."] if self.ranks > cores else []
        if self.starts > 1:
            notes.append(
                f"All processes were started {self.starts} times, and the rounds divided among the starts: "
                "two processes that run the same program differ by a few percent for as long as they live."
            )
        notes += [f"{label} is absent: {why}." for label, why in contest.absent.items()]
        return notes + [f"{label} failed: {why}" for label, why in contest.failures.items()]


BEFORE = "before_"


def changes(contest: Contest, during: str, timings: Mapping[str, Timing]) -> list[str]:
    """What each of ours takes as a part of what it took before, a note on each.

    The interval is the 95 % confidence interval over rounds; with several starts, the smallest and the
    largest of their medians.
    """
    notes = []
    for contender in contest.contenders:
        key, label = contender.entry.key, contender.entry.label
        before = f"{BEFORE}{key}"
        if key in timings and before in timings:
            change = ratio(timings[key].samples, timings[before].samples, timings[key].starts)
            notes.append(
                f"{during}, {label}: {change.median:.3f} ({change.low:.3f} .. {change.high:.3f}) of the time "
                "that it took before."
            )
    return notes


@dataclass
class Timing:
    """The samples of one contender: `samples[rank][round]`, seconds per call; each start has as many."""

    iterations: int
    samples: list[list[float]]
    starts: int = 1


class Contender:
    """An entry and its running job; remembers why it failed."""

    def __init__(self, entry: Entry, ranks: int, environment: Mapping[str, str]) -> None:
        self.entry = entry
        self.failure = ""
        self.ranks = entry.processes or ranks
        launch = entry.launch(self.ranks)
        self._launch = replace(launch, environment={**environment, **launch.environment})
        self.job = self._new_job()

    def _new_job(self) -> Job:
        return Job(self.entry.label, self.entry.target, self.ranks, self._launch, self.entry.options)

    def start_anew(self) -> None:
        """End the job, and start another one in its place."""
        if not self.failure:
            self.job.close()
            self.job = self._new_job()
            self.attempt(lambda job: job.start(), "start")

    def attempt(self, action: Callable[[Job], Any], during: str) -> Any:
        """Do something with the job; on failure remember why, end the job and return None."""
        if self.failure:
            return None
        try:
            return action(self.job)
        except ContenderFailed as error:
            self.take_out(f"{during}: {error}")
            return None

    def take_out(self, why: str) -> None:
        """End the job and remember why."""
        self.failure = why
        self.job.close()


class Contest:
    """The contenders of one bench, started. Use with `with`; ends every process that it started.

    Args:
        entries: Who takes part; those that can't run here are told in `absent` and left out.
        ranks: Number of processes of each.
        say: Called with a line whenever something worth telling happens.
        environment: What all of them find in their environment.
        starts: How often their processes are started anew for each measurement.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        ranks: int,
        say: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        starts: int = 1,
    ) -> None:
        self.absent: dict[str, str] = {}
        self.contenders: list[Contender] = []
        self._say = say
        self._starts = starts
        self._prepare: Callable[[], object] = lambda: None
        for entry in entries:
            why = entry.missing()
            if why:
                self.absent[entry.label] = why
            else:
                self.contenders.append(Contender(entry, ranks, environment or {}))

    def __enter__(self) -> Contest:
        try:
            for contender in self.contenders:
                self._say(f"starting {contender.entry.label}")
                contender.attempt(lambda job: job.start(), "start")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def failures(self) -> dict[str, str]:
        """Why, by label, of those that failed."""
        return {c.entry.label: c.failure for c in self.contenders if c.failure}

    @property
    def ours_failed(self) -> bool:
        """Whether something of Paceline failed."""
        return any(c.failure and c.entry.is_ours for c in self.contenders)

    def among(self, keys: Iterable[str]) -> Contest:
        """A contest of those of these that have such keys; they run on after it."""
        chosen = set(keys)
        some = copy.copy(self)
        some.contenders = [c for c in self.contenders if c.entry.key.removeprefix(BEFORE) in chosen]
        return some

    def prepare(self, during: str, **arguments: Any) -> dict[str, list[Any]]:
        """Have every contender prepare what is measured next; after each start again."""
        self._prepare = lambda: self.on_all("prepare", during, **arguments)
        return self.on_all("prepare", during, **arguments)

    def on_all(self, method: str, during: str, **arguments: Any) -> dict[str, list[Any]]:
        """Call a method on every contender, one after the other; results by key of the good."""
        results = {}
        for contender in self.contenders:
            result = contender.attempt(
                lambda job: job.call(method, limit_s=120.0, **arguments), f"{during}, {method}"
            )
            if result is not None:
                results[contender.entry.key] = result
        return results

    def measure(self, during: str, rounds: int, sample_s: float, at_most: int = 10_000) -> dict[str, Timing]:
        """Time every contender in turn, `rounds` times round; by key, of those that did not fail."""
        timings: dict[str, Timing] = {}
        for contender in self.contenders:
            iterations = self._calibrate(contender, during, sample_s, at_most)
            timings[contender.entry.key] = Timing(
                iterations, [[] for _ in range(contender.ranks)], self._starts
            )
        each = math.ceil(rounds / self._starts)
        for start in range(self._starts):
            if start > 0:
                self._start_anew(during, sample_s, at_most)
            for number in range(start * each, (start + 1) * each):
                self._say(f"{during}: round {number + 1} of {each * self._starts}")
                for contender in self.contenders:
                    timing = timings[contender.entry.key]
                    for rank, seconds in enumerate(_sample(contender, during, timing.iterations)):
                        timing.samples[rank].append(seconds / timing.iterations)
        return {c.entry.key: timings[c.entry.key] for c in self.contenders if not c.failure}

    def _start_anew(self, during: str, sample_s: float, at_most: int) -> None:
        for contender in self.contenders:
            self._say(f"{during}: starting {contender.entry.label} anew")
            contender.start_anew()
        self._prepare()
        for contender in self.contenders:
            self._calibrate(contender, during, sample_s, at_most)  # warms it

    def _calibrate(self, contender: Contender, during: str, sample_s: float, at_most: int) -> int:
        iterations = 1
        for goal_s in (sample_s / 4, sample_s):  # the first calls also warm caches and pages
            elapsed = _sample(contender, during, iterations)
            if elapsed:
                iterations = iterations_for(max(elapsed) / iterations, goal_s, at_most)
        return iterations

    def _close(self) -> None:
        for contender in self.contenders:
            contender.job.close()


def _sample(contender: Contender, during: str, iterations: int) -> Sequence[float]:
    elapsed = contender.attempt(lambda job: job.call("time", limit_s=120.0, iterations=iterations), during)
    return elapsed or []


def status_line(text: str) -> None:
    """Show what is going on, on a terminal only: one line of standard error, replaced each time."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
