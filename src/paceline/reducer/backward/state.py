"""Where one model is in its backward passes, in one object that all who take part in a backward look at.

The one idea: hooks ask at each gradient whether it is to be averaged, in C++ too, so the answers are plain
attributes that are read where they lie. `BackwardState` decides nothing: `BackwardSync` moves it from one
backward to the next, and hooks and the front end note in it what they have handed over, and what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline import _core
from paceline.errors import ConfigError, ForkedError
from paceline.reducer.backward.graphs import Graph, Graphs
from paceline.reducer.protocol import BackwardStatus


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
        is_armed: Whether a backward is under way, so that its end averages the gradients.
        is_interrupted: Whether an exception has ended the last backward, of which the other ranks do not know
            yet.
        ends_by_hand: Whether the end of a backward leaves it open, for `BackwardSync.end_by_hand`.
        is_left_open: Whether autograd is through with the backward under way, which waits for that.
        handed: Gradients handed over in this backward, by parameter, in that order. Keeps the memory alive
            that the reducer reads and writes by pointer.
        staged: The handed gradients whose mean the front end copies back.
        accumulated: Parameters that got local gradients, in no_sync(), since the last synchronised backward.
        rank_weight: The weight of this rank in the backward under way, or the last one.
        arm: Begins a backward; hooks call it at the first gradient.
        graphs: The graphs of forwards whose backward is still to come.
        status: What the end of the backward tells all ranks: the forwards since the last one, and what is
            wrong. A hook that raised instead would leave the others waiting.
        refusal: Why the gradient of the parameter `status.refused` cannot be averaged.
        where: "rank 1 of 2", for errors.
    """

    __slots__ = (
        "_usual",
        "accumulated",
        "arm",
        "ends_by_hand",
        "graphs",
        "handed",
        "is_armed",
        "is_due",
        "is_forced",
        "is_forward_averaged",
        "is_forward_counted",
        "is_interrupted",
        "is_left_open",
        "is_local",
        "is_syncing",
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
        self.is_armed = False
        self.is_interrupted = False
        self.ends_by_hand = self.is_left_open = False
        self.handed = _core.HandedGradients()
        self.staged: list[int] = []
        self.accumulated: set[int] = set()
        self.status = BackwardStatus()
        self.rank_weight = 1.0
        self.refusal: ConfigError | None = None
        self.pid = os.getpid()
        self.arm: Callable[[], None]
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

    def is_other(self, graph: Graph) -> bool:
        """Whether `is_syncing` is wrong for the backward that has come to this graph."""
        if self.is_armed or self.is_forced:
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
        self.is_armed = self.is_interrupted = self.is_forced = self.is_due = False
        self.handed.clear()
        self.staged.clear()
        self.accumulated.clear()
        self.status.begin_next()
        self.refusal = None

    def interrupt(self) -> None:
        """The backward has ended in an exception; whatever begins next tells the other ranks."""
        self.is_armed = self.is_left_open = False
        self.is_interrupted = True

    def refuse(self, index: int, error: ConfigError) -> None:
        """The gradient of a parameter cannot be averaged; raises at once where no backward will end.

        Raises:
            ConfigError: The one given.
        """
        if not self.is_syncing:
            raise error
        if self.refusal is None:
            self.status.refused, self.refusal = index, error

    def tell_unweighed(self, num_parameters: int) -> None:
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
