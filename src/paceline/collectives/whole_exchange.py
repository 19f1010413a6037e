"""An Exchange between all ranks of an existing group, over the group's own all_gather.

In an all_gather every rank sees which rank is missing.
"""

from __future__ import annotations

import ctypes

from paceline import _core
from paceline.rendezvous.deadline import Deadline

_LENGTH_BYTES = 8


class WholeExchange:
    def __init__(self, core: _core.HostGroup) -> None:
        self._core = core
        self.rank = core.rank
        self.world_size = core.world_size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        own_length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        lengths = [int.from_bytes(row, "little") for row in self._gather(own_length, deadline)]
        longest = max(lengths)
        if not longest:
            return [b""] * self.world_size
        rows = self._gather(payload.ljust(longest, b"\0"), deadline)
        return [row[:length] for row, length in zip(rows, lengths)]

    def _gather(self, own: bytes, deadline: Deadline) -> list[bytes]:
        sent = ctypes.create_string_buffer(own, len(own))
        received = ctypes.create_string_buffer(len(own) * self.world_size)
        self._core.all_gather(
            ctypes.addressof(sent), ctypes.addressof(received), len(own), max(deadline.left_s(), 0.001)
        )
        return [received.raw[begin : begin + len(own)] for begin in range(0, len(received), len(own))]
