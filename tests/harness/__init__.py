"""Runs one program as several ranks, each in its own process, and checks every one of them.

`@ranks(4)` turns a test into the program of one rank; `run_ranks(program, 4)` returns the results of the
ranks to a test that compares them; `run_side_by_side` makes several such runs at a time. No test that uses
one of them can pass if a rank raised, was killed, left early, hung or left something behind.
docs/design/testing.md explains how.

decorator.py     the decorator that tests use
run.py           the parent: starts the ranks, waits with a deadline
side_by_side.py  several runs at a time, for runs that mostly wait
server.py        the fork servers, as seen by a process that starts ranks
shared_servers.py  the process that starts each server once, for all processes of a run
preload.py       the modules that a server imports before any rank starts
huge_pages.py    moves a server's memory into huge pages, so that it forks fast
warm.py          a Python with a framework imported, for programs that start others
command.py       runs a module of the tests as a command
rank_main.py     the child: one rank
verdict.py       decides whether a rank ended as it should
report.py        the report that pytest shows
leftovers.py     finds names, files and processes that a run has left behind
"""

from tests.harness.decorator import kept_ranks, needs_paddle, ranks
from tests.harness.report import RanksFailed
from tests.harness.run import run_ranks
from tests.harness.side_by_side import run_side_by_side

__all__ = ["RanksFailed", "kept_ranks", "needs_paddle", "ranks", "run_ranks", "run_side_by_side"]
