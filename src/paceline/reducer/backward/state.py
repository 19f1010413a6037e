"""Where one model is in its backward passes, in one object that all who take part in a backward look at.

Hooks ask at each gradient whether it is to be averaged, in C++ too, so the answers are plain attributes that
are read where they lie. `BackwardState` decides nothing: `BackwardSync` moves it from one phase to the next,
and hooks and the front end note in it what they have handed over, and what is wrong.

`Graphs` knows the forwards whose backward is still to come. `loss = wrap(model)(x).sum()` drops the wrapper
before its backward. So the hooks on the outputs of a forward hold one object, which lives as long as their
graph, and the model's hooks stay until the wrapper is gone and no such graph is left to be run backward. One
that has been is no reason to stay: a `loss` that lingers must not make a later backward of the bare model
wait for other ranks. A backward that runs is known by `EndOfBackward`: the call at its end, or that the call
was dropped.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from paceline import _core
from paceline.errors import ConfigError, ForkedError
from paceline.reducer.protocol import BackwardStatus


class Phase(IntEnum):
    """Where a model is in a backward that is averaged. From RUNNING on a backward is under way."""

    IDLE = _core.BACKWARD_PHASES["idle"]
    """No gradient has come since the last backward."""
    INTERRUPTED = _core.BACKWARD_PHASES["interrupted"]
    """An exception has ended the backward here, of which the other ranks do not know yet."""
    RUNNING = _core.BACKWARD_PHASES["running"]
    """Autograd runs the backward, and hooks hand gradients over."""
    OPEN = _core.BACKWARD_PHASES["open"]
    """Autograd is through with the backward, which waits for `BackwardSync.end_by_hand`."""
    ENDING = _core.BACKWARD_PHASES["ending"]
    """This rank ends the backward: it waits for the others, judges, and writes the means back."""


# Globals, which hooks find sooner than members of a class.
IDLE, INTERRUPTED, RUNNING, OPEN, ENDING = Phase


class BackwardState:
    """Where one model is in its backward passes; hooks and the front end share it.

    Attributes:
        is_syncing: Whether the backward under way, or the next one, is averaged. Only this class writes it: a
            forward has it be as the wrapper asks (`require_backward_grad_sync`), and `BackwardSync.local`
            lets no backward within no_sync() be averaged. A backward that comes to the outputs of an earlier
            forward has it as that forward had, until it is over: see `follow`.
        is_local: Whether this is within no_sync().
        is_due: Whether a forward whose backward is to be averaged was made since the last backward. Then a
            backward that comes to no known output is taken for one to be averaged.
        is_forward_averaged: Whether the backward of the forward under way is to be.
        is_forward_counted: Whether `status.forwards` counts it, or the last one.
        is_forced: Whether the next backward is averaged or not whatever its forward was to do.
        phase: See `Phase`.
        ends_by_hand: Whether the end of a backward leaves it open, for `BackwardSync.end_by_hand`.
        handed: Gradients handed over in this backward, by parameter, in that order. Keeps the memory alive
            that the reducer reads and writes by pointer.
        staged: The handed gradients whose mean the front end copies back.
        accumulated: Parameters that got local gradients, in no_sync(), since the last synchronised backward.
        rank_weight: The weight of this rank in the backward under way, or the last one.
        arm: Begins a backward; hooks call it at the first gradient.
        give_up: Ends the backward that an exception broke off; see `give_up_before`.
        graphs: The graphs of forwards whose backward is still to come.
        status: What the end of the backward reports to all ranks: the forwards since the last one, and what
            is wrong. A hook that raised instead would leave the others waiting.
        refusal: Why the gradient of the parameter `status.refused` cannot be averaged.
        where: "rank 1 of 2", for errors.
    """

    __slots__ = (
        "_usual",
        "accumulated",
        "arm",
        "ends_by_hand",
        "give_up",
        "graphs",
        "handed",
        "is_due",
        "is_forced",
        "is_forward_averaged",
        "is_forward_counted",
        "is_local",
        "is_syncing",
        "phase",
        "pid",
        "rank_weight",
        "refusal",
        "staged",
        "status",
        "where",
    )

    def __init__(self, rank: int, world_size: int) -> None:
        self.where = f"rank {rank} of {world_size}"
        self.is_syncing = True
        self.is_local = self.is_forced = self.is_due = False
        self.is_forward_averaged, self.is_forward_counted = True, False
        self._usual: bool | None = None  # what `is_syncing` is after the backward that follows its forward
        self.phase = IDLE
        self.ends_by_hand = False
        self.handed = _core.HandedGradients()
        self.staged: list[int] = []
        self.accumulated: set[int] = set()
        self.status = BackwardStatus()
        self.rank_weight = 1.0
        self.refusal: ConfigError | None = None
        self.pid = os.getpid()
        self.arm: Callable[[], None]
        self.give_up: Callable[[], None]
        self.graphs: Graphs

    def expect(self, is_syncing: bool, *, is_forced: bool = False) -> None:
        """The next backward is averaged, or not, unless it comes to the outputs of another forward.

        Args:
            is_forced: Whatever it comes to.
        """
        self.is_syncing, self._usual, self.is_forced = is_syncing, None, is_forced

    def begin_forward(self, is_averaged: bool, *, is_training: bool, in_backward: bool) -> None:
        """A forward begins.

        Args:
            is_averaged: Whether its backward is to be averaged.
            is_training: Whether the model is in training mode. Forwards in evaluation mode often have no
                backward, on some ranks only; such a rank skips nothing, so they are not counted.
            in_backward: Whether a checkpoint repeats it there, and it has been counted; the backward that
                runs may be another one's.
        """
        self.is_forward_averaged = is_averaged
        self.is_forward_counted = is_averaged and is_training and not in_backward
        if self.is_forward_counted:
            self.status.forwards += 1
        if not in_backward:
            self.is_due = self.is_due or is_averaged
            self.expect(self.is_due and not self.is_local)

    def take_back_forward(self) -> None:
        """The last forward, which was counted, can have no backward."""
        self.is_forward_counted = False
        self.status.forwards -= 1

    def give_up_before(self, graph: Graph) -> None:
        """Give up an interrupted backward before one that is averaged, which has come to this graph.

        Before anything is noted of the one that has come, which this would forget.
        """
        is_averaged = self.is_syncing if self.is_forced else graph.is_averaged and not self.is_local
        if self.phase is INTERRUPTED and is_averaged:
            self.give_up()

    def is_other(self, graph: Graph) -> bool:
        """Whether `is_syncing` is wrong for the backward that has come to this graph."""
        if self.phase >= RUNNING or self.is_forced:
            return False
        return self.is_syncing != (graph.is_averaged and not self.is_local)

    def follow(self, graph: Graph) -> None:
        """Average the backward that has come to this graph, or not, as its forward was to; see `is_other`.

        Where a backward runs through several graphs it is averaged if any of them is, as in torch.
        """
        if self._usual is None:
            self._usual = self.is_syncing
        self.is_syncing = graph.is_averaged and not self.is_local

    def unfollow(self) -> None:
        """The backward is over that `follow` was called in; or there was none."""
        if self._usual is not None:
            self.is_syncing, self._usual = self._usual, None

    def begin_next(self) -> None:
        """Forget the backward that is over."""
        self.unfollow()
        self.phase = IDLE
        self.is_forced = self.is_due = False
        self.handed.clear()
        self.staged.clear()
        self.accumulated.clear()
        self.status.begin_next()
        self.refusal = None

    def refuse(self, index: int, error: ConfigError) -> None:
        """The gradient of a parameter cannot be averaged; raises at once where no backward will end.

        Raises:
            ConfigError: The one given.
        """
        if not self.is_syncing:
            raise error
        if self.refusal is None:
            self.status.refused, self.refusal = index, error

    def report_unweighed(self, num_parameters: int) -> None:
        """The gradients of this rank are not weighed, which a number past the last parameter reports."""
        if self.refusal is None:
            self.status.refused = num_parameters

    def check_process(self) -> None:
        """Raise ForkedError in a forked child, which has the model but not the memory."""
        if os.getpid() != self.pid:
            raise ForkedError(
                "A model wrapped for data-parallel training was used in a forked child.",
                seen=f"wrapped in process {self.pid}, used in process {os.getpid()}",
                likely="a data loader's worker, or multiprocessing with the start method 'fork'",
                hint="use `.module` in the child; or start it with the method 'spawn' and wrap there",
            )


class Graph:
    """One forward's. What its outputs' hooks hold, and nothing else.

    Args:
        on_gradient: Called with this graph and an output's gradient; returns what replaces that, or None.
        is_averaged: Whether a backward through it is; not, if its forward ran in no_sync().
        counted_in: The backward in whose number of forwards it is, as `Graphs` counts them; None: in none.
        frozen: The parameters that were frozen when it was built.

    Attributes:
        weight: What its forward weighs; None: the forward was given no weight.
    """

    __slots__ = ("__weakref__", "_on_gradient", "counted_in", "frozen", "is_averaged", "weight")

    def __init__(
        self,
        on_gradient: Callable[[Graph, Any], Any],
        *,
        is_averaged: bool,
        counted_in: int | None,
        frozen: frozenset[int],
    ) -> None:
        self._on_gradient = on_gradient
        self.is_averaged = is_averaged
        self.counted_in = counted_in
        self.frozen = frozen
        self.weight: float | None = None

    def hook(self, gradient: Any) -> Any:
        """The hook of each output."""
        return self._on_gradient(self, gradient)


class Graphs:
    """The graphs of one wrapped model.

    Args:
        close: Removes the model's hooks.

    Attributes:
        reached: How many forwards the backward under way runs through that were counted since the last one.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._open: set[weakref.ref[Graph]] = set()
        self._begun: dict[weakref.ref[Graph], frozenset[int]] = {}  # and its `frozen`
        self._backwards = self.reached = 0
        self._has_wrapper = True
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has reached a forward's outputs, and its backward is not over."""
        return bool(self._begun)

    def frozen(self) -> frozenset[int] | None:
        """The parameters that were frozen in every graph that the backward under way runs through.

        None: it has come to no graph, because the outputs of its forwards could not be watched.
        """
        return frozenset.intersection(*self._begun.values()) if self._begun else None

    def add(
        self,
        on_gradient: Callable[[Graph, Any], Any],
        *,
        is_averaged: bool,
        is_counted: bool,
        frozen: frozenset[int] = frozenset(),
    ) -> Graph:
        """The graph of a new forward, open until a backward runs through it, or it is dropped."""
        counted_in = self._backwards if is_counted else None
        graph = Graph(on_gradient, is_averaged=is_averaged, counted_in=counted_in, frozen=frozen)
        if is_averaged:  # a local backward needs no hooks
            self._open.add(weakref.ref(graph, self._forget))
        return graph

    def check_open(self) -> None:
        """Before a backward begins.

        Raises:
            ConfigError: The hooks are gone already.
        """
        if self._is_closed:
            raise ConfigError(
                "This backward belongs to a model whose wrapper is gone, or has another process group now.",
                seen="a second backward of one forward, after the wrapper was dropped",
                hint="keep the wrapped model, not just its outputs; run forward again in the new group",
            )

    def begin(self, graph: Graph) -> None:
        """The backward under way runs through this graph."""
        self.check_open()
        self._begun[weakref.ref(graph)] = graph.frozen
        if graph.counted_in == self._backwards:
            graph.counted_in = None
            self.reached += 1

    def end_backward(self) -> None:
        """The backward is over, and the graphs that it ran through with it."""
        self._backwards += 1
        self.reached = 0
        self._open.difference_update(self._begun)
        self._begun = {}
        self._close_if_last()

    def drop_wrapper(self) -> None:
        """The user holds no wrapper any more."""
        self._has_wrapper = False
        self._close_if_last()

    def _forget(self, graph: weakref.ref[Graph]) -> None:
        self._open.discard(graph)
        self._close_if_last()

    def _close_if_last(self) -> None:
        if not self._has_wrapper and not self._open:
            self.close()

    def close(self) -> None:
        """Remove the model's hooks, whatever is still to be run."""
        if not self._is_closed:
            self._is_closed = True
            self._close()


class EndOfBackward:
    """The call that a framework makes at the end of a backward, or that never comes, because it raised.

    To be given to the framework, and not kept: it alone holds the call, together with what else it knows of
    that backward. An exception drops it all, and that the call goes unmade is how anybody learns that the
    backward is over. Where a framework runs a backward in a thread of its own, as torch does on devices, this
    thread may drop it while the user's has the exception already, and goes on.

    Args:
        end: Called when the backward is over.
        interrupted: Called when an exception has ended it, within the framework, or its end: it must neither
            wait nor raise. Before the user has the exception, where no other thread runs the backward.
    """

    __slots__ = ("_end", "_interrupted", "_is_made")

    def __init__(self, end: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._end = end
        self._interrupted = interrupted
        self._is_made = False

    def __call__(self) -> None:
        self._end()
        self._is_made = True  # else `interrupted` comes, too, and finds what `_end` has left to do

    def __del__(self) -> None:
        if not self._is_made:
            self._interrupted()
