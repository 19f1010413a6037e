"""What a framework gives to the backward passes of a model: its gradients, its autograd, weights and buffers.

The one idea: `BackwardSync` is the same for every framework, and asks these few things of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline import _core
from paceline.errors import PacelineError
from paceline.reducer.agreement import TensorDescription
from paceline.reducer.backward.log import LocalBackward
from paceline.reducer.backward.micro_batches import MicroBatchWeights
from paceline.reducer.buffers import BufferedModel, BufferSync
from paceline.reducer.communicator import Reduction
from paceline.reducer.plan import BucketCaps, ParameterSpec
from paceline.reducer.replica_check import Entry

Fingerprint = Sequence[tuple[int, int]]
"""Identity and version counter of each gradient."""

Memory = tuple[list[int], list[int]]
"""Addresses and sizes in bytes."""


class PlanOptions(BucketCaps, Protocol):
    """How the gradients of a wrapped model are averaged; it stays so as long as its `BackwardSync` does."""

    @property
    def nonfinite(self) -> str: ...
    @property
    def gradients_in_buffer(self) -> bool: ...
    @property
    def skip_unused(self) -> bool: ...


class BackwardOptions(PlanOptions, Protocol):
    """What a wrapped model was asked to do, as far as the backward passes need it."""

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
    def is_on_host(self) -> bool:
        """Whether all trained parameters are on the CPU."""
        ...

    def describe(self) -> tuple[tuple[TensorDescription, ...], tuple[TensorDescription, ...]]: ...
    def agreed_options(self) -> dict[str, str]: ...


class Gradients(Protocol):
    """The gradients of the parameters that a plan lists, and where they lie."""

    @property
    def any_in_buffer(self) -> bool:
        """Whether any may live in the gradient buffer."""
        ...

    def specs(self, *, whole: bool) -> list[ParameterSpec]:
        """The parameters as a plan knows them; `whole`: for buckets that a hook looks at."""
        ...

    def adopt(self, reduction: Reduction[Any]) -> None:
        """Have gradients averaged here from now on; those that live in a gradient buffer are moved."""
        ...

    def share(self, indices: set[int]) -> None:
        """Note which parameters other wrapped models have, too."""
        ...

    def exists(self, index: int) -> bool:
        """Whether the parameter has a gradient."""
        ...

    def hand_over_rest(self, index: int) -> None:
        """Give a gradient to the reducer that its hook has not given."""
        ...

    def count_unused(self, indices: Collection[int]) -> None:
        """Let what is left of these parameters count in the means, although this backward has not used them.

        Called after the last gradient of a backward, where none of theirs is in the gradient buffer.
        """
        ...

    def clear(self, index: int) -> None:
        """Fill the parameter's place in the gradient buffer with zeros."""
        ...

    def leave_out(self, indices: Collection[int]) -> None:
        """These have no gradient in this backward: their places will become zeros."""
        ...

    def check(self) -> None:
        """Look again at what was handed over, before this rank tells how its backward went."""
        ...

    def write_back(self, missing: Sequence[int]) -> None:
        """Make every gradient the mean, where the reducer has not done so itself.

        If the reduction has owners, let what is there in part stand for it.

        Args:
            missing: Parameters that got none on this rank, and one on others.
        """
        ...

    def keep(self) -> dict[int, Any]:
        """All gradients, by parameter, where no backward changes them."""
        ...

    def restore(self, kept: dict[int, Any]) -> None:
        """Make what keep() has returned the only gradients that there are."""
        ...

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

    def fingerprint(self) -> Fingerprint:
        """Identity and version counter of each."""
        ...

    def memory(self) -> Memory | None:
        """Where all are; None: not all where the processor can read them."""
        ...


class Sparse(Protocol):
    """Gradients that lie elsewhere, and are averaged after all others.

    Attributes:
        squared_norm: The squared norm of the last backward's means.
        nonfinite: (rank, parameter) of each that was not finite in the last backward.
    """

    squared_norm: float
    nonfinite: list[tuple[int, int]]

    def __len__(self) -> int:
        """How many parameters have such gradients."""
        ...

    def average(self, weight: float, *, has_data: bool) -> None:
        """Replace them by their weighted means. Collective.

        Args:
            weight: The weight of this rank.
            has_data: False: what is there is left from an earlier backward.
        """
        ...


class Autograd(Protocol):
    """When a framework's backward passes begin and end."""

    def frozen_among(self, indices: Iterable[int]) -> set[int]:
        """Of these parameters, those that are frozen now."""
        ...

    def install(self) -> None:
        """Hook the parameters, as `Gradients` hands them over now."""
        ...

    def share(self, indices: set[int]) -> None:
        """Note which parameters other wrapped models have, too."""
        ...

    def use_static_graph(self, is_static: bool) -> None:
        """Whether that is promised from now on."""
        ...

    def begin_forward(self, *, is_syncing: bool, good_backwards: int) -> None:
        """A forward begins whose gradients will be needed."""
        ...

    def watch(self, output: object) -> None:
        """Let the backward of these outputs be averaged even if it reaches no parameter."""
        ...

    def watch_local(self, output: object, backward: LocalBackward) -> None:
        """Tell of the backward of what a forward in no_sync() has returned."""
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

    def prepare(self) -> None:
        """The first gradient of a backward has come."""
        ...

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

    def note_error(self, error: PacelineError) -> None:
        """The backward raises this."""
        ...

    def after_means(self) -> None:
        """The means are in place."""
        ...

    def learn(self) -> None:
        """The backward was good."""
        ...

    def forget(self) -> None:
        """The backward is over, or was given up."""
        ...

    def close(self) -> None:
        """Hear of no gradient any more."""
        ...


AnyAutograd = TypeVar("AnyAutograd", bound=Autograd, covariant=True)


@dataclass(frozen=True)
class FrontEnd(Generic[AnyAutograd]):
    """What a framework gives to the backward passes of one model.

    Attributes:
        tensors: The model's.
        gradients: Where they lie.
        sparse: Those that lie elsewhere.
        autograd: When backward passes begin and end.
        micro_batches: The weights of this rank's micro-batches.
        buffers: Keeps them in step.
        notes: What this rank does between two backward passes.
        hash_model: Hashes of parameters, buffers and an optimizer's state, if there is one.
    """

    tensors: Tensors
    gradients: Gradients
    sparse: Sparse
    autograd: AnyAutograd
    micro_batches: MicroBatchWeights
    buffers: BufferSync
    notes: _core.IterationNotes
    hash_model: Callable[[Mapping[str, Any], Mapping[str, Any], Any], Sequence[Entry]]
