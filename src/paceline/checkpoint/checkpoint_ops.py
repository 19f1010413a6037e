"""What checkpoints ask of a framework: `torch/checkpoint.py` and `paddle/checkpoint.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.reducer.framework_ops import FrameworkOps


class CheckpointOps(ABC):
    """The framework's side of a checkpoint.

    Attributes:
        framework: Its name, as in `import torch`.
        suffix: Of files of its own format.
        containers: The classes of dicts, lists, tuples and sets that such files can hold.
        ops: Its operations on tensors.
    """

    framework: ClassVar[str]
    suffix: ClassVar[str]
    containers: ClassVar[tuple[type[Any], ...]]
    ops: ClassVar[FrameworkOps[Any]]

    @abstractmethod
    def why_not_saved(self, tensor: Any) -> str:
        """Why a file can't hold a tensor, in words; empty: it can."""

    def state_of(self, item: Any) -> Any:
        """The state of an optimizer, or of anything else that has a state_dict()."""
        return item.state_dict()

    @abstractmethod
    def random_states(self, parameters: Iterable[Any]) -> dict[str, bytes]:
        """The states of the generators of the CPU, and of the devices of these parameters."""

    @abstractmethod
    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[Any]) -> None:
        """Let the same generators go on from these states."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Let all its generators begin anew, with a number below 2**63."""

    @abstractmethod
    def strides(self, tensor: Any) -> list[int] | None:
        """How a copy of a tensor lies in memory; None: one element after the other."""

    @abstractmethod
    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None,
    ) -> Any:
        """A tensor over a part of a memory, which it keeps alive."""

    @abstractmethod
    def version(self) -> str:
        """That of the framework."""

    @abstractmethod
    def save(self, state: Mapping[str, Any], path: Path) -> None:
        """Write a state in the framework's own format."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Read such a file, running nothing that it brings along. Tensors are on the CPU."""
