"""The state of one model's backward passes, in one object that everything involved in a backward reads.

Hooks ask at each gradient whether it is to be averaged, in C++ too, so the answers are plain attributes that
are read in place. `BackwardState` decides nothing: `BackwardSync` moves it from one phase to the next, and
hooks and the front end record in it which gradients they handed over and what is wrong.

`Graphs` tracks the forwards whose backward is still to come. `loss = wrap(model)(x).sum()` drops the wrapper
before its backward. So the hooks on the outputs of a forward hold one object that lives as long as their
graph, and the model's hooks stay until the wrapper is gone and no such graph is left to be run backward. A
graph that has been run backward does not keep them: otherwise, a `loss` that stays alive would make a later
backward of the bare model wait for other ranks. `EndOfBackward` represents a running backward: the framework
calls it at the end, or drops it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from paceline import _core
from paceline.errors import ConfigError, ForkedError
from paceline.reducer.reducer_interface import BackwardStatus


class Phase(IntEnum):
    """Where a model is in a backward that is averaged. From RUNNING on, a backward is under way."""

    IDLE = _core.BACKWARD_PHASES["idle"]
    """No gradient has come since the last backward."""
    INTERRUPTED = _core.BACKWARD_PHASES["interrupted"]
    """An exception ended the backward on this rank, and the other ranks do not know of it yet."""
    RUNNING = _core.BACKWARD_PHASES["running"]
    """Autograd runs the backward, and hooks hand gradients over."""
    OPEN = _core.BACKWARD_PHASES["open"]
    """Autograd has finished the backward, which now waits for `BackwardSync.end_by_hand`."""
    ENDING = _core.BACKWARD_PHASES["ending"]
    """This rank ends the backward: it waits for the others, checks the outcome, and writes the means back."""


# Globals, because hooks look them up faster than members of a class.
IDLE, INTERRUPTED, RUNNING, OPEN, ENDING = Phase


class BackwardState:
    """The state of one model's backward passes; hooks and the front end share it.

    Attributes:
        is_syncing: Whether the backward under way, or the next one, is averaged. Only this class writes it. A
            forward sets it to what the wrapper requests (`require_backward_grad_sync`), and
            `BackwardSync.local` turns it off within no_sync(). A backward that reaches the outputs of an
            earlier forward takes the value of that forward until it is over; see `follow`.
        is_local: Whether this is within no_sync().
        is_due: Whether there was a forward since the last backward whose backward is to be averaged. If so, a
            backward that reaches no known output is averaged too.
        is_forward_averaged: Whether the backward of the forward under way is to be averaged.
        is_forward_counted: Whether `status.forwards` counts the forward under way, or else the last one.
        is_forced: Whether `is_syncing` holds for the next backward whatever its forward requested.
        phase: See `Phase`.
        ends_by_hand: Whether the end of a backward leaves it open for `BackwardSync.end_by_hand`.
        handed: Gradients handed over in this backward, by parameter, in that order. Keeps the memory alive
            that the reducer reads and writes by pointer.
        staged: The handed gradients whose mean the front end copies back.
        accumulated: Parameters that got local gradients, in no_sync(), since the last synchronised backward.
        rank_weight: The weight of this rank in the backward under way, or the last one.
        arm: Begins a backward; hooks call it at the first gradient.
        give_up: Ends the backward that an exception interrupted; see `give_up_before`.
        graphs: The graphs of forwards whose backward is still to come.
        status: What this rank reports to all ranks at the end of the backward: the forwards since the last
            one, and what is wrong. If a hook raised instead, the other ranks would keep waiting.
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
        self._usual: bool | None = None  # the value of `is_syncing` to restore; see `follow`
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
        """Set whether the next backward is averaged, unless it reaches the outputs of another forward.

        Args:
            is_forced: Ignore which forward's outputs it reaches.
        """
        self.is_syncing, self._usual, self.is_forced = is_syncing, None, is_forced

    def begin_forward(self, is_averaged: bool, *, is_training: bool, in_backward: bool) -> None:
        """Note a new forward.

        Args:
            is_averaged: Whether its backward is to be averaged.
            is_training: Whether the model is in training mode. Forwards in evaluation mode are not counted,
                because they often have no backward, on some ranks only, and such a rank skips nothing.
            in_backward: Whether a checkpoint recomputes a forward that has been counted before. The running
                backward may be that of another model.
        """
        self.is_forward_averaged = is_averaged
        self.is_forward_counted = is_averaged and is_training and not in_backward
        if self.is_forward_counted:
            self.status.forwards += 1
        if not in_backward:
            self.is_due = self.is_due or is_averaged
            self.expect(self.is_due and not self.is_local)

    def take_back_forward(self) -> None:
        """Uncount the last forward, because it can have no backward."""
        self.is_forward_counted = False
        self.status.forwards -= 1

    def give_up_before(self, graph: Graph) -> None:
        """Give up an interrupted backward before a new averaged one, which has reached this graph.

        Called before anything of the new backward is noted, because giving up would forget it.
        """
        is_averaged = self.is_syncing if self.is_forced else graph.is_averaged and not self.is_local
        if self.phase is INTERRUPTED and is_averaged:
            self.give_up()

    def is_other(self, graph: Graph) -> bool:
        """Whether `is_syncing` is wrong for the backward that has reached this graph."""
        if self.phase >= RUNNING or self.is_forced:
            return False
        return self.is_syncing != (graph.is_averaged and not self.is_local)

    def follow(self, graph: Graph) -> None:
        """Average the backward that has reached this graph if its forward requested that; see `is_other`.

        A backward that runs through several graphs is averaged if any of them is, as in torch.
        """
        if self._usual is None:
            self._usual = self.is_syncing
        self.is_syncing = graph.is_averaged and not self.is_local

    def unfollow(self) -> None:
        """Undo `follow` at the end of the backward; does nothing if it was not called."""
        if self._usual is not None:
            self.is_syncing, self._usual = self._usual, None

    def begin_next(self) -> None:
        """Forget the last backward."""
        self.unfollow()
        self.phase = IDLE
        self.is_forced = self.is_due = False
        self.handed.clear()
        self.staged.clear()
        self.accumulated.clear()
        self.status.begin_next()
        self.refusal = None

    def refuse(self, index: int, error: ConfigError) -> None:
        """Note that a parameter's gradient cannot be averaged; in a local backward, raise at once.

        Raises:
            ConfigError: The one given.
        """
        if not self.is_syncing:
            raise error
        if self.refusal is None:
            self.status.refused, self.refusal = index, error

    def report_unweighed(self, num_parameters: int) -> None:
        """Report that this rank's gradients are not weighed, as a `refused` index past the last parameter."""
        if self.refusal is None:
            self.status.refused = num_parameters

    def check_process(self) -> None:
        """Raise ForkedError in a forked child, which has the model but not the shared memory."""
        if os.getpid() != self.pid:
            raise ForkedError(
                "A model wrapped for data-parallel training was used in a forked child.",
                seen=f"wrapped in process {self.pid}, used in process {os.getpid()}",
                likely="a data loader's worker, or multiprocessing with the start method 'fork'",
                hint="use `.module` in the child; or start it with the method 'spawn' and wrap there",
            )


