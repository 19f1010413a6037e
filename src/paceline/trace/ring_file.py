"""The file that one rank records into: its header, its notes, and the ring of its records.

The rank maps the file and never closes it, so everything that it wrote survives, however the rank ends. The
disk space of the file is reserved first, so that no write can fail. Bytes of the file:

    0       header
    512     number of records begun (8 bytes, written by the core), bytes of notes written (8 bytes)
    1024    totals at the end of the first backward (`totals.py`)
    2048    the latest totals
    4096    notes: lines of JSON
    65536   records (`records.py`); the header has their number

A reader checks everything: a folder may belong to another user, and a file may be truncated, or hold
anything. Anything that no rank writes is the error "This recording is damaged".
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
_VERSION = 3
_HEADER = struct.Struct("<8sIIQiiIqq64s40s")
_SUFFIX = ".ring"

FOLDER_VARIABLE = "PACELINE_TRACE_DIR"
"""A folder in which each rank records; `paceline run` sets it."""
CAPACITY_VARIABLE = "PACELINE_TRACE_RECORDS"
"""How many records a rank keeps; `paceline run --trace` sets more."""
BATCHES_VARIABLE = "PACELINE_TUNE"
"""Whether the size of each batch is recorded, even by a single rank; `paceline tune` sets it."""

FLIGHT_RECORDS = 1 << 13
"""Default size of a ring: 256 KiB, hundreds of iterations of a small model, tens of a large one."""
TRACE_RECORDS = 1 << 18
"""Size of a ring with --trace: 8 MiB, thousands of backward passes."""


@dataclass(frozen=True)
class RankHeader:
    """Identifies the rank that recorded a file.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        pid: Its process id.
        host: The name of its host.
        boot: The kernel's boot id. Ranks with the same boot id share a clock.
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
    """What one rank has recorded so far.

    Attributes:
        header: Identifies the rank.
        records: Its complete records, oldest first.
        notes: Its notes: buckets, names of logged values, failures.
        num_lost: How many older records were overwritten.
        first: Its totals at the end of its first backward.
        last: Its latest totals.
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
    """Replace any file at `path` by a new one, with its disk space reserved; None: a file without a name."""
    if path is None:
        fd = os.memfd_create("paceline-trace")
    else:
        path.unlink(missing_ok=True)  # an earlier one may still be mapped
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, file_bytes(capacity))
        # The pages of a short ring are mapped at once, so that no record waits for a page fault.
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
    memory[: len(_MAGIC)] = _MAGIC  # last, because readers ignore a file without it


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
    """The first and the last totals of a rank, from the first 4096 bytes of its file."""
    first, last = (unpack_totals(data[at : at + TABLE_BYTES]) for at in (_FIRST_AT, _LAST_AT))
    if any(totals and Total.TIME_NS not in totals for totals in (first, last)):
        raise ValueError("it holds totals without a time")
    return first, last


def read_header(data: bytes) -> RankHeader | None:
    """Read the header of a file; None if it is not a recording, or has another version."""
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
    """Decode complete lines of the notes of a rank."""
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


# The fields that readers use of each kind of note. Of other kinds they use none.
_NOTES: dict[str, dict[str, type]] = {
    "buckets": {"model": int, "buckets": list},
    "value": {"number": int, "name": str},
    "failure": {"time_ns": int, "text": str},
}


def is_number(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 63


def printable(text: str, also: str = "") -> str:
    """Make a text that another user may have written safe to print on a terminal.

    Control characters become "?", except those in `also`.
    """
    return "".join(
        "?" if unicodedata.category(each) in _CONTROLS and each not in also else each for each in text
    )


# Unicode's categories of control characters, format characters (such as marks of direction), surrogates, and
# separators of lines and paragraphs.
_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def read(data: bytes) -> RankRecording | None:
    """Decode a copy of a file; None if it is not a recording, or its rank has not written the header yet."""
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
    """Raises ValueError if the file was truncated: its full size was reserved when it was made."""
    if size < file_bytes(header.capacity):
        raise ValueError(f"{size} bytes are left of {file_bytes(header.capacity)}")


def notes_end(used: int) -> int:
    """The place where the notes end, if `used` bytes of them were written."""
    if used > _NOTES_BYTES:
        raise ValueError(f"it reports {used} bytes of notes, and has room for {_NOTES_BYTES}")
    return NOTES_AT + int(used)


def check_records(records: Iterable[Record]) -> None:
    """Raises ValueError if the time of a record is impossible."""
    if any(not 0 <= record.time_ns < 1 << 62 for record in records):
        raise ValueError("it holds a record with an impossible time")


def open_regular(path: Path) -> int:
    """Open a file for reading, and return its descriptor. Never blocks, even in another user's folder.

    Raises:
        OSError: It can't be opened, or is a symbolic link, a pipe, a device or a folder.
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
    """Read the header and the totals of a file, without its records and notes.

    Returns:
        None if no rank has written the header yet, or it is not a recording.

    Raises:
        OSError: The file can't be read.
        ConfigError: The file is damaged.
    """
    data = read_bytes(path, NOTES_AT)
    try:
        header = read_header(data) if len(data) == NOTES_AT else None
        return None if header is None else RankRecording(header, [], [], 0, *read_totals(data))
    except ValueError as error:
        raise damaged(path, error) from error


def has_records(path: Path) -> bool:
    """Whether a rank has recorded anything that it did; False also if the file can't be read."""
    try:
        data = read_bytes(path, NOTES_USED_AT)
        return len(data) == NOTES_USED_AT and bool(struct.unpack_from("<Q", data, COUNT_AT)[0])
    except OSError:
        return False


def read_file(path: Path) -> RankRecording | None:
    """Read everything that a rank has recorded; None as in `read_start`."""
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
    """Read all recordings in a folder, sorted by rank."""
    found = [read_file(folder / name) for name in os.listdir(folder) if _is_ring(name)]
    return sorted((each for each in found if each is not None), key=lambda each: each.header.rank)
