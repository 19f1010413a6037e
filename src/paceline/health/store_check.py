"""Finds out which ranks of a framework's process group do not answer, after a failed or late collective.

A process group does not report this, but the store through which it was formed can. A rank that notices a
failure requests a check there; every rank in the same call sees the request within a moment and answers, and
those that do not are missing. Ranks of one host also check whether the process of a missing rank is dead or
stopped. As long as all goes well, each process only writes its place, once; the store is read only in calls
that take long.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.errors import PacelineError, RendezvousError
from paceline.rendezvous.deadline import call_within
from paceline.rendezvous.signatures import KeyStore
from paceline.stacks import STOPPED, process_state

_QUIET_S = 0.1  # most calls are over by then
_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0
_LINGER_S = 1.0
_NAP_S = 0.01
_SHORTEST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.002


class Work(Protocol):
    """A call over the process group that is in progress."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not. Does not block for long."""
        ...

    def wait(self) -> object:
        """Raise RuntimeError if the call failed."""
        ...


@dataclass(frozen=True)
class Missing:
    """A rank that did not answer.

    Attributes:
        rank: In the group.
        state: What is known about it: "has died", "is stopped", ...
    """

    rank: int
    state: str


class StoreChecks:
    """The ranks of one process group, and their key store. Writes this process's place there."""

    def __init__(
        self, key_store: KeyStore | None, rank: int, world_size: int, holder: int | None, words: str
    ) -> None:
        self.key_store = key_store
        self.rank = rank
        self.world_size = world_size
        self.holder = holder
        self.prefix = f"paceline/check/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._words = words
        self._calls = 0
        self._failures = 0  # part of the keys: what was written for one failure must not count for the next
        if key_store is not None:
            # If this fails, the call that follows reports what is wrong.
            with contextlib.suppress(RuntimeError, TimeoutError):
                call_within(1.0, lambda: key_store.write(self.place_of(rank), f"{_host()}/{os.getpid()}"))

    def place_of(self, rank: int) -> str:
        return f"{self.prefix}/place/{rank}"

    def begin(self) -> StoreCheck:
        self._calls += 1
        return StoreCheck(self, f"{self.prefix}/{self._failures}/{self._calls}")

    def fail(self) -> None:
        """Keep what will be written from now on apart from what was written for the failed call."""
        self._failures += 1

    def complete(self, start: Callable[[], Work], call: str, timeout_s: float, deadline: float) -> None:
        """Start a call over the group and wait for its end. Collective; blocks until `deadline` at most."""
        where = f"{call} over {self._words}"
        with self.begin() as check:
            try:
                work = start()
                # Polled, because some process groups ignore the time-out of a wait, and others abort.
                nap_s = _SHORTEST_NAP_S
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise self._late(where, timeout_s, check.missing())
                    if check.is_requested():
                        raise self._failed(where, "another rank has noticed it", check.missing())
                    time.sleep(nap_s)
                    nap_s = min(nap_s * 2, _LONGEST_NAP_S)
                work.wait()
            except RendezvousError:
                raise
            except RuntimeError as error:
                # `seen` quotes it, so its own traceback would say the same again.
                raise self._failed(where, _noticed(error), check.missing()) from None

    def _late(self, where: str, timeout_s: float, missing: list[Missing]) -> RendezvousError:
        return RendezvousError(
            f"Rank {self.rank} of {self.world_size} gave up waiting for the other ranks after "
            f"{timeout_s:.1f} s.",
            where=where,
            seen=_in_words(missing) or "the call did not complete; nothing says which rank is missing",
            likely="a rank died or was stopped before this point, or took another branch and does not make "
            "this call, or the network to its host was cut",
            hint="every rank of the process group must make this call; look at the other ranks' output",
            missing=tuple(each.rank for each in missing),
        )

    def _failed(self, where: str, reason: str, missing: list[Missing]) -> RendezvousError:
        return RendezvousError(
            f"Rank {self.rank} of {self.world_size} lost another rank in a call of all ranks.",
            where=where,
            seen="\n".join(filter(None, (_in_words(missing), reason))),
            likely="another rank exited, raised or died before this call, or the connection to it broke",
            hint="every rank of the process group must make this call; "
            + (
                "look at the output of the rank that is named"
                if missing
                else "look at the other ranks' output; the first to fail gives the reason"
            ),
            missing=tuple(each.rank for each in missing),
        )


def _noticed(error: RuntimeError) -> str:
    return f"{error.summary}\n{error.seen}" if isinstance(error, PacelineError) else str(error)


