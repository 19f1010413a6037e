"""Finds out which rank failed first, and why.

The root cause is often not the rank that ended first: survivors of a dead rank raise within milliseconds,
while the dead one may take longer to be torn down. So ends that are consequences (an error that names a lost
peer, a signal from the launcher) yield to ends that are not, and only among equals does the time count.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import LaunchError, format_ranks

_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_CHAIN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# What C++ prints when the interpreter, at its end, unwinds a library's thread that asks for the GIL.
_TERMINATED = "terminate called without an active exception"
_LATE_THREAD = (
    "abort: most likely the program had ended, and a thread of a library was still at work when the "
    "interpreter ended; torch's Gloo does so, pytorch#190489"
)
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch's prefix of each line of a traceback
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LAST_LINES = 20
_AT_ONCE_S = 0.1  # the launcher cannot resolve shorter times between outputs: their order is not known
TIMED_OUT = 124  # exit status of a job that was stopped at its time-out, like that of timeout(1)

# Exceptions that a rank raises because of another one: ours, and those of torch's own backends.
_CONSEQUENCE = re.compile(
    r"paceline\.errors\.(PeerLostError|DeadlineError|GroupClosedError)\b"
    r"|Connection (was |is )?(closed|reset)( by peer)?"
    r"|Broken pipe"
    r"|torch\.distributed\.DistNetworkError"
)


@dataclass(frozen=True)
class RankEnd:
    rank: int
    pid: int
    status: int  # like Popen.returncode: negative for a signal
    after_s: float  # from the start to its last traceback, or to its end if it left none
    stopped_by: int = 0  # the last signal that the launcher sent it before its end; 0 if none
    output: str = ""  # the end of its standard error, or the traceback that spawn caught

    @property
    def is_failure(self) -> bool:
        return self.status != 0

    @property
    def signal(self) -> int:
        return max(0, -self.status)

    @property
    def is_stopped_by_launcher(self) -> bool:
        if not self.stopped_by:
            return False
        # Also programs that catch the signal, clean up, and exit with the corresponding status.
        return self.signal in (
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGKILL,
        ) or self.status in (
            128 + signal.SIGINT,
            128 + signal.SIGTERM,
            128 + signal.SIGHUP,
        )

    @property
    def exit_status(self) -> int:
        return 128 + self.signal if self.signal else self.status


def first_failure(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank to blame; None if none failed."""
    failures = [end for end in ends if end.is_failure]
    return min(failures, key=lambda end: (_severity(end), end.after_s), default=None)


def is_consequence(end: RankEnd) -> bool:
    """Whether the rank raised because of another one, according to its error (ours or torch's)."""
    return not end.signal and _CONSEQUENCE.search(exception_line(traceback_of(end))) is not None


def _severity(end: RankEnd) -> int:
    """0: a cause of its own; 1: a consequence of another rank's end; 2: stopped by the launcher."""
    if end.is_stopped_by_launcher:
        return 2
    return 1 if is_consequence(end) else 0


def describe_end(end: RankEnd) -> str:
    """One line that says how a rank ended."""
    if end.is_stopped_by_launcher:
        return f"stopped by the launcher ({signal_name(end.stopped_by)})"
    if end.signal == signal.SIGABRT and _TERMINATED in end.output:
        return f"killed by SIGABRT ({_LATE_THREAD})"
    if end.signal:
        return f"killed by {signal_name(end.signal)}{_MEANING.get(end.signal, '')}"
    raised = exception_line(traceback_of(end))
    if raised:
        return f"{raised.removeprefix('paceline.errors.')} (exit status {end.status})"
    return f"exit status {end.status}" if end.is_failure else "finished"


_MEANING = {
    int(signal.SIGSEGV): " (segmentation fault)",
    int(signal.SIGBUS): " (bus error: often a full /dev/shm or disk)",
    int(signal.SIGABRT): " (abort)",
    int(signal.SIGILL): " (an instruction that this CPU does not have)",
    int(signal.SIGFPE): " (integer division by zero)",
    int(signal.SIGKILL): " (by another process, or by the kernel for lack of memory)",
}


def not_passed_on(signum: int, ranks: str) -> str:
    name = signal_name(signum)
    return (
        f"paceline: {name} was not passed on to {ranks}, which would have ended by it. "
        f"A script that wants it installs a handler: signal.signal(signal.{name}, ...)"
    )


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def exception_line(traceback: str) -> str:
    lines = traceback.splitlines()
    headers = [index for index, line in enumerate(lines) if _is_header(line)]
    for line in lines[headers[-1] + 1 :] if headers else lines:
        if line and not line[0].isspace() and not line.startswith(("|", "+")):
            return line
    return ""


def find_traceback(output: str) -> str:
    """The last traceback in `output`, with the exceptions in its chain; "" if there is none.

    Also finds Python's "Fatal Python error" with the stacks after it, and a SyntaxError of the script itself,
    which Python prints without a header.
    """
    lines = _plain(output).splitlines()
    starts = [index for index, line in enumerate(lines) if _is_header(line)]
    if not starts:
        bare = [index for index, line in enumerate(lines) if re.match(r'  File ".*", line \d+$', line)]
        return "\n".join(lines[bare[0] :]) if bare and "Error: " in lines[-1] else ""
    start = starts.pop()
    while starts and any(line in _CHAIN for line in lines[starts[-1] : start]):
        start = starts.pop()
    return "\n".join(lines[start:])


