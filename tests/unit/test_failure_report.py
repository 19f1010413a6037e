"""The rank that is to blame."""

from __future__ import annotations

import pickle
import signal

import pytest

from paceline.launch.failure_report import (
    RankEnd,
    describe_end,
    exception_line,
    find_traceback,
    first_failure,
    launch_error,
    render,
)

FRAME = '  File "train.py", line 3, in <module>\n    step()\n'
BOOM = f"Traceback (most recent call last):\n{FRAME}ValueError: boom\n"
LOST = (
    f"Traceback (most recent call last):\n{FRAME}paceline.errors.PeerLostError: rank 2 died.\n  hint  look\n"
)
GLOO = (
    f"Traceback (most recent call last):\n{FRAME}RuntimeError: [x.cc:1] Connection closed by peer [::1]:9\n"
)


def end(rank: int, status: int, after_s: float = 1.0, output: str = "", stopped_by: int = 0) -> RankEnd:
    return RankEnd(rank, 100 + rank, status, after_s, stopped_by, output)


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ([end(0, 0), end(1, 0)], None),
        ([end(0, 1, 2.0, BOOM), end(1, 1, 1.0, BOOM)], 1),
        ([end(0, 1, 1.0, LOST), end(1, 1, 2.0, BOOM)], 1),
        ([end(0, 1, 1.0, GLOO), end(1, 1, 2.0, BOOM)], 1),
        ([end(0, 1, 1.0, LOST), end(1, -9, 2.0)], 1),
        ([end(0, 1, 1.0, LOST), end(1, 3, 2.0)], 1),
        ([end(0, 1, 2.0, LOST), end(1, 1, 1.0, LOST)], 1),
        ([end(0, -15, 1.0, stopped_by=signal.SIGTERM), end(1, 1, 2.0, LOST)], 1),
        ([end(0, -9, 1.0, stopped_by=signal.SIGKILL), end(1, 3, 2.0)], 1),
        # Received SIGTERM, but died of another cause: not the launcher's doing.
        ([end(0, -11, 1.0, stopped_by=signal.SIGTERM), end(1, 1, 0.5, LOST)], 0),
        # A traceback that was logged and survived, long before exit status 3.
        ([end(0, 3, 5.0, LOST), end(1, 1, 6.0, BOOM)], 0),
    ],
)
def test_first_failure(ends: list[RankEnd], rank: int | None) -> None:
    first = first_failure(ends)
    assert (None if first is None else first.rank) == rank


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (end(0, 0), "finished"),
        (end(0, 3), "exit status 3"),
        (end(0, 1, output=BOOM), "ValueError: boom (exit status 1)"),
        (end(0, 1, output=LOST), "PeerLostError: rank 2 died. (exit status 1)"),
        (end(0, -11), "killed by SIGSEGV (segmentation fault)"),
        (end(0, -6), "killed by SIGABRT (abort)"),
        (
            end(0, -6, output="terminate called without an active exception\n"),
            "killed by SIGABRT (abort: most likely the program had ended, and a thread of a library was "
            "still at work when the interpreter ended; torch's Gloo does so, pytorch#190489)",
        ),
        (end(0, -40), "killed by signal 40"),
        (end(0, -15, stopped_by=signal.SIGTERM), "stopped by the launcher (SIGTERM)"),
        (end(0, 143, stopped_by=signal.SIGTERM), "stopped by the launcher (SIGTERM)"),
    ],
)
def test_describe_end(one: RankEnd, words: str) -> None:
    assert describe_end(one) == words


def test_the_exit_status_is_that_of_a_shell() -> None:
    assert [end(0, status).exit_status for status in (0, 3, -9)] == [0, 3, 137]


def test_find_traceback_takes_the_last_with_its_causes() -> None:
    cause = BOOM + "\nThe above exception was the direct cause of the following exception:\n\n" + LOST
    text = "noise\n" + BOOM + "more noise\n" + cause + "after\n"
    assert find_traceback(text) == (cause + "after").rstrip("\n")
    assert exception_line(find_traceback(text)) == "paceline.errors.PeerLostError: rank 2 died."


def test_find_traceback_without_colours() -> None:
    text = BOOM.replace("ValueError", "\x1b[1;35mValueError\x1b[0m")
    assert find_traceback(text) == BOOM.rstrip("\n")


def test_find_traceback_of_a_syntax_error() -> None:
    text = '  File "train.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    assert exception_line(find_traceback("warning\n" + text)) == "SyntaxError: invalid syntax"


def test_find_traceback_of_a_fatal_error() -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File x\n"
    )
    assert find_traceback(BOOM + text) == text.rstrip("\n")


