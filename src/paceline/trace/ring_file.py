"""The file of one rank: who it is, notes in words, and the ring of its records.

The rank maps the file and never closes it, so all that it wrote is there however it ended;
and its disk space is reserved first, so that writing cannot fail. Bytes of the file:

    0       Header
    512     number of records begun (8 bytes, written by the core), bytes of notes written (8 bytes)
    1024    totals at the end of the first backward, and those of the last look (`totals.py`)
    4096    notes: lines of JSON
    65536   records (`records.py`), as many as the header tells

A reader takes nothing for granted: a folder may be another user's, and a file may be cut off, or hold
anything. What no rank writes is one error, "This recording is damaged".
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import stat
import struct
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.trace.records import RECORD_BYTES, Record, unpack
from paceline.trace.totals import TABLE_BYTES, Total, Totals, pack_totals, unpack_totals

COUNT_AT, NOTES_USED_AT, NOTES_AT, RECORDS_AT = 512, 520, 4096, 65536
_FIRST_AT, _LAST_AT = 1024, 2048
_NOTES_BYTES = RECORDS_AT - NOTES_AT
_KEPT_FOR_FAILURES = 8192
_MAGIC = b"PACELINE"
_VERSION = 2
_HEADER = struct.Struct("<8sIIQiiIqq64s40s")
_SUFFIX = ".ring"

FOLDER_VARIABLE = "PACELINE_TRACE_DIR"
"""A folder in which each rank records; `paceline run` sets it."""
CAPACITY_VARIABLE = "PACELINE_TRACE_RECORDS"
"""How many records a rank keeps; `paceline run --trace` sets more."""
BATCHES_VARIABLE = "PACELINE_TUNE"
"""Whether the size of each batch is recorded, also on a rank that is alone; `paceline tune` sets it."""

FLIGHT_RECORDS = 1 << 13
"""The length of a flight recorder: 256 KiB, hundreds of iterations of a small model, tens of a large one."""
TRACE_RECORDS = 1 << 18
"""The length with --trace: 8 MiB, thousands of backward passes."""


@dataclass(frozen=True)
class RankHeader:
    """Who has recorded.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        pid: Its process.
        host: The name of its host.
        boot: The kernel's id of the host since it was started: ranks that have it in common share a clock.
        monotonic_ns: CLOCK_MONOTONIC when the recording began.
        real_ns: Nanoseconds since 1970 at that time.
        capacity: How many records the ring holds.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    boot: str
    monotonic_ns: int
    real_ns: int
    capacity: int

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            RECORD_BYTES,
            self.capacity,
            self.rank,
            self.world_size,
            self.pid,
            self.monotonic_ns,
            self.real_ns,
            self.host.encode()[:64],
            self.boot.encode()[:40],
        )


@dataclass(frozen=True)
class RankRecording:
    """What one rank has recorded, as far as it was written.

    Attributes:
        header: Who it is.
        records: Oldest first.
        notes: What it told in words.
        num_lost: How many older records were overwritten.
        first: Its totals when it had ended its first backward.
        last: Its last totals.
    """

    header: RankHeader
    records: list[Record]
    notes: list[dict[str, Any]]
    num_lost: int
    first: Totals = field(default_factory=dict)
    last: Totals = field(default_factory=dict)


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}{_SUFFIX}"


def paths_in(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder) if _is_ring(name)]
    except OSError:
        return []


def _is_ring(name: str) -> bool:
    return name.startswith("rank") and name.endswith(_SUFFIX)


def file_bytes(capacity: int) -> int:
    return RECORDS_AT + capacity * RECORD_BYTES


def capacity_of(memory: mmap.mmap) -> int:
    return (len(memory) - RECORDS_AT) // RECORD_BYTES


def create(path: Path | None, capacity: int) -> mmap.mmap:
    """A new file in the place of any that is there, its disk space reserved; None: one without a name."""
    if path is None:
        fd = os.memfd_create("paceline-trace")
    else:
        path.unlink(missing_ok=True)  # an earlier one may still be mapped
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, file_bytes(capacity))
        # A short ring is mapped at once: then no note has to wait for a page.
        at_once = mmap.MAP_POPULATE if capacity <= FLIGHT_RECORDS else 0
        return mmap.mmap(fd, file_bytes(capacity), flags=mmap.MAP_SHARED | at_once)
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def write_header(memory: mmap.mmap, header: RankHeader) -> None:
    packed = header.pack()
    memory[len(_MAGIC) : len(packed)] = packed[len(_MAGIC) :]
    memory[: len(_MAGIC)] = _MAGIC  # last: without it, this is no recording for those who read


def add_note(memory: mmap.mmap, note: dict[str, Any], *, is_failure: bool = False) -> bool:
    line = json.dumps(note).encode() + b"\n"
    (used,) = struct.unpack_from("<Q", memory, NOTES_USED_AT)
    room = _NOTES_BYTES - used - (0 if is_failure else _KEPT_FOR_FAILURES)
    if len(line) > room:
        return False
    memory[NOTES_AT + used : NOTES_AT + used + len(line)] = line
    struct.pack_into("<Q", memory, NOTES_USED_AT, used + len(line))
    return True


def write_totals(memory: mmap.mmap, totals: Totals, number: int, *, is_first: bool = False) -> None:
    at = _FIRST_AT if is_first else _LAST_AT
    memory[at : at + TABLE_BYTES] = pack_totals(number, totals)