class Graph:
    """The autograd graph of one forward. Only its outputs' hooks hold this object.

    Args:
        on_gradient: Called with this graph and an output's gradient; returns a replacement, or None.
        is_averaged: Whether a backward through it is averaged; not if its forward ran in no_sync().
        counted_in: The backward whose forward count includes this one, as `Graphs` numbers it; None: no
            backward's.
        frozen: The parameters that were frozen when it was built.

    Attributes:
        weight: The weight of its forward; None if it was given none.
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
        """The hook to register on each output."""
        return self._on_gradient(self, gradient)


class Graphs:
    """The graphs of one wrapped model.

    Args:
        close: Removes the model's hooks.

    Attributes:
        reached: How many of the forwards counted since the last backward this backward has reached.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._open: set[weakref.ref[Graph]] = set()
        self._begun: dict[weakref.ref[Graph], frozenset[int]] = {}  # with the graph's `frozen`
        self._backwards = self.reached = 0
        self._has_wrapper = True
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has reached a forward's outputs and is not over."""
        return bool(self._begun)

    def frozen(self) -> frozenset[int] | None:
        """The parameters that were frozen in every graph that the current backward runs through.

        None if it has reached no graph, because the outputs of its forwards could not be watched.
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
        """The graph of a new forward, open until a backward runs through it or it is dropped."""
        counted_in = self._backwards if is_counted else None
        graph = Graph(on_gradient, is_averaged=is_averaged, counted_in=counted_in, frozen=frozen)
        if is_averaged:  # a local backward needs no hooks
            self._open.add(weakref.ref(graph, self._forget))
        return graph

    def check_open(self) -> None:
        """Check that the hooks are still there, before a backward begins.

        Raises:
            ConfigError: The hooks have been removed.
        """
        if self._is_closed:
            raise ConfigError(
                "This backward belongs to a model whose wrapper is gone, or has another process group now.",
                seen="a second backward of one forward, after the wrapper was dropped",
                hint="keep the wrapped model, not just its outputs; run forward again in the new group",
            )

    def begin(self, graph: Graph) -> None:
        """Note that the current backward runs through this graph."""
        self.check_open()
        self._begun[weakref.ref(graph)] = graph.frozen
        if graph.counted_in == self._backwards:
            graph.counted_in = None
            self.reached += 1

    def end_backward(self) -> None:
        """Forget the graphs that the backward ran through."""
        self._backwards += 1
        self.reached = 0
        self._open.difference_update(self._begun)
        self._begun = {}
        self._close_if_last()

    def drop_wrapper(self) -> None:
        """Note that the user holds no wrapper any more."""
        self._has_wrapper = False
        self._close_if_last()

    def _forget(self, graph: weakref.ref[Graph]) -> None:
        self._open.discard(graph)
        self._close_if_last()

    def _close_if_last(self) -> None:
        if not self._has_wrapper and not self._open:
            self.close()

    def close(self) -> None:
        """Remove the model's hooks, even if graphs are left to be run backward."""
        if not self._is_closed:
            self._is_closed = True
            self._close()


class EndOfBackward:
    """The callback for the end of a backward, which also notices if it is never called.

    Give it to the framework and keep no reference to it, so that only the framework holds it. If the backward
    raises, the framework drops the callback without a call, and this is the only sign that the backward is
    over. If the framework runs a backward in a thread of its own, as torch does on devices, that thread may
    drop it when the user's thread has already received the exception and continued.

    Args:
        end: Called when the backward is over.
        interrupted: Called if an exception has ended the backward, or `end`. It must neither wait nor raise,
            because the framework calls it. It is called before the user sees the exception, unless another
            thread runs the backward.
    """

    __slots__ = ("_end", "_interrupted", "_is_made")

    def __init__(self, end: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._end = end
        self._interrupted = interrupted
        self._is_made = False

    def __call__(self) -> None:
        self._end()
        self._is_made = True  # if `_end` raised, `interrupted` is called and does what it left undone

    def __del__(self) -> None:
        if not self._is_made:
            self._interrupted()
