"""Which ranks of a torch process group do not answer, when something over it has failed or is late.

A process group does not tell. Its store does: whoever notices a failure calls the roll there, every rank that
is in the same call sees that within a moment and answers, and who does not answer is missing. Ranks of one
host also look whether the process of a missing rank is dead or stopped. While all goes well nothing is
written but where each process is, once; the store is read only in calls that take long.

May import torch, the standard library and `stacks`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.stacks import STOPPED, process_state

T = TypeVar("T")

_QUIET_S = 0.1  # most calls are over by then
_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0
_LINGER_S = 1.0
_NAP_S = 0.01
_HOLDER = 0  # the rank of the default group that serves torch's store, where no agent does

_known: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_rolls_called = 0  # by this process: what was written for an earlier failure must not count for a later one


@dataclass(frozen=True)
class Missing:
    """A rank that did not answer.

    Attributes:
        rank: In the group.
        state: What is known of it: "has died", "is stopped", ...
    """

    rank: int
    state: str


def say_where(group: dist.ProcessGroup, rank: int) -> None:
    """Write down where this process is, for the others to look if `rank` does not answer one day."""
    store = _store_of(group)
    if store is None or group in _known:
        return
    _known.add(group)
    with contextlib.suppress(RuntimeError, TimeoutError):  # the call that follows will say what is wrong
        _within(1.0, lambda: store.set(f"{_prefix()}/place/{rank}", f"{_host()}/{os.getpid()}"))


class RollCall:
    """One call of all ranks over a process group, which may fail. A context manager.

    Example:
        Rank 1 of 3 was killed. The call of ranks 0 and 2 fails, or passes its deadline, so both call
        `missing()`; both get [Missing(1, "(pid 48121) has died")].
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, world_size: int) -> None:
        _calls[group] = number = _calls.get(group, 0) + 1
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._store = _store_of(group)
        self._prefix = f"{_prefix()}/{_rolls_called}/{number}"
        self._begun = time.monotonic()
        self._is_called = threading.Event()
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> RollCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def is_called(self) -> bool:
        """Whether another rank has noticed a failure. Does not block; ask again and again."""
        if self._store is None or time.monotonic() < self._begun + _QUIET_S:
            return False
        if self._watcher is None:
            # In a thread: a store whose process is stopped answers nobody, and does not time out either.
            self._watcher = threading.Thread(target=self._watch, name="paceline-roll-call", daemon=True)
            self._watcher.start()
        return self._is_called.is_set()

    def missing(self) -> list[Missing]:
        """Call the roll, and return who did not answer; empty if nobody can tell. Blocks 4 s at most."""
        global _rolls_called
        _rolls_called += 1
        self._is_over.set()
        found: list[Missing] = []
        if self._store is None:
            return found
        store = self._store
        try:
            _within(_ANSWER_WITHIN_S + _LINGER_S + 1.0, lambda: found.extend(self._collect(store)))
        except TimeoutError:
            return found or self._holder("does not answer: it is stopped, or its host is")
        except RuntimeError:
            return found or self._holder("is gone, and torch's store with it")
        return found

    # --- in threads of their own ---

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store that is gone: the call itself will fail
            while not self._is_over.wait(_LOOK_EVERY_S):
                assert self._store is not None
                if self._store.check([f"{self._prefix}/called"]):
                    self._is_called.set()
                    return

    def _collect(self, store: Store) -> Iterator[Missing]:
        store.set(f"{self._prefix}/called", "1")
        store.set(f"{self._prefix}/answer/{self._rank}", "1")
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            states = {r: self._state_of(store, r) for r in self._silent(store, range(self._world_size))}
            # Asked again after the look at the processes: one that has died since may have answered before.
            silent = self._silent(store, states)
            states = {r: states[r] for r in silent}
            if all(is_certain for _, is_certain in states.values()) or time.monotonic() > deadline:
                break
            time.sleep(_NAP_S)
        yield from (Missing(r, state) for r, (state, _) in states.items())
        store.set(f"{self._prefix}/done/{self._rank}", "1")
        if _serves_store(self._group, self._rank):  # whoever is slower still reads there
            answered = [f"{self._prefix}/done/{r}" for r in range(self._world_size) if r not in silent]
            deadline = time.monotonic() + _LINGER_S
            while time.monotonic() < deadline and not store.check(answered):
                time.sleep(_NAP_S)

    def _silent(self, store: Store, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have not answered."""
        return [r for r in ranks if not store.check([f"{self._prefix}/answer/{r}"])]

    def _state_of(self, store: Store, rank: int) -> tuple[str, bool]:
        """What this rank can see of another, and whether that is why it does not answer."""
        key = f"{_prefix()}/place/{rank}"
        if not store.check([key]):
            return "has not come so far, or died before", False
        host, _, pid = bytes(store.get(key)).decode().rpartition("/")
        if host != _host():
            return f"(pid {pid} of another host) does not answer", False
        state = process_state(int(pid))
        if state in ("", "Z", "X"):
            return f"(pid {pid}) has died", True
        if state in STOPPED:
            return f"(pid {pid}) is stopped: `kill -CONT {pid}` lets it go on", True
        return f"(pid {pid}) is alive, and has not made this call", False

    def _holder(self, state: str) -> list[Missing]:
        """The rank whose process serves the store, which is gone or silent; empty if that is no rank."""
        ranks = dist.get_process_group_ranks(self._group)
        is_served_by_rank = _is_served_by_rank()
        return [Missing(ranks.index(_HOLDER), state)] if is_served_by_rank and _HOLDER in ranks else []


def _prefix() -> str:
    """Of all keys; torchrun's agent keeps its store over all attempts."""
    return f"paceline/roll/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store_of(group: dist.ProcessGroup) -> Store | None:
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):  # another torch, or a group that was made by hand
        return None
    return store


def _is_served_by_rank() -> bool:
    """Whether the default group's store lives in the process of its rank 0."""
    store = _store_of(dist.group.WORLD) if dist.group.WORLD is not None else None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _serves_store(group: dist.ProcessGroup, rank: int) -> bool:
    return _is_served_by_rank() and dist.get_process_group_ranks(group)[rank] == _HOLDER


def _host() -> str:
    """Equal where a process id means the same process."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _within(seconds: float, function: Callable[[], object]) -> None:
    """Call `function` in a thread. Raises what it raises, or TimeoutError: it goes on then, unheard."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if errors:
        raise errors[0]
