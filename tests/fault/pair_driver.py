"""Runs the cases of `pairs.py`, several at once: a harness rank, which is in no group, forks their ranks.

Three ranks make a *team*, which runs one case after another. While the survivors of a case wait for a rank
that is stopped, they need no core, so many such cases run side by side.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import ClassVar

from tests.fault.faults import Action
from tests.fault.pair_rank import BOARD_BYTES, receive, send, serve
from tests.fault.pairs import WORLD_SIZE, CaseReport, Ended, Pair, has_struck, judge
from tests.harness import run_ranks

_AT_ONCE = 6
_WAITING_AT_ONCE = 32
_PATIENCE_S = 120.0
_MOST_CASES = 100  # of one process: this bounds any leaks


@dataclass(frozen=True)
class Findings:
    """The results of many cases.

    Attributes:
        cases: How many there were.
        struck: In how many of them all faults struck.
        partly: In how many only the first of two did.
        unstruck: In how many all ranks came to the end before any did.
        cpu_s: Seconds of a core that they took, on all ranks.
        wrong: One line for each case that went wrong.

    In the other cases a rank gave up before: on a busy machine, it took a slow rank for a stopped one.
    """

    cases: int
    struck: int
    partly: int
    unstruck: int
    cpu_s: float
    wrong: list[str] = field(default_factory=list)


def run_pairs(pairs: Sequence[Pair], framework: str = "torch") -> Findings:
    """Run the cases, and judge them.

    Raises:
        RanksFailed: The driver itself failed, or something was left behind.
    """
    answers, cpu_s = _run(pairs, framework)
    struck = partly = unstruck = 0
    wrong = []
    for pair, ended in zip(pairs, answers, strict=True):
        if found := judge(pair, ended):
            wrong.append(f"{pair}: {found}")
        if has_struck(pair.strikes, ended):
            struck += 1
        elif has_struck(pair.strikes[:1], ended):
            partly += 1
        elif not any(each.first is not None and each.first.error for each in ended):
            unstruck += 1
    return Findings(len(pairs), struck, partly, unstruck, cpu_s, wrong)


def run_cases(pairs: Sequence[Pair], framework: str = "torch") -> list[list[Ended]]:
    """The end of each rank of each case. The ranks have imported `framework` already."""
    return _run(pairs, framework)[0]


def _run(pairs: Sequence[Pair], framework: str) -> tuple[list[list[Ended]], float]:
    answers: list[tuple[list[list[Ended]], float]]
    kwargs = {"pairs": list(pairs)}
    answers = run_ranks(_drive, 1, kwargs, group=None, framework=framework, deadline_s=3000.0)
    return answers[0]


def _drive(_: int, pairs: Sequence[Pair]) -> tuple[list[list[Ended]], float]:
    ended: dict[int, list[Ended]] = {}
    waiting = [number for number, pair in enumerate(pairs) if pair.struck(Action.STOP)]
    others = [number for number, pair in enumerate(pairs) if not pair.struck(Action.STOP)]
    gc.collect()
    gc.freeze()  # a fork would copy the pages of garbage first
    with _woken_by_children() as bell:
        for numbers, at_once in ((waiting, _WAITING_AT_ONCE), (others, _AT_ONCE)):
            ended.update(_run_all(pairs, numbers, at_once, bell))
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(each.ru_utime + each.ru_stime for each in spent)
    return [ended[number] for number in range(len(pairs))], cpu_s


@contextmanager
def _woken_by_children() -> Iterator[int]:
    """A descriptor that becomes readable when a child has ended or stopped."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(reading)
        os.close(writing)