def _plain(output: str) -> str:
    """`output` without colours, and without torch's prefix of each line of a traceback."""
    return _RANK_PREFIX.sub("", _ANSI.sub("", output))


def _is_header(line: str) -> bool:
    return line.endswith(_TRACEBACK) or line.startswith(_FATAL)


def traceback_of(end: RankEnd) -> str:
    """The traceback that ended the rank; "" if no exception ended it.

    Python's exit status after an exception is 1. With another status, the traceback was logged, and the rank
    survived it.
    """
    text = find_traceback(end.output)
    return text if end.status == 1 or (end.signal and text.startswith(_FATAL)) else ""


def evidence(end: RankEnd) -> str:
    lines = _plain(end.output).splitlines()
    return traceback_of(end) or "\n".join(lines[-_LAST_LINES:])


def alike(ends: Sequence[RankEnd], first: RankEnd) -> list[RankEnd]:
    if not traceback_of(first):
        return [first]
    return [end for end in ends if end.is_failure and describe_end(end) == describe_end(first)]


def _without_numbers(end: RankEnd) -> tuple[str, ...]:
    """Where a rank failed, and its error without numbers: one traceback serves ranks that are equal in both.

    A text such as "device_ids=1 is not usable" differs from rank to rank only in the number of the rank.
    """
    frames = [line for line in traceback_of(end).splitlines() if line.lstrip().startswith('File "')]
    return (*frames, re.sub(r"\d+", "N", describe_end(end)))


def summary(ends: Sequence[RankEnd], first: RankEnd) -> str:
    """One line: which ranks failed, which of them first if that is known, and how."""
    same = alike(ends, first)
    rivals = [end for end in ends if end not in same and end.is_failure and not _severity(end)]
    which = f"{format_ranks(end.rank for end in same)} of {len(ends)}"
    if len(ends) == 1:
        which = "the only rank failed"
    elif len(same) == len(ends):
        which = f"all {len(ends)} ranks raised the same error"
    elif len(same) > 1:
        which += " raised the same error"
    elif _severity(first) or any(end.after_s - first.after_s < _AT_ONCE_S for end in rivals):
        which += " failed"
    else:
        which += " failed first"
    pid = f" (pid {first.pid})" if len(same) == 1 else ""
    return f"{which}, after {first.after_s:.1f} s{pid}: {describe_end(first)}"


def others(ends: Sequence[RankEnd], first: RankEnd) -> list[str]:
    ranks: dict[str, list[int]] = {}
    same = alike(ends, first)
    for end in sorted(ends, key=lambda end: end.rank):
        if end not in same:
            ranks.setdefault(describe_end(end), []).append(end.rank)
    return [f"{format_ranks(who)}: {what}" for what, who in ranks.items()]


def render(
    ends: Sequence[RankEnd],
    *,
    raw: Collection[int] = (),
    held: Collection[int] = (),
    log_dir: str | None = None,
) -> str:
    """The launcher's report about a failed job. The first failure comes last, where people look."""
    first = first_failure(ends)
    assert first is not None
    parts = []
    same = alike(ends, first)
    rest = others(ends, first)
    if rest:
        parts.append("\n".join(["paceline: the other ranks:", *(f"  {line}" for line in rest)]))
    causes = {_without_numbers(end): end for end in ends if end.rank in held and not _severity(end)}
    known = _without_numbers(first)
    shown = [end for key, end in causes.items() if end not in same and key != known]
    if not any(end.rank in raw for end in same):  # else it was shown directly above
        shown.append(first)
    for end in shown:
        if said := evidence(end):
            title = "traceback" if traceback_of(end) else "last lines on standard error"
            parts.append(f"paceline: rank {end.rank}'s {title}:\n{said}")
    last = f"paceline: {summary(ends, first)}"
    if log_dir is not None:
        last += f"\n  its whole output is in {log_dir}/rank{first.rank}.log"
    return "\n" + "\n\n".join([*parts, last])


def launch_error(ends: Sequence[RankEnd], name: str) -> LaunchError:
    first = first_failure(ends)
    assert first is not None
    failures = sorted(
        (end for end in ends if end.is_failure), key=lambda end: (end is not first, end.after_s)
    )
    summary_line = summary(ends, first)
    return LaunchError(
        summary_line[0].upper() + summary_line[1:],
        where=f"{name} on {len(ends)} ranks",
        seen="\n".join(others(ends, first)),
        got=evidence(first),
        rank=first.rank,
        pid=first.pid,
        exit_status=first.exit_status,
        signal=first.signal,
        traceback=traceback_of(first),
        failures=tuple(failures),
    )


def to_json(end: RankEnd) -> dict[str, Any]:
    return asdict(end)


def from_json(fields: dict[str, Any]) -> RankEnd:
    return RankEnd(**fields)