def read_totals(data: bytes) -> tuple[Totals, Totals]:
    """The first and the last totals of a rank, by the first 4096 bytes of its file."""
    first, last = (unpack_totals(data[at : at + TABLE_BYTES]) for at in (_FIRST_AT, _LAST_AT))
    if any(totals and Total.TIME_NS not in totals for totals in (first, last)):
        raise ValueError("it holds totals of no moment")
    return first, last


def read_header(data: bytes) -> RankHeader | None:
    """Who has recorded, by the first bytes of the file; None: it is no such file, or of another version."""
    if len(data) < _HEADER.size or data[:8] != _MAGIC:
        return None
    _, version, record_bytes, capacity, *numbers, host, boot = _HEADER.unpack_from(data)
    if version != _VERSION or record_bytes != RECORD_BYTES:
        return None
    rank, world_size, pid, monotonic_ns, real_ns = numbers
    name, boot_id = (printable(text.rstrip(b"\0").decode(errors="replace")) for text in (host, boot))
    if not (0 <= rank < world_size and pid > 0 and capacity and monotonic_ns >= 0 and real_ns >= 0):
        raise ValueError(f"it reports rank {rank} of {world_size}, process {pid}, {capacity} records")
    return RankHeader(rank, world_size, pid, name, boot_id, monotonic_ns, real_ns, capacity)


def read_notes(lines: bytes) -> list[dict[str, Any]]:
    """The notes of a rank, or some of them."""
    return [_note_of(line) for line in lines.split(b"\n") if line]


def _note_of(line: bytes) -> dict[str, Any]:
    try:
        note = json.loads(line)
        fields = _NOTES.get(note["what"], {})
        if not all(
            is_number(note[name]) if kind is int else isinstance(note[name], kind)
            for name, kind in fields.items()
        ):
            raise ValueError
        if note["what"] == "buckets" and not all(is_number(nbytes) for nbytes, _ in note["buckets"]):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("it holds a note that no rank has written") from None
    return {
        name: printable(note[name], "\n\t") if kind is str else note[name] for name, kind in fields.items()
    } | {"what": note["what"]}


# What readers use of each kind of note. Other kinds are passed over.
_NOTES: dict[str, dict[str, type]] = {
    "buckets": {"model": int, "buckets": list},
    "value": {"number": int, "name": str},
    "failure": {"time_ns": int, "text": str},
}


def is_number(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def printable(text: str, also: str = "") -> str:
    """A text that another user may have written, for a terminal: without characters that control one."""
    return "".join(
        "?" if unicodedata.category(each) in _CONTROLS and each not in also else each for each in text
    )


# Control characters, marks of direction and the like, halves of surrogate pairs, and ends of lines.
_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def read(data: bytes) -> RankRecording | None:
    """What a copy of the file holds; None: it is no such file, or its rank has not come far enough."""
    header = read_header(data)
    if header is None:
        return None
    check_size(header, len(data))
    count, used = struct.unpack_from("<QQ", data, COUNT_AT)
    notes = read_notes(data[NOTES_AT : notes_end(used)])
    records = unpack(data[RECORDS_AT : file_bytes(header.capacity)], count)
    check_records(records)
    return RankRecording(header, records, notes, max(0, count - header.capacity), *read_totals(data))


def check_size(header: RankHeader, size: int) -> None:
    """Raises ValueError: the file of this rank, whose disk space was reserved, is shorter."""
    if size < file_bytes(header.capacity):
        raise ValueError(f"{size} bytes are left of {file_bytes(header.capacity)}")


def notes_end(used: int) -> int:
    """Where the notes end, of which a rank has written so many bytes."""
    if used > _NOTES_BYTES:
        raise ValueError(f"it reports {used} bytes of notes, and has room for {_NOTES_BYTES}")
    return NOTES_AT + int(used)


def check_records(records: Iterable[Record]) -> None:
    """Raises ValueError: a moment is none."""
    if any(not 0 <= record.time_ns < 1 << 62 for record in records):
        raise ValueError("it holds a record of no moment")


def open_regular(path: Path) -> int:
    """A descriptor for a file, which may lie in another user's folder. Never waits.

    Raises:
        OSError: It can't be opened, or is a link, a pipe, a device or a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    return fd


def read_bytes(path: Path, most: int) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)


def damaged(path: Path, error: ValueError) -> ConfigError:
    return ConfigError(
        f"This recording is damaged: {printable(str(path))}.",
        seen=str(error),
        likely="it was written to by something else than its rank, or is a part of a copy",
        hint="remove it, and the other ranks' recordings can be read",
    )


def read_start(path: Path) -> RankRecording | None:
    """Who has recorded in a file, and its totals, without its records and notes; None: no rank (yet).

    Raises:
        OSError: It can't be read.
        ConfigError: It is damaged.
    """
    data = read_bytes(path, NOTES_AT)
    try:
        header = read_header(data) if len(data) == NOTES_AT else None
        return None if header is None else RankRecording(header, [], [], 0, *read_totals(data))
    except ValueError as error:
        raise damaged(path, error) from error


def read_file(path: Path) -> RankRecording | None:
    """All that a rank has recorded; None: no rank (yet)."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            header = read_header(file.read(COUNT_AT))
            if header is None:
                return None
            check_size(header, os.fstat(file.fileno()).st_size)
            file.seek(0)
            return read(file.read(file_bytes(header.capacity)))
    except ValueError as error:
        raise damaged(path, error) from error


def read_folder(folder: Path) -> list[RankRecording]:
    """What the ranks have recorded in a folder, by rank."""
    found = [read_file(folder / name) for name in os.listdir(folder) if _is_ring(name)]
    return sorted((each for each in found if each is not None), key=lambda each: each.header.rank)
