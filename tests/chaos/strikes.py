"""The faults that a rank causes in itself.

Places: "import", before a framework is imported; "start", before the group is formed; "wrapping", before the
model is wrapped; those of a step ("before forward", "in forward", "in backward", "after backward", "in the
step", "after the step", "in evaluation", "in the checkpoint"); "destroy", before the process group is
destroyed; "exit", when the interpreter ends; "core POINT N", at the Nth passage of a labelled point of the
core in that step or later (cpp/core/faults.h). Faults of the places "outside" and "outside wrapping" come
from the driver: a signal at a random moment.

Imports nothing of a framework.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.board import Board
from tests.chaos.plans import Expected, Fault

_OUTSIDE_THE_LOOP = ("import", "start", "wrapping", "destroy", "exit")
_CHILD_LIVES_S = 0.5
_SLOW_S = 0.3
_UNTIL_STRUCK_S = 600.0


class InjectedError(Exception):
    """The exception of a fault of the kind "exception"."""


class Striker:
    """The faults of one rank.

    Args:
        fault: The fault of the trial, whichever rank it strikes.
        rank: This rank.
        board: The board on which it notes that it was struck.
    """

    def __init__(self, fault: Fault, rank: int, board: Board) -> None:
        self._fault = fault
        self._rank = rank
        self._board = board
        self._is_mine = rank in fault.struck
        self._has_struck = False
        if self._is_mine:
            self._install_handlers()

    def at(self, place: str, step: int = -1) -> None:
        """The rank has reached this place: strike, if the fault is due here."""
        if not self._is_mine or self._has_struck:
            return
        fault = self._fault
        is_ended = fault.kind.name.startswith("launcher ") and fault.kind.expected is Expected.ENDED
        if is_ended and (place, step) == ("before forward", fault.step):
            time.sleep(_UNTIL_STRUCK_S)  # the job must still be under way
        if fault.place.startswith("core") and (place, step) == ("before forward", max(fault.step, 0)):
            self._has_struck = True
            self._arm_core()
        elif place == fault.place and (step == fault.step or place in _OUTSIDE_THE_LOOP):
            self._has_struck = True
            self._note()
            self._strike()

    def changes(self, name: str, step: int) -> bool:
        """True if the fault changes this rank's program in this way in this step."""
        if self._is_mine and self._fault.kind.name == name and self._fault.step == step:
            self._note()
            return True
        return False

    def model_change(self) -> str:
        """The difference of this rank's model; empty: none."""
        name = self._fault.kind.name
        return name.removeprefix("model: ") if self._is_mine and name.startswith("model: ") else ""

    def note_wrapping(self) -> None:
        """A different model strikes when it is wrapped."""
        if self.model_change():
            self._note()

    def _note(self) -> None:
        self._board.note_strike(self._rank, time.monotonic())

    def _arm_core(self) -> None:
        from paceline import _core

        _, point, nth = self._fault.place.split()
        name = self._fault.kind.name.split(",")[0].split(" ")[0]
        action = _core.FAULT_ACTIONS[{"SIGKILL": "kill", "SIGSTOP": "stop", "exception": "raise"}[name]]
        _core.arm_fault(_core.fault_points().index(point), action, int(nth))

    def _install_handlers(self) -> None:
        name = self._fault.kind.name
        if name.endswith(" handled"):
            signal.signal(getattr(signal, name.removesuffix(" handled")), lambda *_: None)
        if name == "handler raises":
            signal.signal(signal.SIGUSR1, _raise)
        if name == "handler exits":
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))

    def _strike(self) -> None:
        name = self._fault.kind.name
        if name in _STRIKES:
            _STRIKES[name]()
        elif name.startswith("full disk"):
            pass  # it is full from the start; see `launched.py`
        elif name.startswith("full pipe"):
            _write_much()
        elif name.startswith("limit: "):
            _limit(name.removeprefix("limit: "), self._fault.amount)
        elif name == "SIGINT handled":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal_of(self._fault))


def signal_of(fault: Fault) -> signal.Signals:
    """The signal that a fault sends, from inside or from outside."""
    name = fault.kind.name
    if name in ("handler raises", "handler exits"):
        return signal.SIGUSR1
    return signal.Signals[name.replace(",", " ").split()[0]]


def _raise(*_: object) -> None:
    raise InjectedError("injected fault")


def _write_much() -> None:
    """More than the launcher and the pipes between this rank and the launcher's reader hold."""
    for _ in range(2000):
        print("x" * 200)
    sys.stdout.flush()


def _stick() -> None:
    while True:
        time.sleep(0.05)


def _die_beside_a_child() -> None:
    """Fork a child, as a data loader does, which lives a while longer."""
    if os.fork() == 0:
        time.sleep(_CHILD_LIVES_S)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _start_timer() -> None:
    """Like a profiler: a signal every millisecond of this process's time, from now on."""
    signal.signal(signal.SIGPROF, lambda *_: None)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)


def _close_streams() -> None:
    for fd in (0, 1, 2):
        os.close(fd)


def _close_the_others() -> None:
    os.closerange(3, 4096)


def _lose_temporary_folder() -> None:
    os.environ["TMPDIR"] = "/nonexistent"
    tempfile.tempdir = None


_STRIKES: dict[str, Callable[[], object]] = {
    "exception": _raise,
    "stuck": _stick,
    "slow": lambda: time.sleep(_SLOW_S),
    "SIGKILL beside a child": _die_beside_a_child,
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "timer": _start_timer,
    "closes 0, 1 and 2": _close_streams,
    "closes the others": _close_the_others,
    "no temporary folder": _lose_temporary_folder,
}


def _limit(what: str, amount: float) -> None:
    """Set a limit of this process between its present use and a little more."""
    if what == "descriptors":
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        _set(resource.RLIMIT_NOFILE, highest + int(6 * amount))
    elif what == "file size":
        _set(resource.RLIMIT_FSIZE, int(amount * (1 << 22)))
    elif what == "address space":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _set(resource.RLIMIT_AS, pages * resource.getpagesize() + int(amount**4 * (1 << 36)))
    elif what == "locked memory":
        _set(resource.RLIMIT_MEMLOCK, 0)
    else:
        threading.stack_size(0)
        _set(resource.RLIMIT_STACK, (1 << 16) + int(amount * (1 << 20)))


def _set(number: int, value: int) -> None:
    resource.setrlimit(number, (value, value))