@pytest.mark.parametrize("text", ["", "\n", "just words\n", "Error: no\n"])
def test_find_traceback_in_none(text: str) -> None:
    assert find_traceback(text) == ""
    assert exception_line(find_traceback(text)) == ""


ENDS = [end(0, 1, 1.0, LOST), end(1, 1, 1.0, LOST), end(2, 1, 2.0, BOOM), end(3, 0)]


def test_the_report_ends_with_the_first_failure() -> None:
    lines = render(ENDS, log_dir="logs").splitlines()
    assert "  ranks 0-1: PeerLostError: rank 2 died. (exit status 1)" in lines
    assert "  rank 3: finished" in lines
    assert lines.index("ValueError: boom") > lines.index("  rank 3: finished")
    assert lines[-2] == (
        "paceline: rank 2 of 4 failed first, after 2.0 s (pid 102): ValueError: boom (exit status 1)"
    )
    assert lines[-1].endswith("logs/rank2.log")


def test_an_error_that_all_ranks_raise_stands_once() -> None:
    text = render([end(rank, 1, 1.5 + rank / 100, BOOM) for rank in range(8)], held=range(8))
    assert text.count("Traceback") == 1
    assert "the other ranks" not in text
    assert text.splitlines()[-1] == (
        "paceline: all 8 ranks raised the same error, after 1.5 s: ValueError: boom (exit status 1)"
    )


def test_what_stands_right_above_is_not_repeated() -> None:
    text = render([end(0, 1, 1.0, BOOM), end(1, 1, 1.1, BOOM)], raw=[0], held=[1])
    assert text.splitlines()[1:] == [
        "paceline: all 2 ranks raised the same error, after 1.0 s: ValueError: boom (exit status 1)"
    ]


def test_another_error_of_another_rank_is_shown_unless_it_was() -> None:
    ends = [end(0, 1, 1.00, BOOM), end(1, 1, 1.05, BOOM.replace("boom", "bang")), end(2, 1, 1.1, LOST)]
    text = render(ends, held=[0, 1, 2])
    assert text.count("Traceback") == 2
    assert text.index("\nValueError: bang") < text.index("\nValueError: boom")
    assert "  rank 2: PeerLostError: rank 2 died. (exit status 1)" in text
    assert text.splitlines()[-1].startswith("paceline: rank 0 of 3 failed, after 1.0 s")
    assert render(ends, held=[0, 2]).count("Traceback") == 1


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([end(0, 1, 1.0, BOOM), end(1, 1, 1.0, LOST)], "rank 0 of 2 failed first"),
        ([end(0, 1, 1.0, BOOM), end(1, -9, 9.0)], "rank 0 of 2 failed first"),
        ([end(0, 1, 1.0, BOOM), end(1, -9, 1.01)], "rank 0 of 2 failed,"),
        ([end(0, 1, 1.0, LOST), end(1, 0, 0.9)], "rank 0 of 2 failed,"),
        ([end(0, 1, 1.0, BOOM), end(1, 1, 1.0, BOOM), end(2, 0)], "ranks 0-1 of 3 raised the same error"),
        ([end(0, 3, 1.0), end(1, 3, 1.0)], "rank 0 of 2 failed,"),
    ],
)
def test_who_was_first_is_said_only_where_it_is_known(ends: list[RankEnd], words: str) -> None:
    assert render(ends).splitlines()[-1].startswith(f"paceline: {words}")


def test_the_error_of_spawn_carries_everything() -> None:
    error = pickle.loads(pickle.dumps(launch_error(ENDS, "train")))
    assert (error.rank, error.pid, error.exit_status, error.signal) == (2, 102, 1, 0)
    assert error.traceback == BOOM.rstrip("\n")
    assert [one.rank for one in error.failures] == [2, 0, 1]
    assert str(error).startswith("Rank 2 of 4 failed first")


def test_an_error_that_differs_only_in_the_number_of_the_rank_has_one_traceback() -> None:
    ends = [end(rank, 1, 1.0 + rank / 100, BOOM.replace("boom", f"device_ids={rank}")) for rank in range(3)]
    text = render(ends, held=range(3))
    assert text.count("Traceback") == 1
    assert "  rank 1: ValueError: device_ids=1 (exit status 1)" in text
    assert "  rank 2: ValueError: device_ids=2 (exit status 1)" in text
    assert "rank 0's traceback" in text
    elsewhere = BOOM.replace("line ", "line 1").replace("boom", "device_ids=3")
    assert render([*ends, end(3, 1, 1.05, elsewhere)], held=range(4)).count("Traceback") == 2
