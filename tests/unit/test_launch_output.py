"""Lines of several ranks on one screen."""

from __future__ import annotations

import itertools
import os
import pty
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.output import LineBuffer, Screen, TracebackKeeper
from paceline.launch.output_pipes import RankLog

TEXT = st.binary(max_size=60).map(
    lambda data: data.translate(bytes(b"ab\n\r"[byte % 4] for byte in range(256)))
)


@given(TEXT, st.lists(st.integers(0, 60)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, cuts: list[int]) -> None:
    whole = LineBuffer()
    expected = whole.feed(data) + whole.flush()
    pieces = LineBuffer()
    bounds = [0, *sorted(cuts), len(data)]
    lines = [line for begin, stop in itertools.pairwise(bounds) for line in pieces.feed(data[begin:stop])]
    assert lines + pieces.flush() == expected


@given(TEXT.filter(lambda data: b"\r" not in data))
def test_without_carriage_returns_nothing_changes(data: bytes) -> None:
    buffer = LineBuffer()
    lines = buffer.feed(data) + buffer.flush()
    assert b"\n".join(lines) == data.removesuffix(b"\n")


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"dos\r\nunix\n", [b"dos", b"unix"]),
        (b"\r1%\r50%\r100%\n", [b"100%"]),
        (b"1%\r50%\r", [b"50%"]),
        (b"\r\r\n", [b""]),
    ],
)
def test_of_a_progress_bar_the_last_state_stays(data: bytes, lines: list[bytes]) -> None:
    buffer = LineBuffer()
    assert buffer.feed(data) + buffer.flush() == lines


def test_a_line_without_end_is_cut() -> None:
    buffer = LineBuffer()
    assert sum(len(line) for line in buffer.feed(b"x" * (3 << 20))) == 3 << 20


def test_a_traceback_and_what_follows_are_held_as_a_whole() -> None:
    keeper = TracebackKeeper()
    block = [b"Traceback (most recent call last):", b'  File "x"', b"    step()", b"ValueError: boom"]
    assert keeper.feed([b"before", *block[:2]]) == [b"before"]
    assert keeper.held_since is not None
    assert keeper.feed([*block[2:], b"after", *block]) == []
    assert keeper.flush() == [*block, b"after", *block]
    assert keeper.held_since is None
    assert keeper.feed([b"later"]) == [b"later"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Screen, int]]:
    """A screen whose standard output is a terminal, and the end that a person sees."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    master, slave = pty.openpty()
    tty.setraw(slave)
    reader, writer = os.pipe()
    yield Screen(slave, writer), master
    for fd in (master, slave, reader, writer):
        os.close(fd)


def read(master: int, expected: bytes) -> bytes:
    """Read as many bytes as are expected; a terminal delivers them in chunks."""
    seen = b""
    while len(seen) < len(expected):
        seen += os.read(master, len(expected) - len(seen))
    return seen


def test_lines_of_others_stand_above_a_progress_bar(terminal: tuple[Screen, int]) -> None:
    screen, master = terminal
    screen.write_raw(1, b"epoch 1\n\r10%\r20%")
    screen.write_lines(1, b"[rank 1] ", [b"hello"])
    screen.write_raw(1, b"\r30%")
    expected = b"epoch 1\n\r10%\r20%" + b"\r\x1b[2K[rank 1] hello\n" + b"\r20%" + b"\r30%"
    assert read(master, expected) == expected


def test_lines_of_others_stand_above_rows_that_are_drawn_together(terminal: tuple[Screen, int]) -> None:
    screen, master = terminal
    back = b"\r\x1b[2K\x1b[1A\x1b[2K"
    pieces = (b"train 0%\nval 0%", back, b"train 1%\n", b"val 1%")
    for piece in pieces:
        screen.write_raw(1, piece)
    screen.write_lines(1, b"[rank 1] ", [b"hello"])
    screen.write_raw(1, b"\ndone\n")
    screen.write_lines(1, b"[rank 1] ", [b"hello"])
    expected = b"".join(pieces) + back + b"[rank 1] hello\ntrain 1%\nval 1%" + b"\ndone\n[rank 1] hello\n"
    assert read(master, expected) == expected


def test_colour_only_on_a_terminal(terminal: tuple[Screen, int]) -> None:
    screen, _ = terminal
    assert b"\x1b[" in screen.prefix(1, 1)
    assert screen.prefix(1, 2) == b"[rank 1] "


def test_a_reader_that_is_gone_is_noticed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    screen = Screen(writer, writer)
    screen.write_lines(1, b"", [b"lost"])
    assert screen.has_lost_reader
    os.close(writer)


def test_a_full_disk_behind_a_log_is_reported_once() -> None:
    reader, writer = os.pipe()
    log = RankLog(Path("/dev/full"), Screen(writer, writer))
    log.write(b"lost")
    log.write(b"lost too")
    os.close(writer)
    with open(reader, "rb") as file:
        said = file.read().decode()
    assert said.count("/dev/full cannot be written: No space left on device. The job goes on") == 1
    assert said.count("\n") == 1


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        RankLog(tmp_path / "rank0.log", Screen())
    assert not (tmp_path / "precious").exists()
