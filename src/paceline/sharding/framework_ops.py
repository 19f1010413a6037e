"""What the sharded optimizer and shared parameters ask of a framework; each front end has one such object.

What both frameworks call alike (`data_ptr()`, `element_size()`, `detach()`, `shape`, ...) is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Tensor = TypeVar("Tensor", bound=Any)


@dataclass(frozen=True)
class Names:
    """What a framework's users call things, for errors.

    Attributes:
        wrapper: The class that wraps a model.
        variable: A wrapped model.
        loading: Its method that loads values.
        clearing: The call that clears gradients.
        moving: What gives a parameter other memory.
        converting: What gives a parameter another form.
    """

    wrapper: str
    variable: str
    loading: str
    clearing: str
    moving: str
    converting: str


class FrameworkOps(Protocol[Tensor]):
    """Operations on tensors of one framework.

    Attributes:
        names: What its users call things.
        tensor: The class of its tensors.
        stand_in: The class of what stands in the place of a gradient of which each rank has a part.
    """

    names: Names
    tensor: type[Any]
    stand_in: type[Any]

    # --- memory ---

    def is_dense(self, tensor: Tensor) -> bool:
        """Whether its elements fill a range of memory."""
        ...

    def extent(self, tensor: Tensor) -> int:
        """Bytes from its first element to its last."""
        ...

    def data(self, tensor: Tensor) -> Tensor:
        """A tensor in the same memory, of which autograd knows nothing."""
        ...

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements of a dense tensor in the order of its memory, without autograd."""
        ...

    def split(self, flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Consecutive ranges of a flat tensor, in its memory."""
        ...

    def as_laid_out(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A tensor of a parameter's shape that is laid out in memory as it; itself, if it is."""
        ...

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: Any,
        shape: Sequence[int],
        like: Tensor | None = None,
    ) -> Tensor:
        """A tensor over a part of an array of bytes, which it keeps alive, in a storage of its own.

        Args:
            memory: The array.
            at: Where the tensor begins there.
            nbytes: What it may use.
            dtype: Its dtype.
            shape: Its shape.
            like: Has its strides; None: they are those of a contiguous tensor.
        """
        ...

    def lay(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor, which stays the same object, lie where these values do."""
        ...

    # --- values ---

    def empty(self, shape: Sequence[int], dtype: Any, like: Tensor) -> Tensor:
        """A contiguous tensor on the device of another one, whatever it holds; `dtype` may be its name."""
        ...

    def from_bytes(self, data: bytes) -> Tensor:
        """A flat tensor of bytes on the CPU, in memory of its own."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Write the values of one to the other, where it lies; without autograd."""
        ...

    def scale(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Multiply these tensors, in place; without autograd."""
        ...

    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """Counts the writes to each."""
        ...

    def count_writes(self, tensors: Sequence[Tensor]) -> None:
        """Let autograd know of a write to each."""
        ...

    # --- an optimizer's state ---

    def beside(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A contiguous tensor of the same values on a parameter's device; maybe itself."""
        ...

    def kept_copy(self, value: Any, parameter: Tensor) -> Any:
        """A copy of what an optimizer remembers of a parameter, as `state_dict()` gives it."""
        ...

    def room_for_state(self, parameter: Tensor, dtype: Any) -> Tensor:
        """A tensor of a parameter's shape for such a copy, whatever it holds."""
        ...

    # --- parameters and their gradients ---

    def watch_steps(self, check: Callable[[object, Iterable[Tensor]], None]) -> None:
        """Call `check` with each optimizer and its parameters before its step, from now on. Once a process.

        Not for optimizers whose class has a true `steps_shared_parameters`: they know what they do.
        """
        ...

    def is_trained(self, parameter: Tensor) -> bool:
        """Whether autograd computes its gradient."""
        ...

    def form(self, parameter: Tensor) -> str:
        """Its shape, dtype and layout as text."""
        ...

    def gradient(self, parameter: Tensor) -> Any:
        """What is in the place of its gradient: a tensor, a stand-in, or None."""
        ...

    def put_stand_in(self, parameter: Tensor, stand_in: Any) -> None:
        """Let this be in the place of its gradient."""
        ...

    def lend_gradients(self, pieces: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Let pieces of parameters have these gradients, without a copy."""
        ...

    def end_loans(self, pieces: Sequence[Tensor]) -> None:
        """Take them back."""
        ...


def numel(tensor: Any) -> int:
    """How many elements a tensor has."""
    return int(math.prod(tensor.shape))


def nbytes(tensor: Any) -> int:
    """How many bytes a tensor's elements have."""
    return int(math.prod(tensor.shape) * tensor.element_size())


def dtype_name(tensor: Any) -> str:
    """The name of a tensor's dtype, without the framework's."""
    return str(tensor.dtype).rpartition(".")[2]
