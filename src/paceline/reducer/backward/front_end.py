"""What `BackwardSync` asks of a framework: gradients, autograd, weights and buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline import _core
from paceline.errors import PacelineError
from paceline.reducer.agreement import TensorDescription
from paceline.reducer.backward.log import LocalBackward
from paceline.reducer.backward.micro_batches import MicroBatchWeights
from paceline.reducer.buffers import BufferedModel, BufferSync
from paceline.reducer.communicator import Reduction
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.plan import BucketCaps, ParameterSpec

Fingerprint = Sequence[tuple[int, int]]
"""Identity and version counter of each gradient."""

Memory = tuple[list[int], list[int]]
"""Addresses and sizes in bytes."""


class PlanOptions(BucketCaps, Protocol):
    @property
    def nonfinite(self) -> str: ...
    @property
    def gradients_in_buffer(self) -> bool: ...
    @property
    def skip_unused(self) -> bool: ...


class BackwardOptions(PlanOptions, Protocol):
    @property
    def allow_unused(self) -> bool: ...
    @property
    def allow_globally_unused(self) -> bool: ...
    @property
    def static_graph(self) -> bool: ...
    @property
    def check_replicas_every(self) -> int | None: ...
    @property
    def scatters(self) -> bool: ...
    @property
    def timeout_s(self) -> float | None: ...


class Tensors(BufferedModel, Protocol):
    """The parameters and buffers of a model.

    Attributes:
        names: The names of the parameters that the plan lists, by index.
        trainable: Those parameters.
        all_names: The names of all trained parameters: those, then any whose gradients lie elsewhere.
        all_trainable: Those parameters.
        all_parameters: By name, frozen ones too.
        delayed: Indices of delay_all_reduce_named_params.
        frozen_now: Indices of trainable parameters that were frozen when a forward last looked.
    """

    names: list[str]
    trainable: list[Any]
    all_parameters: dict[str, Any]
    frozen_now: frozenset[int]

    @property
    def all_names(self) -> Sequence[str]: ...
    @property
    def all_trainable(self) -> Sequence[Any]: ...
    @property
    def delayed(self) -> Collection[int]: ...
    @property
    def is_on_host(self) -> bool: ...

    def describe(self) -> tuple[tuple[TensorDescription, ...], tuple[TensorDescription, ...]]: ...
    def agreed_options(self) -> dict[str, str]: ...


class Gradients(Protocol):
    @property
    def any_in_buffer(self) -> bool: ...

    def specs(self, *, whole: bool) -> list[ParameterSpec]: ...

    def adopt(self, reduction: Reduction[Any]) -> None:
        """Have gradients averaged here from now on; those in a gradient buffer are moved."""
        ...

    def share(self, indices: set[int]) -> None: ...

    def exists(self, index: int) -> bool: ...

    def hand_over_rest(self, index: int) -> None: ...

    def count_unused(self, indices: Collection[int]) -> None:
        """Let what is left of these parameters count in the means, although this backward has not used them.

        Called after the last gradient of a backward, where none of theirs is in the gradient buffer.
        """
        ...

    def clear(self, index: int) -> None: ...

    def leave_out(self, indices: Collection[int]) -> None: ...

    def check(self) -> None:
        """Check again what was handed over, before this rank reports its status."""
        ...

    def write_back(self, missing: Sequence[int]) -> None:
        """Make every gradient the mean, where the reducer has not done so itself.

        If the reduction has owners, let what is there in part stand for it.
        """
        ...

    def put(self, index: int, gradient: Any) -> None:
        """Let a tensor of the parameter's form be its gradient."""
        ...

    def keep(self) -> dict[int, tuple[Any, bool]]:
        """All gradients, where no backward changes them, and whether they were in the gradient buffer."""
        ...

    def restore(self, kept: dict[int, tuple[Any, bool]]) -> None: ...

    def leave_buffer(self, indices: Collection[int] | None = None) -> None:
        """Give these gradients (None: all) memory of their own, with the values that they have.

        Not collective.
        """
        ...

    def interrupt(self) -> None:
        """After an exception: take gradients out of the gradient buffer, where ranks may still write.

        The framework may call this while the user's thread already goes on. Then it does nothing, and
        `settle` does it.
        """
        ...

    def settle(self) -> None:
        """What `interrupt` has left to do, before the backward is given up.

        Called in the user's thread, or while that waits for a backward.
        """
        ...

    def fingerprint(self) -> Fingerprint: ...

    def memory(self) -> Memory | None:
        """Where all are; None: not all where the processor can read them."""
        ...


class Sparse(Protocol):
    squared_norm: float
    nonfinite: list[tuple[int, int]]

    def __len__(self) -> int: ...

    def average(self, weight: float, *, has_data: bool) -> None:
        """Replace them by their weighted means. Collective."""
        ...


class Autograd(Protocol):
    def frozen_among(self, indices: Iterable[int]) -> set[int]: ...

    def install(self) -> None:
        """Hook the parameters, as `Gradients` hands them over now."""
        ...

    def share(self, indices: set[int]) -> None: ...

    def use_static_graph(self, is_static: bool) -> None: ...

    def begin_forward(self, *, is_syncing: bool, good_backwards: int) -> None: ...

    def watch(self, output: object) -> None:
        """Let the backward of these outputs be averaged even if it reaches no parameter."""
        ...

    def watch_local(self, output: object, backward: LocalBackward) -> None:
        """Report the backward of what a forward in no_sync() has returned."""
        ...

    def is_in_backward(self) -> bool:
        """Whether this thread runs a backward: a forward within it is a recomputation."""
        ...

    def backward(self) -> int:
        """Which backward this thread runs: those that begin in the same one end together."""
        ...

    def await_drop(self, is_dropped: Callable[[], bool]) -> None:
        """Wait, for seconds at most, until another thread has dropped the end of a backward that raised.

        Args:
            is_dropped: Whether it has. Not asked where a backward runs in the thread of its caller.
        """
        ...

    def prepare(self) -> None: ...

    def at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the backward that runs is over; drop it where it raises."""
        ...

    def find_swapped(self) -> list[int]:
        """Parameters whose hooks were lost since this was asked last: they have them again from now on."""
        ...

    def raise_kept(self) -> None:
        """Raise what a hook would have raised, if it must not."""
        ...

    @property
    def complete(self) -> Callable[[], None] | None:
        """Hands over gradients that have waited for the end of backward; None: none ever do."""
        ...

    def note_error(self, error: PacelineError) -> None: ...

    def after_means(self) -> None: ...

    def learn(self) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


AnyAutograd = TypeVar("AnyAutograd", bound=Autograd, covariant=True)


@dataclass(frozen=True)
class FrontEnd(Generic[AnyAutograd]):
    """What a framework gives to the backward passes of one model."""

    tensors: Tensors
    gradients: Gradients
    sparse: Sparse
    autograd: AnyAutograd
    micro_batches: MicroBatchWeights
    buffers: BufferSync
    notes: _core.IterationNotes
    ops: FrameworkOps[Any]
