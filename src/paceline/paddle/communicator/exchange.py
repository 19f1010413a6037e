"""A group of paddle.distributed as a rendezvous `Exchange`."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.paddle.communicator.calls import GroupCalls
from paceline.rendezvous.roll_call import Roll
from paceline.rendezvous.secret import find_secret
from paceline.rendezvous.signatures import LOSSLESS, Signatures, SignedKeyStore

_HOLDER = 0  # the rank of the default group that serves Paddle's store


class PaddleExchange:
    """All-gather of bytes over any group of paddle.distributed.

    Args:
        calls: On the group whose ranks take part.

    Example:
        Rank 0 passes b"a" and rank 1 passes b"bc"; both get [b"a", b"bc"].
    """

    def __init__(self, calls: GroupCalls) -> None:
        self._calls = calls
        self._roll = _roll_of(calls)
        self.rank = calls.rank
        self.world_size = calls.world_size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`.

        Raises:
            RendezvousError: The group failed, or some rank was late; names those that do not answer.
        """
        deadline = time.monotonic() + timeout_s
        sizes = [
            int.from_bytes(row, "little")
            for row in self._gather(len(payload).to_bytes(8, "little"), timeout_s, deadline)
        ]
        rows = self._gather(payload.ljust(max(1, *sizes), b"\0"), timeout_s, deadline)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, payload: bytes, timeout_s: float, deadline: float) -> list[bytes]:
        """Payloads of one length."""
        wide = np.frombuffer(payload, np.uint8).astype(np.int32)  # not every engine moves bytes
        own = self._calls.to_wire(paddle.to_tensor(wide))
        out = internals.empty_on(own.place, [self.world_size * wide.size], own.dtype)
        self._roll.complete(lambda: self._calls.all_gather(out, own), "all_gather", timeout_s, deadline)
        return [row.astype(np.uint8).tobytes() for row in out.numpy().reshape(self.world_size, wide.size)]


_rolls: weakref.WeakKeyDictionary[Any, Roll] = weakref.WeakKeyDictionary()


def _roll_of(calls: GroupCalls) -> Roll:
    """One for each group, so that all ranks count its calls alike."""
    group = calls.group
    if group not in _rolls:
        holder = group.ranks.index(_HOLDER) if _HOLDER in group.ranks else None
        engine = f"Paddle's {calls.backend} group"
        key_store = SignedKeyStore(
            _FrameworkKeyStore(group.id), Signatures(find_secret().key, f"group {group.id}")
        )
        _rolls[group] = Roll(key_store, calls.rank, calls.world_size, holder, engine)
    return _rolls[group]


class _FrameworkKeyStore:
    """Paddle's store as a `KeyStore`.

    Its `get` waits for a key that is missing, so each key has a counter beside it, which is there at once.
    """

    _lock = threading.Lock()  # all threads of this process share one connection to the store

    def __init__(self, group_id: int) -> None:
        self._prefix = f"paceline/group/{group_id}"
        self._store = paddle.base.core.create_or_get_global_tcp_store()

    def write(self, key: str, value: str) -> None:
        with self._speaking():
            self._store.set(f"{self._prefix}/{key}", value)
            self._store.add(f"{self._prefix}/{key}/written", 1)

    def read(self, key: str) -> str | None:
        with self._speaking():
            if self._store.add(f"{self._prefix}/{key}/written", 0) == 0:
                return None
            return bytes(self._store.get(f"{self._prefix}/{key}")).decode(errors=LOSSLESS)

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except ValueError as error:  # what Paddle makes of a connection that broke
            raise RuntimeError(str(error)) from error