def _in_words(missing: list[Missing]) -> str:
    return "; ".join(f"rank {each.rank} {each.state}" for each in missing)


class StoreCheck:
    """One call of all ranks over a process group, which may fail. A context manager.

    Example:
        Rank 1 of 3 was killed. The call of ranks 0 and 2 fails, or passes its deadline, so both call
        `missing()`; both get [Missing(1, "(pid 48121) has died")].
    """

    def __init__(self, checks: StoreChecks, prefix: str) -> None:
        self._checks = checks
        self._prefix = prefix
        self._begun = time.monotonic()
        self._is_requested = threading.Event()
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> StoreCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def is_requested(self) -> bool:
        """Whether another rank has requested a check. Does not block; to be called repeatedly."""
        if self._checks.key_store is None or time.monotonic() < self._begun + _QUIET_S:
            return False
        if self._watcher is None:
            # In a thread: a store whose process is stopped neither answers nor times out.
            key_store = self._checks.key_store
            self._watcher = threading.Thread(
                target=self._watch, args=(key_store,), name="paceline-store-check", daemon=True
            )
            self._watcher.start()
        return self._is_requested.is_set()

    def missing(self) -> list[Missing]:
        """Request the check; returns the ranks that did not answer, as far as known. Blocks 4 s at most."""
        self._checks.fail()
        self._is_over.set()
        found: list[Missing] = []
        key_store = self._checks.key_store
        if key_store is None:
            return found
        try:
            call_within(_ANSWER_WITHIN_S + _LINGER_S + 1.0, lambda: found.extend(self._collect(key_store)))
        except TimeoutError:
            return found or self._holder(
                "does not answer: it or its host is stopped, or the network to it was cut"
            )
        except RuntimeError:
            return found or self._holder("is gone, and the store with it")
        return found

    # --- in threads of their own ---

    def _watch(self, key_store: KeyStore) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the call itself will fail
            while not self._is_over.wait(_LOOK_EVERY_S):
                if key_store.read(f"{self._prefix}/requested") is not None:
                    self._is_requested.set()
                    return

    def _collect(self, key_store: KeyStore) -> Iterator[Missing]:
        def silent(ranks: Iterable[int], what: str) -> list[int]:
            return [r for r in ranks if key_store.read(f"{self._prefix}/{what}/{r}") is None]

        own, ranks = self._checks.rank, range(self._checks.world_size)
        key_store.write(f"{self._prefix}/requested", "1")
        key_store.write(f"{self._prefix}/answer/{own}", "1")
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            seen = {r: self._state_of(key_store, r) for r in silent(ranks, "answer")}
            # Asked again after the processes were checked: one that died since may have answered before.
            states = {r: seen[r] for r in silent(seen, "answer")}
            if all(is_certain for _, is_certain in states.values()) or time.monotonic() > deadline:
                break
            time.sleep(_NAP_S)
        yield from (Missing(r, state) for r, (state, _) in states.items())
        key_store.write(f"{self._prefix}/done/{own}", "1")
        if self._checks.holder == own:  # slower ranks still read from the store in this process
            answered = [r for r in ranks if r not in states]
            deadline = time.monotonic() + _LINGER_S
            while time.monotonic() < deadline and silent(answered, "done"):
                time.sleep(_NAP_S)

    def _state_of(self, key_store: KeyStore, rank: int) -> tuple[str, bool]:
        place = key_store.read(self._checks.place_of(rank))
        if place is None:
            return "has not come so far, died before, or cannot be reached", False
        host, _, pid = place.rpartition("/")
        if not (pid.isascii() and pid.isdecimal()):  # an unknown peer wrote there
            return "does not answer", False
        if host != _host():
            return f"(pid {pid} of another host) does not answer", False
        state = process_state(int(pid))
        if state in ("", "Z", "X"):
            return f"(pid {pid}) has died", True
        if state in STOPPED:
            return f"(pid {pid}) is stopped: `kill -CONT {pid}` lets it go on", True
        return f"(pid {pid}) is alive, and has not answered in this call", False

    def _holder(self, state: str) -> list[Missing]:
        return [] if self._checks.holder is None else [Missing(self._checks.holder, state)]


def _host() -> str:
    try:
        return f"{_boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # no /proc, so other processes cannot be looked up
        return secrets.token_hex(8)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox may lack it; hosts of one name have hardly booted in the same second
        started = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
        return f"{os.uname().nodename}/{started[1] if started else ''}"
