"""One rank's program: form, wrap, train, and report its end on the board. Independent of the framework.

A rank that is a fork ends as an interpreter ends: hooks for the exception, then what was registered for the
exit, then the status. It can't end its interpreter, which is a copy of the driver's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos import board as progress
from tests.chaos.board import Board
from tests.chaos.plans import Plan
from tests.chaos.strikes import Striker

Array = np.ndarray[Any, Any]

FORMING_S = 60.0  # imports are slow on a busy machine
_LOADING_S = 0.001  # like loading a batch; so a fault from outside finds the job still under way


@dataclass(frozen=True)
class Report:
    """The end of a rank's program, as the rank itself reports it.

    Attributes:
        how: "done", "raised" or "left" (SystemExit).
        at_s: When, by time.monotonic().
        kind, text: Of the exception.
        is_ours: It is a PacelineError.
        ranks: The blamed ranks: its fields `lost`, `late`, `missing` or `ranks`.
        steps: The number of optimizer steps of this rank, including those for the other ranks' backwards
            after its data has ended.
        weights: The weights at the end.
    """

    how: str
    at_s: float
    kind: str = ""
    text: str = ""
    is_ours: bool = False
    ranks: tuple[int, ...] = ()
    steps: int = 0
    weights: list[Array] = field(default_factory=list)


class Trainer(ABC):
    """A framework's side of the program.

    Args:
        plan: The plan of the trial.
        rank: This rank.
        job: A name that the ranks of the trial share.
        folder: A folder that they share.
        striker: The striker of this rank.

    Attributes:
        wrapped: The model, once `wrap` has wrapped it.
    """

    wrapped: Any = None

    def __init__(self, plan: Plan, rank: int, job: str, folder: Path, striker: Striker) -> None:
        self.plan, self.rank, self.job, self.folder = plan, rank, job, folder
        self.striker = striker

    @abstractmethod
    def form(self) -> None:
        """Join the group."""

    @abstractmethod
    def wrap(self) -> None:
        """Wrap the model."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the gradients."""

    @abstractmethod
    def forward(self, step: int, micro: int) -> Any:
        """Compute a loss."""

    @abstractmethod
    def step(self) -> None:
        """Make the optimizer's step."""

    @abstractmethod
    def evaluate(self, step: int) -> None:
        """Make a forward of this rank alone, in evaluation mode."""

    @abstractmethod
    def save(self, path: Path, strike: Callable[[], None]) -> None:
        """Write a checkpoint, and call `strike` between taking and writing it."""

    @abstractmethod
    def weights(self) -> list[Array]:
        """The weights, in the order of the reference."""

    def group_in_memory(self) -> Any:
        """The group of a job that forms one itself: within the deadline, if a rank is struck at the start."""
        import paceline

        timeout_s = self.plan.timeout_s
        return paceline.init(
            rank=self.rank,
            world_size=self.plan.job.world_size,
            job_id=self.job,
            timeout_s=timeout_s,
            forming_timeout_s=timeout_s if self.plan.fault.place == "start" else FORMING_S,
        )

    def batches(self, count: int, step: Any) -> Iterable[int]:
        """The numbers of this rank's batches; then the style's treatment of ranks that have finished."""
        batches: Iterable[int] = range(count)
        if self.plan.job.style == "finished":
            batches = self.wrapped.iterate(batches, step)
        return batches

    def whole(self) -> contextlib.AbstractContextManager[object]:
        """The context around the loop."""
        if self.plan.job.style == "join":
            joined: contextlib.AbstractContextManager[object] = self.wrapped.join()
            return joined
        return contextlib.nullcontext()

    def backward(self, loss: Any) -> None:
        """Make the backward of a loss."""
        loss.backward()

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """The wrapper's no_sync()."""
        context: contextlib.AbstractContextManager[object] = self.wrapped.no_sync()
        return context


class Program:
    """One rank's training."""

    def __init__(self, plan: Plan, rank: int, board: Board, trainer: Trainer, striker: Striker) -> None:
        self._job = plan.job
        self._rank = rank
        self._board = board
        self._trainer = trainer
        self._striker = striker
        self.steps = 0

    def run(self) -> None:
        self._board.note_progress(self._rank, progress.STARTED)
        self._striker.at("start")
        self._board.note_progress(self._rank, progress.FORMING)
        self._trainer.form()
        self._striker.at("wrapping")
        self._striker.note_wrapping()
        self._board.note_progress(self._rank, progress.WRAPPING)
        self._trainer.wrap()
        with self._trainer.whole():
            for step in self._trainer.batches(self._job.steps_of(self._rank), self._apply):
                self._board.note_progress(self._rank, progress.STEP_0 + step)
                if self._striker.changes("iteration skipped", step):
                    continue
                self._iterate(step)
                if self._striker.changes("iteration too many", step):
                    self._iterate(step)

    def _iterate(self, step: int) -> None:
        striker, trainer, last = self._striker, self._trainer, self._job.micro_batches - 1
        trainer.clear()
        time.sleep(_LOADING_S)
        for micro in range(last + 1):
            striker.at("before forward", step)
            with trainer.no_sync() if micro < last else contextlib.nullcontext():
                loss = trainer.forward(step, micro)
                if micro == last and striker.changes("backward skipped", step):
                    break
                if micro == last and striker.changes("forward too many", step):
                    loss = trainer.forward(step, micro)
                trainer.backward(loss)
        striker.at("after backward", step)
        if not striker.changes("step skipped", step):
            self._apply()
        if striker.changes("step too many", step):
            self._apply()
        striker.at("after the step", step)
        trainer.evaluate(step)
        trainer.save(
            trainer.folder / f"checkpoint-{self._rank}", lambda: striker.at("in the checkpoint", step)
        )

    def _apply(self) -> None:
        self._trainer.step()
        self.steps += 1


def run_rank(plan: Plan, rank: int, board: Board, trainer: Trainer, striker: Striker) -> None:
    """Run the program and report its end on the board; raises any exception of the program again."""
    program = Program(plan, rank, board, trainer, striker)
    how, error = "done", None
    try:
        program.run()
    except SystemExit as left:
        how, error = "left", left
    except BaseException as raised:
        how, error = "raised", raised
    at_s = time.monotonic()
    weights: list[Array] = []
    with contextlib.suppress(Exception):
        weights = trainer.weights()
    board.write_report(rank, _report(how, at_s, error, program.steps, weights))
    if error is not None:
        raise error


def end_fork(plan: Plan, rank: int, board: Board, trainer: Trainer, striker: Striker) -> None:
    """`run_rank` in a fork of the driver. Does not return."""
    status = 70  # a status that no program has: the driver failed
    try:
        try:
            run_rank(plan, rank, board, trainer, striker)
            status = 0
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 0
        except BaseException as error:
            status = 1
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # as the end of an interpreter does
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(status)


def _report(how: str, at_s: float, error: BaseException | None, steps: int, weights: list[Array]) -> Report:
    from paceline.errors import PacelineError

    blamed: Any = ()
    for name in ("lost", "late", "missing", "ranks"):
        blamed = blamed or getattr(error, name, ())
    return Report(
        how,
        at_s,
        "" if error is None else type(error).__name__,
        "" if error is None else str(error)[:6000],
        isinstance(error, PacelineError),
        tuple(blamed),
        steps,
        weights,
    )
