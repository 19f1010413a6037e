"""The operations of a framework that checkpoints need: see `torch/checkpoint.py` and
`paddle/checkpoint.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.reducer.framework_ops import FrameworkOps


class CheckpointOps(ABC):
    """A framework's operations for checkpoints.

    Attributes:
        framework: Its name, as in `import torch`.
        suffix: The suffix of files in its own format.
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
        """The state of an optimizer, or of any other object that has a state_dict()."""
        return item.state_dict()

    @abstractmethod
    def random_states(self, parameters: Iterable[Any]) -> dict[str, bytes]:
        """The states of the generators of the CPU, and of the devices of these parameters."""

    @abstractmethod
    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[Any]) -> None:
        """Restore the states of these generators."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Seed all generators of the framework with a number below 2**63."""

    @abstractmethod
    def strides(self, tensor: Any) -> list[int] | None:
        """The strides that a copy of a tensor must have; None: it is contiguous."""

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
        """A tensor over a part of a memory, which the tensor keeps alive."""

    @abstractmethod
    def version(self) -> str:
        """The version of the framework."""

    @abstractmethod
    def save(self, state: Mapping[str, Any], path: Path) -> None:
        """Write a state in the framework's own format."""

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Read such a file without running any code in it. Tensors are on the CPU."""
