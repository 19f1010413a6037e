"""The interface of `BackwardSync` to a framework: gradients, autograd, weights and buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline import _core
from paceline.errors import PacelineError
from paceline.reducer.backward.backward_log import LocalBackward
from paceline.reducer.backward.micro_batch_weights import MicroBatchWeights
from paceline.reducer.buffers import BufferedModel, BufferSync
from paceline.reducer.communicator import Reduction
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.model_agreement import TensorDescription
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
        names: The names of the parameters in the plan, by index.
        trainable: These parameters.
        all_names: The names of all trained parameters: first those in the plan, then those whose gradients
            lie elsewhere.
        all_trainable: The parameters of `all_names`.
        all_parameters: By name, including frozen ones.
        delayed: Indices of delay_all_reduce_named_params.
        frozen_now: Indices of trainable parameters that were frozen when a forward last checked.
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
        """Average gradients by this reduction from now on; gradients in an old gradient buffer are moved."""
        ...

    def share(self, indices: set[int]) -> None: ...

    def exists(self, index: int) -> bool: ...

    def hand_over_rest(self, index: int) -> None: ...

    def count_unused(self, indices: Collection[int]) -> None:
        """Let the gradients left of these parameters count in the means, although this backward has not used
        the parameters.

        Called after the last gradient of a backward, when none of these is in the gradient buffer.
        """
        ...

    def clear(self, index: int) -> None: ...

    def leave_out(self, indices: Collection[int]) -> None: ...

    def check(self) -> None:
        """Check again what was handed over, before this rank reports its status."""
        ...

    def write_back(self, missing: Sequence[int]) -> None:
        """Set every gradient to the mean, unless the reducer has done so itself.

        If the reduction has owners, a stand-in takes the place of a gradient that is only there in part.
        """
        ...

    def hand_over_sum(self, index: int, total: Any) -> None:
        """Hand over a tensor with the parameter's shape and layout: its gradient, or a wider sum."""
        ...

    def keep(self) -> dict[int, tuple[Any, bool]]:
        """All gradients, in memory that no backward changes, and whether each was in the gradient buffer."""
        ...

    def restore(self, kept: dict[int, tuple[Any, bool]]) -> None: ...

    def leave_buffer(self, indices: Collection[int] | None = None) -> None:
        """Move these gradients (None: all) with their values to memory of their own.

        Not collective.
        """
        ...

    def interrupt(self) -> None:
        """Move gradients out of the gradient buffer after an exception, because ranks may still write there.

        The framework may call this when the user's thread has already continued. Then it does nothing, and
        `settle` does the work.
        """
        ...

    def settle(self) -> None:
        """Do what `interrupt` has left undone, before the backward is given up.

        Called in the user's thread, or while that thread waits for a backward.
        """
        ...

    def fingerprint(self) -> Fingerprint: ...

    def memory(self) -> Memory | None:
        """Addresses and sizes of all gradients; None if the CPU cannot read all of them."""
        ...


class Sparse(Protocol):
    squared_norm: float
    nonfinite: list[tuple[int, int]]

    @property
    def indices(self) -> Collection[int]:
        """The parameters that have sparse gradients."""
        ...

    def pack(self, weight: float, *, has_data: bool = True) -> Any:
        """This rank's sparse gradients with their weight, in memory of their own."""
        ...

    def average(self, packed: Sequence[Any]) -> None:
        """Replace the sparse gradients by the weighted means of what all ranks have packed. Collective.

        Values are added in the order of ranks, and those of a rank in its order.
        """
        ...


class Autograd(Protocol):
    def frozen_among(self, indices: Iterable[int]) -> set[int]: ...

    def install(self) -> None:
        """Hook the parameters in the way that `Gradients` needs now."""
        ...

    def share(self, indices: set[int]) -> None: ...

    def use_static_graph(self, is_static: bool) -> None: ...

    def begin_forward(self, *, is_syncing: bool, good_backwards: int) -> None: ...

    def watch(self, output: object) -> None:
        """Average the backward of these outputs even if it reaches no parameter."""
        ...

    def watch_local(self, output: object, backward: LocalBackward) -> None:
        """Record the backward of the outputs of a forward in no_sync()."""
        ...

    def is_in_backward(self) -> bool:
        """Whether this thread runs a backward; a forward within it is a recomputation."""
        ...

    def backward(self) -> int:
        """An identifier of the backward that this thread runs, equal for all models that end with it."""
        ...

    def await_drop(self, is_dropped: Callable[[], bool]) -> None:
        """Wait, for seconds at most, until another thread has dropped the end of a backward that raised.

        Args:
            is_dropped: Whether it has been dropped. Not called if a backward runs in its caller's thread.
        """
        ...

    def prepare(self) -> None: ...

    def at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the running backward is over; drop it if the backward raises."""
        ...

    def find_swapped(self) -> list[int]:
        """Parameters whose hooks were lost since the last call; this registers their hooks again."""
        ...

    def raise_kept(self) -> None:
        """Raise the error of a hook that was not allowed to raise it."""
        ...

    @property
    def complete(self) -> Callable[[], None] | None:
        """Hands over gradients that were deferred to the end of backward; None if there never are any."""
        ...

    def note_error(self, error: PacelineError) -> None: ...

    def after_means(self) -> None: ...

    def learn(self) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


AnyAutograd = TypeVar("AnyAutograd", bound=Autograd, covariant=True)


@dataclass(frozen=True)
class FrontEnd(Generic[AnyAutograd]):
    """A framework's objects for the backward passes of one model."""

    tensors: Tensors
    gradients: Gradients
    sparse: Sparse
    autograd: AnyAutograd
    micro_batches: MicroBatchWeights
    buffers: BufferSync
    notes: _core.IterationNotes
    ops: FrameworkOps[Any]
