"""An Exchange between some ranks of an existing group, by messages: the first of them is the hub.

Imports the core alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from paceline import _core
from paceline.rendezvous.deadline import Deadline

_TAG = 0x9ACE  # a message of the user that is still under way shows up as a MismatchError, not as garbage


class MemberExchange:
    """See `rendezvous.exchange.Exchange`.

    Args:
        core: Of the existing group; this process's rank in it is one of `members`.
        members: Ranks in the existing group; their order is that of the new ranks.
    """

    def __init__(self, core: _core.HostGroup, members: Sequence[int]) -> None:
        self._core = core
        self._members = list(members)
        self.rank = self._members.index(core.rank)
        self.world_size = len(self._members)

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        hub, others = self._members[0], self._members[1:]
        if self.rank > 0:
            self._send(hub, payload, deadline)
            return [self._receive(hub, deadline) for _ in self._members]
        payloads = [payload, *(self._receive(member, deadline) for member in others)]
        for member in others:
            for each in payloads:
                self._send(member, each, deadline)
        return payloads

    def _send(self, member: int, payload: bytes, deadline: Deadline) -> None:
        for part in (len(payload).to_bytes(8, "little"), payload):
            buffer = ctypes.create_string_buffer(part, len(part))
            self._core.send(ctypes.addressof(buffer), len(part), member, _TAG, deadline.left_s())

    def _receive(self, member: int, deadline: Deadline) -> bytes:
        length = int.from_bytes(self._receive_exactly(member, 8, deadline), "little")
        return self._receive_exactly(member, length, deadline)

    def _receive_exactly(self, member: int, length: int, deadline: Deadline) -> bytes:
        buffer = ctypes.create_string_buffer(length)
        self._core.recv(ctypes.addressof(buffer), length, member, _TAG, deadline.left_s())
        return buffer.raw
