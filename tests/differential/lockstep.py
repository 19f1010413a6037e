"""One process that simulates all ranks, one after the other, and averages, in any framework.

It runs every rank's program until the ranks synchronise, averages, and continues them. A subclass computes a
mean, and copies one model to another, in the framework's own arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.differential.records import Record
from tests.differential.walk import Sync, Walker


class Simulated:
    """A subject that does not average: the driver below does, when all ranks have reached a sync."""

    simulates = True

    def wrap(self, net: Any, options: dict[str, Any]) -> Any:
        return net

    def no_sync(self, wrapper: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weight(self, wrapper: Any, value: float) -> None:
        pass

    def finished(self, wrapper: Any, step: Any) -> None:
        pass

    def backwards(self, wrapper: Any) -> int:
        return 0

    def join(self, wrapper: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def iterate(self, wrapper: Any, batches: Sequence[int], step: Any) -> Iterator[int]:
        return iter(batches)


class Parted(Exception):
    """The ranks' values differ so that they have no mean, or cannot be copied: their shapes differ."""


class Lockstep:
    """All ranks of a program."""

    def __init__(self, machines: Sequence[Walker]) -> None:
        self.machines = machines
        self._runs = [machine.run() for machine in machines]

    def run(self) -> list[Record]:
        """Records of all ranks; they stop where the ranks diverge because one of them raised alone."""
        with contextlib.suppress(Parted):
            self._run()
        return [machine.record for machine in self.machines]

    def _run(self) -> None:
        waiting: list[Sync | None] = [None] * len(self._runs)
        all_ranks = last_active = list(range(len(self._runs)))
        while True:
            for rank, sync in enumerate(waiting):
                waiting[rank] = self._next(rank) if sync is None else sync
            here = [sync for sync in waiting if sync is not None]
            if len(here) < len(waiting):
                return
            active = [rank for rank in all_ranks if here[rank].kind != "finished"]
            if not active:
                if len(last_active) < len(all_ranks):
                    self.take_model(here[0].models[0], last_active[0])
                last_active = all_ranks
                waiting = [None] * len(waiting)
                continue
            first = here[active[0]]
            if any(here[rank] != first for rank in active):
                return
            if first.kind == "wrapped":
                for model in first.models:
                    self.take_model(model, 0)
            else:
                last_active = active
                for model in first.models:
                    self.average(model, active, here)
            for rank in active:
                waiting[rank] = None

    def _next(self, rank: int) -> Sync | None:
        try:
            return next(self._runs[rank])
        except StopIteration:
            return None
        except BaseException as error:
            self.machines[rank].note_end(error)
            return None

    def average(self, model: int, active: list[int], waiting: Sequence[Sync]) -> None:
        """Give the mean to the active ranks; all others step with it, and keep their gradients."""
        raise NotImplementedError

    def take_model(self, model: int, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`."""
        raise NotImplementedError


class ReferenceRun:
    """Records of all simulated ranks, as the answer of one worker."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.raised = None

    def errors(self) -> list[Any]:
        return []