def _run_all(
    pairs: Sequence[Pair], numbers: Iterable[int], at_once: int, bell: int
) -> Iterator[tuple[int, list[Ended]]]:
    left = list(reversed(list(numbers)))
    # Starting a team costs as much as some cases.
    teams = [_Team(f"{at_once}.{place}") for place in range(min(at_once, -(-len(left) // 3)))]
    try:
        running: dict[_Team, int] = {}
        while left or running:
            for team in teams:
                if left and team not in running:
                    running[team] = left.pop()
                    team.start(pairs[running[team]])
            by_fd = {fd: team for team in running for fd in team.fds()}
            ready, _, _ = select.select([bell, *by_fd], [], [], 1.0)
            if bell in ready:
                os.read(bell, 4096)
            concerned = {by_fd[fd] for fd in ready if fd != bell}
            for team in list(running) if bell in ready or not ready else concerned:
                ended = team.advance()
                if ended is not None:
                    yield running.pop(team), ended
    finally:
        for team in teams:
            team.end()


class _Team:
    """The ranks of one case after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._board = mmap.mmap(-1, BOARD_BYTES)  # shared with the forks, zeroed
        self._ranks: list[_Rank | None] = [None] * WORLD_SIZE
        self._cases = 0
        self._was_asked = False
        self._until_s = 0.0

    def fds(self) -> list[int]:
        return [rank.reading for rank in self._living()]

    def start(self, pair: Pair) -> None:
        self._cases += 1
        if self._cases % _MOST_CASES == 0:
            self.end()
        for number in range(WORLD_SIZE):
            rank = self._ranks[number] or _Rank(number, self._board)
            self._ranks[number] = rank
            rank.begin()
            rank.send((pair, f"{os.environ['PACELINE_JOB_ID']}/{self._name}/{self._cases}"))
        self._was_asked = False
        self._until_s = time.monotonic() + _PATIENCE_S

    def advance(self) -> list[Ended] | None:
        """Continue the case; return how it ended, once it has.

        When all ranks have reported their steps, or are stopped or dead, the stopped ranks are continued.
        When these have reported, too, all are asked once more.
        """
        ranks = [rank for rank in self._ranks if rank is not None]
        for rank in ranks:
            rank.look()
        is_late = time.monotonic() > self._until_s
        if not is_late and any(rank.is_busy(reports=2 if self._was_asked else 1) for rank in ranks):
            return None
        if not is_late and not self._was_asked:
            stopped = [rank for rank in ranks if rank.is_stopped]
            for rank in stopped:
                rank.let_continue()
            if not stopped:
                self._was_asked = True
                for rank in ranks:
                    if rank.status is None:
                        rank.send("and now?")
            self._until_s = time.monotonic() + _PATIENCE_S
            if any(rank.status is None for rank in ranks):
                return None
        ended = [rank.how_it_ended() for rank in ranks]
        for number, rank in enumerate(ranks):
            if is_late or rank.status is not None:
                rank.end()
                self._ranks[number] = None
        return ended

    def end(self) -> None:
        for rank in self._living():
            rank.end()
        self._ranks = [None] * WORLD_SIZE

    def _living(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank is not None and rank.status is None]


class _Rank:
    """One forked process, as the driver sees it."""

    _open_fds: ClassVar[set[int]] = set()  # of all ranks: a fork has them too, and closes them

    def __init__(self, number: int, board: mmap.mmap) -> None:
        self.reading, to_driver = os.pipe()
        from_driver, self._writing = os.pipe()
        self._open_fds.update((self.reading, self._writing))
        self.status: int | None = None  # once it has ended; negative: the signal
        self.is_stopped = False
        self._reports: list[CaseReport] = []
        self.pid = os.fork()
        if self.pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in self._open_fds:
                os.close(fd)
            serve(number, board, from_driver, to_driver)
        os.close(to_driver)
        os.close(from_driver)

    def begin(self) -> None:
        """Forget the previous case."""
        self._reports = []

    def send(self, what: object) -> None:
        """Send a message; if the rank has died meanwhile, the next `look` notices that."""
        with suppress(BrokenPipeError):
            send(self._writing, what)

    def look(self) -> None:
        """Receive its new reports, and note whether it has stopped or ended."""
        while self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if not done:
                break
            self.is_stopped = os.WIFSTOPPED(status)
            if not self.is_stopped:
                self.status = os.waitstatus_to_exitcode(status)
        while select.select([self.reading], [], [], 0)[0]:
            report = receive(self.reading)
            if report is None:
                break
            self._reports.append(report)

    def is_busy(self, reports: int) -> bool:
        """True if it runs, and has sent fewer than `reports` reports."""
        return self.status is None and not self.is_stopped and len(self._reports) < reports

    def let_continue(self) -> None:
        self.is_stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def how_it_ended(self) -> Ended:
        first, last = (*self._reports, None, None)[:2]
        return Ended(first, last, self.status == -signal.SIGKILL)

    def end(self) -> None:
        for fd in (self.reading, self._writing):
            os.close(fd)
            self._open_fds.discard(fd)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL
