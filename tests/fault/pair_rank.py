"""One rank of the cases of `pairs.py`: a forked process that runs one case after another.

Forking a process for each case would cost more than the case. So a rank lives until a fault kills it, and
joins a new group for each case. It keeps nothing of a case: the group is closed, and its objects are
collected.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import pickle
import struct
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

import paceline
from paceline import _core
from paceline.errors import PacelineError
from tests.fault.faults import Action, Point
from tests.fault.pairs import STRUCK_IN_STEP, WORLD_SIZE, Array, CaseReport, Pair, Program, Strike

BOARD_BYTES = mmap.PAGESIZE
# A survivor notices a stopped rank after this time. On a busy machine, a rank that is only slow may be given
# up as well: that is one more fault, after which the same rules must hold.
_TIMEOUT_S = 1.0
_PATIENT_S = 60.0
_HEAD = struct.Struct("<I")


def serve(rank: int, board: mmap.mmap, reading: int, writing: int) -> NoReturn:
    """Run in the fork the cases that the driver sends, until it kills this process or closes its end.

    Args:
        rank: The same in all cases.
        board: Memory that the ranks share, zeroed at first: how often each has passed which point.
        reading: Receives cases: (pair, job id). Once the rank has reported a case, it waits for any message,
            and reports again.
        writing: Sends reports (`CaseReport`).
    """
    try:
        while (case := receive(reading)) is not None:
            _Case(*case, rank, board).run(reading, writing)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def send(fd: int, what: object) -> None:
    """Write a message to a pipe."""
    message = pickle.dumps(what)
    rest = memoryview(_HEAD.pack(len(message)) + message)
    while rest:
        rest = rest[os.write(fd, rest) :]


def receive(fd: int) -> Any:
    """Read a message from a pipe, once it comes; None: the other end is closed."""
    head = _read(fd, _HEAD.size)
    return None if head is None else pickle.loads(_read(fd, *_HEAD.unpack(head)) or b"")


def _read(fd: int, size: int) -> bytes | None:
    parts = b""
    while len(parts) < size:
        part = os.read(fd, size - len(parts))
        if not part:
            return None
        parts += part
    return parts


class _Case:
    """One case, on this rank."""

    def __init__(self, pair: Pair, job_id: str, rank: int, board: mmap.mmap) -> None:
        self._pair = pair
        self._job_id = job_id
        self._rank = rank
        self._board = board
        self._counts = np.frombuffer(board, np.uint32, WORLD_SIZE * len(Point)).reshape(WORLD_SIZE, -1)[rank]
        self._before = self._counts.copy()
        self._armed: list[tuple[Strike, int]] = []
        self._group: Any = None
        self._program: Program | None = None
        self._good = 0

    def run(self, reading: int, writing: int) -> None:
        error, is_expected = "", True
        try:
            self._join()
            self._make_steps()
        except BaseException as caught:
            is_expected = isinstance(caught, PacelineError)
            error = f"{type(caught).__name__}: {caught}"
            if not is_expected:
                error += "\n" + traceback.format_exc()
        # The exception is gone by now, as in a script that has caught it and continues.
        send(writing, self._report(error, is_expected))
        receive(reading)
        send(writing, self._report(error, is_expected))
        self._leave()

    def _join(self) -> None:
        # A slow start is no fault, so the calls before the first step have longer time-outs.
        is_short = bool(self._pair.struck(Action.STOP))
        self._group = paceline.init(
            rank=self._rank,
            world_size=WORLD_SIZE,
            job_id=self._job_id,
            timeout_s=_TIMEOUT_S if is_short else _PATIENT_S,
            forming_timeout_s=_PATIENT_S,
        )
        self._group.barrier(timeout_s=_PATIENT_S)
        self._program = self._pair.program(self._group)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._board))
        _core.count_passages(address, WORLD_SIZE, self._rank)
        self._group.barrier(timeout_s=_PATIENT_S)

    def _make_steps(self) -> None:
        assert self._program is not None
        for number in range(self._pair.steps):
            if number == STRUCK_IN_STEP:
                self._before = self._counts.copy()
            for strike in self._pair.strikes:
                if (self._rank, number) == (strike.rank, STRUCK_IN_STEP):
                    self._armed.append((strike, int(self._counts[strike.at])))
                    strike.arm()
            self._program.step(number)
            self._good += 1

    def _report(self, error: str, is_expected: bool) -> CaseReport:
        return CaseReport(
            self._good,
            error,
            "" if self._program is None else _digest(self._program.memory()),
            is_expected,
            frozenset(point for point in Point if self._counts[point] != self._before[point]),
            any(self._counts[strike.at] != count for strike, count in self._armed),
        )

    def _leave(self) -> None:
        _core.disarm_fault()
        _core.count_passages(0, WORLD_SIZE, self._rank)
        self._program = None
        if self._group is not None:
            self._group.close()
        gc.collect()


def _digest(arrays: Iterable[Array]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        total.update(np.ascontiguousarray(array))
    return total.hexdigest()
