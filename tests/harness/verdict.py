"""Decides whether a rank ended as it should: a pure function of its end and of the declared end."""

from __future__ import annotations

import signal

from tests.harness.rank_main import Outcome
from tests.harness.report import Cause

# The ways in which a rank may be declared to end: killed by a signal, by os._exit(status), or by raising
# this.
Death = signal.Signals | int | type[BaseException]


def judge(
    status: int | None, outcome: Outcome | None, expected: Death | None, hung_because: str = ""
) -> tuple[Cause, str] | None:
    """The failure of a rank, as (cause, summary); None if it did not fail.

    Args:
        status: Its exit code; negative: the signal that killed it.
        outcome: The outcome that its program filed before it ended, if it came that far.
        expected: The death that was declared for it; None: it must return.
        hung_because: Not empty: it had to be killed.
    """
    if hung_because:
        return Cause.HUNG, f"was still running {hung_because}"
    assert status is not None
    if outcome is not None and outcome.error:
        declared = isinstance(expected, type) and outcome.error_type == expected.__name__
        return None if declared else (Cause.RAISED, f"raised {outcome.error_type}")
    if expected is not None:
        if outcome is None and status == _exit_status(expected):
            return None
        ended = "returned" if outcome else spell_exit(status)
        return Cause.MISBEHAVED, f"{ended}, but {_spell_death(expected)} was expected"
    if status != 0:
        return Cause.DIED, spell_exit(status)
    if outcome is None:
        return Cause.DIED, "exited with status 0 before its program returned"
    return None


def spell_exit(status: int) -> str:
    """An exit code in words: 'was killed by SIGKILL', 'exited with status 3'."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _exit_status(expected: Death) -> int | None:
    if isinstance(expected, signal.Signals):
        return -expected
    return expected if isinstance(expected, int) else None


def _spell_death(expected: Death) -> str:
    if isinstance(expected, signal.Signals):
        return expected.name
    return f"exit status {expected}" if isinstance(expected, int) else expected.__name__
