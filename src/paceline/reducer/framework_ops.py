"""The interface to a framework's tensors, parameters and optimizers: see `torch/ops.py` and `paddle/ops.py`.

What both frameworks name alike (`data_ptr()`, `element_size()`, `detach()`, `shape`, ...) is not here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from paceline import _core
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.model_agreement import TensorDescription
from paceline.reducer.plan import Plan
from paceline.reducer.replica_hashes import Entry, hash_of_plain

if TYPE_CHECKING:
    from paceline.reducer.communicator import Communicator, Reduction

Tensor = TypeVar("Tensor", bound=Any)


@dataclass(frozen=True)
class Names:
    wrapper: str
    variable: str
    loading: str
    clearing: str
    moving: str
    converting: str
    device: str
    forming: str
    sampling: str


class FrameworkOps(ABC, Generic[Tensor]):
    """Operations on tensors of one framework.

    Attributes:
        names: The framework's terms for messages.
        tensor: The class of its tensors.
        stand_in: The class of the object in place of a gradient of which each rank has only a part.
        refuses_writes: Whether it is an error, not a warning, if the user's program sets buffers to different
            values on some ranks.
    """

    names: ClassVar[Names]
    tensor: ClassVar[type[Any]]
    stand_in: ClassVar[type[Any]]
    refuses_writes: ClassVar[bool]

    # --- memory ---

    @abstractmethod
    def is_dense(self, tensor: Tensor) -> bool:
        """Whether its elements fill a contiguous range of memory."""

    @abstractmethod
    def is_readable(self, tensor: Tensor) -> bool:
        """Whether its elements are contiguous in host memory."""

    @abstractmethod
    def has_values(self, tensor: Tensor) -> bool:
        """Whether its elements can be copied to the host now."""

    @abstractmethod
    def random_state(self) -> object:
        """A value that changes when random numbers are drawn, on any device; None if unavailable now."""

    @abstractmethod
    def extent(self, tensor: Tensor) -> int:
        """Bytes from its first element to its last."""

    @abstractmethod
    def data(self, tensor: Tensor) -> Tensor:
        """A tensor in the same memory that autograd does not track."""

    @abstractmethod
    def flat(self, tensor: Tensor) -> Tensor:
        """The elements of a dense tensor in memory order, without autograd."""

    @abstractmethod
    def split(self, flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Consecutive ranges of a flat tensor, in its memory."""

    @abstractmethod
    def as_laid_out(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A tensor with a parameter's shape and memory layout: the given one if it has them, or a copy."""

    @abstractmethod
    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: Any,
        shape: Sequence[int],
        like: Tensor | None = None,
    ) -> Tensor:
        """A tensor over a part of a byte array, with a storage of its own that keeps the array alive.

        Args:
            memory: The array.
            at: The tensor's first byte in the array.
            nbytes: The size of the part.
            dtype: The tensor's dtype.
            shape: The tensor's shape.
            like: A tensor whose strides to use; None: those of a contiguous tensor.
        """

    @abstractmethod
    def lay(self, tensor: Tensor, values: Tensor) -> None:
        """Move a tensor, which stays the same object, to the memory of these values."""

    @abstractmethod
    def plain_tensors(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors with memory of their own that hold the values of these tensors."""

    @abstractmethod
    def plain_parts(self, name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
        """The same for one tensor, with names."""

    @abstractmethod
    def on_host(self, tensor: Tensor) -> Tensor:
        """The tensor itself if its elements are contiguous on the CPU; else a copy that is."""

    @abstractmethod
    def places_at(
        self, plan: Plan, parameters: Sequence[Tensor], pointer: int, owner: object
    ) -> Sequence[Tensor]:
        """Each parameter's place in a gradient buffer at this address. All keep `owner` alive."""

    @abstractmethod
    def allocate(
        self, plan: Plan, parameters: Sequence[Tensor], instead_of: Reduction[Tensor] | None = None
    ) -> GradientBuffer[Tensor]:
        """A gradient buffer of zeros in memory of this rank alone, on the parameters' own devices.

        Args:
            plan: Where each gradient lies.
            parameters: The parameters of the plan.
            instead_of: The reduction of another plan of the same parameters, whose memory may be reused.
        """

    # --- values ---

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any, like: Tensor) -> Tensor:
        """An uninitialised contiguous tensor on the device of another one; `dtype` may be its name."""

    @abstractmethod
    def from_bytes(self, data: bytes) -> Tensor:
        """A flat tensor of bytes on the CPU, in its own memory."""

    @abstractmethod
    def as_array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A copy of its values."""

    @abstractmethod
    def from_array(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor of these values, on the CPU."""

    @abstractmethod
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the values of `source` to `target`, on any devices; without autograd."""

    @abstractmethod
    def scale(self, tensors: Sequence[Tensor], factor: float) -> None:
        """Multiply these tensors, in place; without autograd."""

    @abstractmethod
    def add(self, tensors: Sequence[Tensor], others: Sequence[Tensor] | float) -> None:
        """Add to each of these tensors, in place; without autograd."""

    @abstractmethod
    def divide(self, tensor: Tensor, divisor: int) -> None:
        """Divide all elements, in place; without autograd."""

    @abstractmethod
    def sums_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Accumulators that start with these values: float32 or wider, each in its own memory.

        A tensor that already meets this is used itself. Without autograd.
        """

    @abstractmethod
    def copied(self, tensor: Tensor) -> Tensor:
        """A copy, without autograd."""

    @abstractmethod
    def use_threads(self, number: int) -> int:
        """Run kernels on this many threads. Returns the previous number."""

    @abstractmethod
    def squared_norm(self, tensor: Tensor) -> float: ...

    @abstractmethod
    def is_finite(self, tensor: Tensor) -> bool: ...

    @abstractmethod
    def average_buffers(
        self, communicator: Communicator[Tensor], buffers: Sequence[Tensor], active: Sequence[int]
    ) -> None:
        """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective.

        Autograd does not notice the write.
        """

    @abstractmethod
    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """The version counter of each tensor, which counts its writes."""

    @abstractmethod
    def count_writes(self, tensors: Sequence[Tensor]) -> None:
        """Increment the version counter of each tensor, so that autograd notices a write."""

    # --- wide values, for an outer optimizer: 16-bit types as float32, complex numbers as pairs ---

    @abstractmethod
    def wide(self, parameter: Tensor) -> Tensor:
        """The parameter's values in this form, possibly in its own memory, without autograd."""

    @abstractmethod
    def wide_copy(self, values: Tensor, like: Tensor) -> Tensor:
        """A contiguous copy of wide values, with the dtype and on the device of `like`."""

    @abstractmethod
    def write_wide(self, values: Tensor, parameter: Tensor) -> None:
        """Write wide values to a parameter; without autograd."""

    @abstractmethod
    def rounded(self, values: Tensor, parameter: Tensor) -> Tensor:
        """What `wide` would return if these wide values had been written to the parameter."""

    @abstractmethod
    def is_equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether all elements of two tensors of equal shape and dtype are equal; a NaN equals a NaN."""

    @abstractmethod
    def subtract(self, one: Tensor, other: Tensor, place: Tensor) -> None:
        """Fill `place` with `one` - `other`."""

    # --- optimizers and their state ---

    @abstractmethod
    def watch_steps(self, check: Callable[[object, Iterable[Tensor]], None]) -> None:
        """From now on, call `check` with each optimizer and its parameters before its step. Once per process.

        Optimizers whose class has a true `steps_shared_parameters` are left out, because they handle shared
        parameters themselves.
        """

    @abstractmethod
    def note_steps(self) -> None:
        """From now on, record the optimizer steps and data loader batches of this process."""

    @abstractmethod
    def held_by(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """An optimizer's state, with names that begin with those of the parameters."""

    @abstractmethod
    def beside(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A contiguous tensor of the same values on a parameter's device; possibly the tensor itself."""

    @abstractmethod
    def kept_copy(self, value: Any, parameter: Tensor) -> Any:
        """A copy of an optimizer's state value of a parameter, in the form that `state_dict()` has."""

    @abstractmethod
    def room_for_state(self, parameter: Tensor, dtype: Any) -> Tensor:
        """An uninitialised tensor of a parameter's shape for such a copy."""

    # --- parameters and their gradients ---

    @abstractmethod
    def is_trained(self, parameter: Tensor) -> bool:
        """Whether autograd computes its gradient."""

    @abstractmethod
    def form(self, parameter: Tensor) -> str:
        """Its shape, dtype and layout as text."""

    @abstractmethod
    def device(self, tensor: Tensor) -> str:
        """Its device as text, in the form that plans use."""

    @abstractmethod
    def gradient(self, parameter: Tensor) -> Any:
        """What is in place of its gradient: a tensor, a stand-in, or None."""

    @abstractmethod
    def step_gradients(self, parameters: Sequence[Tensor]) -> list[Any]:
        """The same for each parameter; None if an optimizer would find no gradient."""

    @abstractmethod
    def is_sparse(self, gradient: Tensor) -> bool:
        """Whether it holds only some rows."""

    @abstractmethod
    def put_stand_in(self, parameter: Tensor, stand_in: Any) -> None:
        """Put a stand-in in place of its gradient."""

    @abstractmethod
    def lend_gradients(self, pieces: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Give pieces of parameters these gradients, without a copy."""

    @abstractmethod
    def end_loans(self, pieces: Sequence[Tensor]) -> None: ...

    # --- models ---

    @abstractmethod
    def describe(self, name: str, tensor: Tensor, requires_grad: bool | None) -> Iterable[TensorDescription]:
        """What all ranks must have alike of a parameter, or of a buffer (`requires_grad` is None)."""

    @abstractmethod
    def why_not_shared(self, name: str, tensor: Tensor) -> str | None:
        """Why the ranks of a host cannot share this tensor, and in a second line what to do; or None."""

    @abstractmethod
    def rescaled(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Embeddings that rescale their weight in forward: name and max_norm as text, and the weight."""

    # --- implemented by the above ---

    def hash_model(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], optimizer: Any
    ) -> list[Entry]:
        """The hash of each tensor, and of each value in the optimizer's state if one is given."""
        named = [("parameter", name, each) for name, each in parameters.items()]
        named += [("buffer", name, each) for name, each in buffers.items()]
        plain: list[Entry] = []
        if optimizer is not None:
            for name, value in self.held_by(optimizer, parameters):
                if isinstance(value, self.tensor):
                    named.append(("optimizer", name, value))
                elif (hashed := hash_of_plain(value)) is not None:
                    plain.append(Entry("optimizer", name, hashed))
        parts = [
            (kind, part_name, self.on_host(part))
            for kind, name, tensor in named
            for part_name, part in self.plain_parts(name, tensor)
        ]
        hashes = _core.hash_all([each.data_ptr() for *_, each in parts], [nbytes(each) for *_, each in parts])
        return [*(Entry(kind, name, value) for (kind, name, _), value in zip(parts, hashes)), *plain]


def numel(tensor: Any) -> int:
    return int(math.prod(tensor.shape))


def nbytes(tensor: Any) -> int:
    """The size in bytes. Avoids Paddle's `size`, which calls numpy and takes 12 us."""
    return int(math.prod(tensor.shape) * tensor.element_size())


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
