"""Runs one program as several ranks, each in its own process, and checks every one of them.

`@ranks(4)` turns a test into one rank's program; `run_ranks(program, 4)` hands what the ranks returned
to a test that compares them; `run_side_by_side` makes several such runs at a time. No test that uses one
of them can pass while a rank raised, was killed, left early, hung or left something behind.
docs/design/testing.md tells how.

    decorator.py     what a test writes
    run.py           the parent: starts the ranks, waits with a deadline
    side_by_side.py  several runs at a time, where they wait most of it
    server.py        the fork servers, as a process that starts ranks sees them
    shared_servers.py  the process that starts each of them once, for all processes of a run
    preload.py       what these have imported before any rank starts
    huge_pages.py    how a server's memory lies, so that it forks fast
    warm.py          a Python with a framework imported, for programs that start others
    command.py       a module of the tests as a command of its own
    rank_main.py     the child: one rank
    verdict.py       whether a rank did what it should
    report.py        what pytest shows
    leftovers.py     what nobody may leave behind
"""

from tests.harness.decorator import kept_ranks, needs_paddle, ranks
from tests.harness.report import RanksFailed
from tests.harness.run import run_ranks
from tests.harness.side_by_side import run_side_by_side

__all__ = ["RanksFailed", "kept_ranks", "needs_paddle", "ranks", "run_ranks", "run_side_by_side"]
