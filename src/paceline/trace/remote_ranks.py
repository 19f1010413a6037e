"""The reports that ranks of other hosts send to the host of rank 0, once a second.

A report holds the header and the totals of the rank's own recording, and a few more values (`Words`). Rank
0's process writes the reports of each rank into a file of its own, beside the files of the ranks that record
there. Bytes of such a file, of which the first 3072 are laid out as in a ring's file (`ring_file`):

    0       header
    1024    totals at the end of the first backward
    2048    the latest totals
    3072    sequence number of the write, time of the write, state, length of `Words`, `Words` as JSON
    4088    the sequence number again, so that a reader notices a write in progress
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from paceline.trace import ring_file
from paceline.trace.ring_file import NOTES_AT, RankHeader, RankRecording, is_number, printable
from paceline.trace.totals import TABLE_BYTES, Totals, pack_totals, unpack_totals

MOST_BYTES = 2048
"""Largest size of a report."""
_SUFFIX = ".remote"
_WORDS_AT = 3072
_HEAD = struct.Struct("<QQII")  # number, received_ns, state, length of the words
_MOST_WORDS = NOTES_AT - _WORDS_AT - _HEAD.size - 8
_MOST_VALUES = 8
_NAME_CHARACTERS, _FAILURE_CHARACTERS = 40, 200


class State(IntEnum):
    LIVE = 0
    LEFT = 1
    """It ended normally."""
    LOST = 2
    """It died, or its host cannot be reached."""


@dataclass(frozen=True)
class Words:
    """What a rank reports besides its totals.

    Attributes:
        step: How many backward passes of its first model it has ended; None: none yet.
        values: The values that it logged last, by name; 8 at most, and none if they do not fit.
        failure: Why its last backward, or its program, raised; "": nothing raised.
        memory_bytes: Its resident memory, shared pages included; None: unknown.
    """

    step: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    memory_bytes: int | None = None

    def pack(self) -> bytes:
        values = {name[:_NAME_CHARACTERS]: value for name, value in list(self.values.items())[:_MOST_VALUES]}
        reported = {
            "step": self.step,
            "values": values,
            "failure": self.failure[:_FAILURE_CHARACTERS],
            "memory": self.memory_bytes,
        }
        packed = json.dumps(reported).encode()
        return packed if len(packed) <= _MOST_WORDS else Words(self.step, {}, "", self.memory_bytes).pack()

    @classmethod
    def unpack(cls, raw: bytes) -> Words:
        """Raises ValueError if `raw` is not the JSON that `pack` makes."""
        try:
            reported = json.loads(raw)
            values = {printable(name): float(value) for name, value in reported["values"].items()}
            step, failure, memory = (reported[name] for name in ("step", "failure", "memory"))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise ValueError("it holds no words of a rank") from None
        if not isinstance(failure, str) or not all(n is None or is_number(n) for n in (step, memory)):
            raise ValueError("it holds no words of a rank")
        return cls(step, values, printable(failure, "\n\t"), memory)


@dataclass(frozen=True)
class RemoteRank:
    """What is known of a rank of another host.

    Attributes:
        recording: Its header and its totals, without records.
        words: What else it has reported.
        state: Whether it still runs.
        received_ns: When its last report arrived, or its end was noticed, by CLOCK_MONOTONIC of this host.
    """

    recording: RankRecording
    words: Words
    state: State
    received_ns: int


def pack_figures(header: RankHeader, first: Totals, last: Totals, words: Words) -> bytes:
    packed = header.pack()
    return b"".join(
        [len(packed).to_bytes(2, "little"), packed, pack_totals(1, first), pack_totals(1, last), words.pack()]
    )


def _unpack_figures(raw: bytes) -> tuple[RankHeader, Totals, Totals, Words]:
    """Raises ValueError if `raw` is not a report."""
    size = int.from_bytes(raw[:2], "little")
    tables_at, words_at = 2 + size, 2 + size + 2 * TABLE_BYTES
    header = ring_file.read_header(raw[2:tables_at])
    if header is None or len(raw) < words_at or len(raw) > MOST_BYTES:
        raise ValueError("no figures of a rank")
    first, last = (unpack_totals(raw[at : at + TABLE_BYTES]) for at in (tables_at, tables_at + TABLE_BYTES))
    return header, first, last, Words.unpack(raw[words_at:])


class RemoteRanks:
    def __init__(self, folder: Callable[[], Path | None]) -> None:
        self._folder = folder
        self._files: dict[int, mmap.mmap] = {}  # by the number that the channel gives to a rank
        self._written = 0

    def take(self, peer: int, raw: bytes) -> None:
        with suppress(ValueError, OSError, struct.error):
            header, first, last, words = _unpack_figures(raw)
            memory = self._files.get(peer)
            if memory is None:
                if (folder := self._folder()) is None:
                    return
                if not self._files:
                    _drop_old(folder)
                memory = self._files[peer] = _create(folder / f"rank{header.rank}{_SUFFIX}")
            ring_file.write_header(memory, header)
            self._written += 1
            if first:
                ring_file.write_totals(memory, first, self._written, is_first=True)
            ring_file.write_totals(memory, last, self._written)
            self._write(memory, State.LIVE, words.pack())

    def leave(self, peer: int) -> None:
        self._end(peer, State.LEFT)

    def lose(self, peer: int) -> None:
        self._end(peer, State.LOST)

    def _end(self, peer: int, state: State) -> None:
        memory = self._files.get(peer)
        if memory is not None:
            _, _, before, length = _HEAD.unpack_from(memory, _WORDS_AT)
            if before == State.LIVE:
                words = memory[_WORDS_AT + _HEAD.size : _WORDS_AT + _HEAD.size + length]
                self._written += 1
                self._write(memory, state, words)

    def _write(self, memory: mmap.mmap, state: State, words: bytes) -> None:
        head = _HEAD.pack(self._written, time.monotonic_ns(), state, len(words))
        memory[_WORDS_AT : _WORDS_AT + len(head)] = head
        memory[_WORDS_AT + len(head) : _WORDS_AT + len(head) + len(words)] = words
        struct.pack_into("<Q", memory, NOTES_AT - 8, self._written)


def _drop_old(folder: Path) -> None:
    for name in os.listdir(folder):
        if _is_far(name):
            (folder / name).unlink(missing_ok=True)


def _is_far(name: str) -> bool:
    return name.startswith("rank") and name.endswith(_SUFFIX)


def _create(path: Path) -> mmap.mmap:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, NOTES_AT)
        return mmap.mmap(fd, NOTES_AT)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def remote_ranks(folder: Path, since_ns: int = 0) -> list[RemoteRank]:
    """The ranks of other hosts that reported since `since_ns`, by rank; none if the folder can't be read."""
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            if _is_far(name):
                with suppress(OSError):
                    found.append(_read_file(folder / name))
    return sorted(
        (each for each in found if each is not None and each.received_ns >= since_ns),
        key=lambda each: each.recording.header.rank,
    )


def _read_file(path: Path) -> RemoteRank | None:
    try:
        return _read(ring_file.read_bytes(path, NOTES_AT))
    except ValueError as error:
        raise ring_file.damaged(path, error) from error


def _read(data: bytes) -> RemoteRank | None:
    """None if it is not such a file, or is being written."""
    header = ring_file.read_header(data) if len(data) == NOTES_AT else None
    if header is None:
        return None
    number, received_ns, state, length = _HEAD.unpack_from(data, _WORDS_AT)
    if number != struct.unpack_from("<Q", data, NOTES_AT - 8)[0]:
        return None
    words = Words.unpack(data[_WORDS_AT + _HEAD.size : _WORDS_AT + _HEAD.size + length])
    recording = RankRecording(header, [], [], 0, *ring_file.read_totals(data))
    return RemoteRank(recording, words, State(state), received_ns)
