"""The attributes of a process group that torch queries: rank, size, names, devices, capabilities.

torch's own class gets them from its C++ backends. A group that is written in Python has no C++ backend, so
it provides them itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store


class NamedProcessGroup(ProcessGroup):
    """The part of a process group that does not communicate.

    Args:
        store: The torch store that `get_group_store()` returns.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        # torch's other constructor, which takes the store, makes an object that Python cannot subclass.
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

    # The names that torch's C++ code calls.

    def getBackendName(self) -> str:
        return "paceline"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    # torch reads these from a group's backend for one device. This group is its own backend.

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
        """Nothing to do: the core counts the calls and compares the counts."""

    def __repr__(self) -> str:
        return f"<paceline process group {self._name!r}: rank {self._rank} of {self._size}>"
