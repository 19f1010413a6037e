"""What torch asks a process group about itself: rank, size, names, devices, abilities.

torch's own class answers from its C++ backends; a group that is written in Python has none
and answers itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store


class NamedProcessGroup(ProcessGroup):
    """The part of a process group that communicates nothing.

    Args:
        store: A store of torch, for whoever asks the group for it.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        # torch's other constructor, with the store, makes an object that Python can't extend.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank = rank
        self._size = size
        self._store = store
        self._name = ""
        self._desc = ""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group_store(self) -> Store:
        return self._store

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # Under these names torch's C++ code asks.

    def getBackendName(self) -> str:
        return "paceline"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    # What torch looks for in a group's backend of one device. The group is its own.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        """The core counts calls, and compares the counts, by itself."""

    def __repr__(self) -> str:
        return f"<paceline process group {self._name!r}: rank {self._rank} of {self._size}>"
