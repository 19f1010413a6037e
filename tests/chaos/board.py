"""Memory in which the ranks of a trial report their progress, the time of the fault, and how they ended.

It is a mapped file, not a pipe: a rank can write there with its descriptors closed, its limits at zero and in
its last instant, and no process waits for it. Imports only the standard library.
"""

from __future__ import annotations

import mmap
import pickle
import struct
from pathlib import Path
from typing import Any

_REPORT_BYTES = 1 << 20
_HEAD = struct.Struct("qdqq")  # progress, time of the fault, length of the report, pid
_SLOT_BYTES = 4096 + _REPORT_BYTES

STARTED, FORMING, WRAPPING, STEP_0 = 1, 2, 3, 4
"""Progress: the stage that a rank has begun. STEP_0 + n: step n."""


class Board:
    """One slot for each rank.

    Args:
        file: Created if it does not exist; sparse.
        world_size: Number of ranks.
    """

    def __init__(self, file: Path, world_size: int) -> None:
        if not file.exists():
            with file.open("wb") as new:
                new.truncate(world_size * _SLOT_BYTES)
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), world_size * _SLOT_BYTES)

    def note_progress(self, rank: int, progress: int) -> None:
        struct.pack_into("q", self._memory, rank * _SLOT_BYTES, progress)

    def progress(self, rank: int) -> int:
        return int(self._head(rank)[0])

    def note_strike(self, rank: int, at_s: float) -> None:
        struct.pack_into("d", self._memory, rank * _SLOT_BYTES + 8, at_s)

    def struck_at_s(self, rank: int) -> float:
        """The time of the fault by time.monotonic(), one clock for all processes; 0: no fault yet."""
        return float(self._head(rank)[1])

    def note_pid(self, rank: int, pid: int) -> None:
        struct.pack_into("q", self._memory, rank * _SLOT_BYTES + 24, pid)

    def pid(self, rank: int) -> int:
        return int(self._head(rank)[3])

    def write_report(self, rank: int, report: Any) -> None:
        """Write the end of the rank. The length comes last, so that a report is either complete or absent."""
        filed = pickle.dumps(report)
        assert len(filed) <= _REPORT_BYTES
        begin = rank * _SLOT_BYTES + 4096
        self._memory[begin : begin + len(filed)] = filed
        struct.pack_into("q", self._memory, rank * _SLOT_BYTES + 16, len(filed))

    def report(self, rank: int) -> Any:
        """The report of a rank; None: the rank never got that far."""
        length = self._head(rank)[2]
        begin = rank * _SLOT_BYTES + 4096
        return pickle.loads(self._memory[begin : begin + length]) if length else None

    def close(self) -> None:
        self._memory.close()

    def _head(self, rank: int) -> tuple[Any, ...]:
        return _HEAD.unpack_from(self._memory, rank * _SLOT_BYTES)
