"""What Paceline asks of a framework's tensors, parameters and optimizers: `torch/ops.py` and `paddle/ops.py`.

What both frameworks call alike (`data_ptr()`, `element_size()`, `detach()`, `shape`, ...) is not here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from paceline import _core
from paceline.reducer.agreement import TensorDescription
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.plan import Plan
from paceline.reducer.replica_check import Entry, hash_of_plain

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
        names: What its users call things.
        tensor: The class of its tensors.
        stand_in: The class of what stands in the place of a gradient of which each rank has a part.
        refuses_writes: Whether buffers that the user's program sets to other values on some ranks are an
            error, and not a warning.
    """

    names: ClassVar[Names]
    tensor: ClassVar[type[Any]]
    stand_in: ClassVar[type[Any]]
    refuses_writes: ClassVar[bool]

    # --- memory ---

    @abstractmethod
    def is_dense(self, tensor: Tensor) -> bool:
        """Whether its elements fill a range of memory."""

    @abstractmethod
    def is_readable(self, tensor: Tensor) -> bool:
        """Whether its elements lie in the memory of this host, one after the other."""

    @abstractmethod
    def has_values(self, tensor: Tensor) -> bool:
        """Whether its elements can be copied to the host now."""

    @abstractmethod
    def random_state(self) -> object:
        """What changes when random numbers are drawn, on any device; None: it can't be asked now."""

    @abstractmethod
    def extent(self, tensor: Tensor) -> int:
        """Bytes from its first element to its last."""

    @abstractmethod
    def data(self, tensor: Tensor) -> Tensor:
        """A tensor in the same memory, of which autograd knows nothing."""

    @abstractmethod
    def flat(self, tensor: Tensor) -> Tensor:
        """The elements of a dense tensor in the order of its memory, without autograd."""

    @abstractmethod
    def split(self, flat: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Consecutive ranges of a flat tensor, in its memory."""

    @abstractmethod
    def as_laid_out(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A tensor of a parameter's shape that is laid out in memory as it; itself, if it is."""

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
        """A tensor over a part of an array of bytes, which it keeps alive, in a storage of its own.

        Args:
            memory: The array.
            at: Where the tensor begins there.
            nbytes: What it may use.
            dtype: Its dtype.
            shape: Its shape.
            like: Has its strides; None: they are those of a contiguous tensor.
        """

    @abstractmethod
    def lay(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor, which stays the same object, lie where these values do."""

    @abstractmethod
    def plain_tensors(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors with memory of their own in which the values of these lie."""

    @abstractmethod
    def plain_parts(self, name: str, tensor: Tensor) -> Sequence[tuple[str, Tensor]]:
        """The same of one tensor, with names."""

    @abstractmethod
    def on_host(self, tensor: Tensor) -> Tensor:
        """The tensor itself, if its elements lie on the CPU one after the other; else a copy that does."""

    @abstractmethod
    def places_at(
        self, plan: Plan, parameters: Sequence[Tensor], pointer: int, owner: object
    ) -> Sequence[Tensor]:
        """Each parameter's place in a gradient buffer at this address. All keep `owner` alive."""

    @abstractmethod
    def allocate(
        self, plan: Plan, parameters: Sequence[Tensor], instead_of: Reduction[Tensor] | None = None
    ) -> GradientBuffer[Tensor]:
        """A gradient buffer in memory of this rank alone, on the parameters' own devices, of zeros.

        Args:
            plan: Where each gradient lies.
            parameters: Those that the plan lists.
            instead_of: The reduction of another plan of the same parameters, whose memory may be used again.
        """

    # --- values ---

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any, like: Tensor) -> Tensor:
        """A contiguous tensor on the device of another one, whatever it holds; `dtype` may be its name."""

    @abstractmethod
    def from_bytes(self, data: bytes) -> Tensor:
        """A flat tensor of bytes on the CPU, in memory of its own."""

    @abstractmethod
    def as_array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A copy of its values."""

    @abstractmethod
    def from_array(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor of these values, on the CPU."""

    @abstractmethod
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Write the values of one to the other, wherever they lie; without autograd."""

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
        """Tensors of these values to add others to: of float32 or wider, each in memory of its own.

        Those are used themselves that are so. Without autograd.
        """

    @abstractmethod
    def copied(self, tensor: Tensor) -> Tensor:
        """A copy, without autograd."""

    @abstractmethod
    def use_threads(self, number: int) -> int:
        """Run kernels on so many threads. Returns how many there were."""

    @abstractmethod
    def squared_norm(self, tensor: Tensor) -> float: ...

    @abstractmethod
    def is_finite(self, tensor: Tensor) -> bool: ...

    @abstractmethod
    def average_buffers(
        self, communicator: Communicator[Tensor], buffers: Sequence[Tensor], active: Sequence[int]
    ) -> None:
        """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective.

        Autograd does not notice.
        """

    @abstractmethod
    def versions(self, tensors: Sequence[Tensor]) -> list[int]:
        """Counts the writes to each."""

    @abstractmethod
    def count_writes(self, tensors: Sequence[Tensor]) -> None:
        """Let autograd know of a write to each."""

    # --- parameters as an outer optimizer sees them: 16 bits as float32, complex numbers as pairs ---

    @abstractmethod
    def wide(self, parameter: Tensor) -> Tensor:
        """Its values so, maybe in its memory, without autograd."""

    @abstractmethod
    def wide_copy(self, values: Tensor, like: Tensor) -> Tensor:
        """A contiguous copy of values with the dtype, and on the device, of another such tensor."""

    @abstractmethod
    def write_wide(self, values: Tensor, parameter: Tensor) -> None:
        """Make such values those of a parameter; without autograd."""

    @abstractmethod
    def rounded(self, values: Tensor, parameter: Tensor) -> Tensor:
        """What `wide` would return if such values had been written to the parameter."""

    @abstractmethod
    def is_equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether all elements of two tensors of one form are equal; a NaN equals a NaN."""

    @abstractmethod
    def subtract(self, one: Tensor, other: Tensor, place: Tensor) -> None:
        """Fill `place` with the differences."""

    # --- optimizers and their state ---

    @abstractmethod
    def watch_steps(self, check: Callable[[object, Iterable[Tensor]], None]) -> None:
        """Call `check` with each optimizer and its parameters before its step, from now on. Once a process.

        Not for optimizers whose class has a true `steps_shared_parameters`: they know what they do.
        """

    @abstractmethod
    def note_steps(self) -> None:
        """Record optimizer steps and batches of data loaders of this process from now on."""

    @abstractmethod
    def held_by(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """What an optimizer holds, with names that begin with those of the parameters."""

    @abstractmethod
    def beside(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A contiguous tensor of the same values on a parameter's device; maybe itself."""

    @abstractmethod
    def kept_copy(self, value: Any, parameter: Tensor) -> Any:
        """A copy of what an optimizer remembers of a parameter, as `state_dict()` gives it."""

    @abstractmethod
    def room_for_state(self, parameter: Tensor, dtype: Any) -> Tensor:
        """A tensor of a parameter's shape for such a copy, whatever it holds."""

    # --- parameters and their gradients ---

    @abstractmethod
    def is_trained(self, parameter: Tensor) -> bool:
        """Whether autograd computes its gradient."""

    @abstractmethod
    def form(self, parameter: Tensor) -> str:
        """Its shape, dtype and layout as text."""

    @abstractmethod
    def device(self, tensor: Tensor) -> str:
        """Its device as text, as a plan has it."""

    @abstractmethod
    def gradient(self, parameter: Tensor) -> Any:
        """What is in the place of its gradient: a tensor, a stand-in, or None."""

    @abstractmethod
    def step_gradients(self, parameters: Sequence[Tensor]) -> list[Any]:
        """The same of each parameter; None where an optimizer would find none."""

    @abstractmethod
    def is_sparse(self, gradient: Tensor) -> bool:
        """Whether it has some rows only."""

    @abstractmethod
    def put_stand_in(self, parameter: Tensor, stand_in: Any) -> None:
        """Let this be in the place of its gradient."""

    @abstractmethod
    def lend_gradients(self, pieces: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Let pieces of parameters have these gradients, without a copy."""

    @abstractmethod
    def end_loans(self, pieces: Sequence[Tensor]) -> None: ...

    # --- models ---

    @abstractmethod
    def describe(self, name: str, tensor: Tensor, requires_grad: bool | None) -> Iterable[TensorDescription]:
        """A parameter or a buffer (`requires_grad` is None) as all ranks must have it."""

    @abstractmethod
    def why_not_shared(self, name: str, tensor: Tensor) -> str | None:
        """Why the ranks of a host can't share a tensor of this name, and what to do in a second line."""

    @abstractmethod
    def rescaled(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Embeddings that change their weight in a forward: name and max_norm as text, and the weight."""

    # --- what follows from these ---

    def hash_model(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], optimizer: Any
    ) -> list[Entry]:
        """The hash of each tensor, and of what an optimizer holds; None: there is none."""
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
    """Not from Paddle's `size`, which asks numpy and takes 12 us."""
    return int(math.prod(tensor.shape) * tensor.element_size())


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).rpartition(".")[2]
