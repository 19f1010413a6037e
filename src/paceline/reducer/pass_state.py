"""What a front end remembers between the hooks of one backward pass. The same for every framework.

Imports only the standard library, the core, `errors` and its neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from paceline import _core
from paceline.errors import ConfigError, ForkedError
from paceline.reducer.frozen import frozen_status
from paceline.reducer.protocol import CHANGED, FINISHED, REFUSED, STATIC, TWICE


class PassState:
    """Where one model is in its passes; hooks and the front end share it.

    Attributes:
        is_syncing: Whether the pass under way is averaged; no_sync() makes forward clear it.
        is_armed: Whether a pass is under way, so that the end of this backward ends it.
        is_interrupted: Whether an exception has ended the backward of the last pass, of which the other ranks
            do not know yet.
        handed: Gradients handed over in this pass, by parameter, in that order. Keeps the memory alive that
            the reducer reads and writes by pointer.
        staged: Those of them whose mean the front end copies back.
        accumulated: Parameters that got local gradients, in no_sync(), since the last synchronised pass.
        came_twice: A parameter whose gradient came again after it had been handed over. The end of the pass
            tells all ranks: a hook that raised would leave the others waiting.
        refused: A parameter whose gradient cannot be averaged, and why. The end of the pass tells, too.
        forwards: Of this rank since the last synchronised pass.
        has_changed: Whether this pass used other parameters than the first one, against a promise.
        idle: Parameters without a gradient in this pass that are frozen, where unused ones are no good.
        promises_static_graph: Whether that promise was made after wrapping, and no good pass has shown yet
            that all ranks have made it.
        where: "rank 1 of 2", for errors.
    """

    __slots__ = (
        "accumulated",
        "arm",
        "came_twice",
        "forwards",
        "handed",
        "has_changed",
        "idle",
        "is_armed",
        "is_interrupted",
        "is_syncing",
        "pid",
        "promises_static_graph",
        "refused",
        "staged",
        "where",
    )

    def __init__(self, rank: int, world_size: int) -> None:
        self.where = f"rank {rank} of {world_size}"
        self.is_syncing = True
        self.is_armed = False
        self.is_interrupted = False
        self.handed = _core.HandedGradients()
        self.staged: list[int] = []
        self.accumulated: set[int] = set()
        self.came_twice: int | None = None
        self.refused: tuple[int, ConfigError] | None = None
        self.forwards = 0
        self.has_changed = False
        self.idle: Sequence[int] = ()
        self.promises_static_graph = False
        self.pid = os.getpid()
        self.arm: Callable[[], None]

    def begin_next(self) -> None:
        """Forget the pass that is over."""
        self.is_armed = self.is_interrupted = False
        self.handed.clear()
        self.staged.clear()
        self.accumulated.clear()
        self.came_twice = None
        self.refused = None
        self.forwards = 0
        self.has_changed = False
        self.idle = ()

    def interrupt(self) -> None:
        """The backward has ended in an exception; whatever begins next tells the other ranks."""
        self.is_armed = False
        self.is_interrupted = True

    def refuse(self, index: int, error: ConfigError) -> None:
        """The gradient of a parameter cannot be averaged; raises at once where no pass will end.

        Raises:
            ConfigError: The one given.
        """
        if not self.is_syncing:
            raise error
        if self.refused is None:
            self.refused = index, error

    @property
    def status(self) -> int:
        """What the end of the pass tells the other ranks: the number of forwards, or what went wrong."""
        if self.refused is not None:
            return REFUSED + self.refused[0]
        if self.came_twice is not None:
            return TWICE + self.came_twice
        if self.has_changed:
            return CHANGED
        if self.promises_static_graph and self.forwards != FINISHED:
            return STATIC + self.forwards
        if self.idle:
            return frozen_status(self.forwards, self.idle)
        return self.forwards

    def check_process(self) -> None:
        """Raise ForkedError in a forked child, which has the model but not the memory."""
        if os.getpid() != self.pid:
            raise ForkedError(
                "A model wrapped for data-parallel training was used in a forked child.",
                seen=f"wrapped in process {self.pid}, used in process {os.getpid()}",
                likely="a data loader's worker, or multiprocessing with the start method 'fork'",
                hint="use `.module` in the child; or start it with the method 'spawn' and wrap there",
            )
