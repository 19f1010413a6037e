"""What checkpoints ask of a framework: `torch/checkpoint.py` and `paddle/checkpoint.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from paceline.reducer.framework_ops import FrameworkOps


class CheckpointOps(ABC):
    """The framework's side of a checkpoint.

    Attributes:
        framework: Its name, as in `import torch`.
        ops: Its operations on tensors.
    """

    framework: ClassVar[str]
    ops: ClassVar[FrameworkOps[Any]]

    @abstractmethod
    def why_not_saved(self, tensor: Any) -> str:
        """Why a file can't hold a tensor, in words; empty: it can."""

    @abstractmethod
    def random_states(self, parameters: Iterable[Any]) -> dict[str, bytes]:
        """The states of the generators of the CPU, and of the devices of these parameters."""

    @abstractmethod
    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[Any]) -> None:
        """Let the same generators go on from these states."""
