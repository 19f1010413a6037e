"""An Exchange between some ranks of an existing group, with a message from each rank to each.

Each rank waits for every other one directly. If one rank collected the messages for all, the others would
report that rank as late, although it waits for another one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from paceline import _core
from paceline.collectives.work import TransferWork
from paceline.rendezvous.deadline import Deadline

_TAG = 0x9ACE  # so that a message of the user that is still in flight is a MismatchError, and not garbage
_LENGTH_BYTES = 8


class SubgroupExchange:
    def __init__(self, core: _core.HostGroup, members: Sequence[int], orphans: list[TransferWork]) -> None:
        self._core = core
        self._members = list(members)
        self._orphans = orphans
        self.rank = self._members.index(core.rank)
        self.world_size = len(self._members)

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        others = [member for member in self._members if member != self._core.rank]
        sent = [
            self._start(self._core.start_send, ctypes.create_string_buffer(part, len(part)), member)
            for member in others
            for part in (length, payload)
        ]
        payloads = {member: self._receive(member, deadline) for member in others}
        for each in sent:
            each.wait_for(deadline.left_s())
        return [payloads.get(member, payload) for member in self._members]

    def _receive(self, member: int, deadline: Deadline) -> bytes:
        length = int.from_bytes(self._receive_exactly(member, _LENGTH_BYTES, deadline), "little")
        return self._receive_exactly(member, length, deadline)

    def _receive_exactly(self, member: int, length: int, deadline: Deadline) -> bytes:
        buffer = ctypes.create_string_buffer(length)
        self._start(self._core.start_receive, buffer, member).wait_for(deadline.left_s())
        return buffer.raw

    def _start(
        self, start: Callable[..., int], buffer: ctypes.Array[ctypes.c_char], member: int
    ) -> TransferWork:
        transfer = start(ctypes.addressof(buffer), len(buffer), member, _TAG)
        return TransferWork(self._core, transfer, buffer, self._orphans)
