"""The reference: one process that simulates all ranks, one after the other, and averages between them.

It runs every rank's program on a copy of the models in float64 (float32 under autocast) until the ranks meet,
computes the means from the definition, and lets them go on. Nothing of it knows what is averaged when.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.differential.pool import Run
from tests.differential.programs import Program
from tests.differential.records import Record
from tests.differential.torch_machine import Machine, Meeting


class Simulated:
    """Where nobody averages: the driver below does, when all ranks have met."""

    simulates = True

    def wrap(self, net: nn.Module, options: dict[str, Any], nest: str | None) -> nn.Module:
        return net

    def no_sync(self, wrapper: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weight(self, wrapper: nn.Module, value: float) -> None:
        pass

    def finished(self, wrapper: nn.Module, step: Any) -> None:
        pass

    def join(self, wrapper: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def iterate(self, wrapper: nn.Module, batches: Sequence[int], step: Any) -> Iterator[int]:
        return iter(batches)

    def clip(self, wrapper: nn.Module, trainable: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(trainable, max_norm)


class Ranks:
    """All ranks of a program, in lockstep."""

    def __init__(self, program: Program, refused: dict[str, bool], parts: bool) -> None:
        size = program.get("ranks", 2)
        self._machines = [Machine(program, rank, Simulated(), {}, refused, parts) for rank in range(size)]
        self._runs = [machine.run() for machine in self._machines]

    def run(self) -> list[Record]:
        """Records of all ranks; they stop where the ranks part, because one of them raised alone."""
        waiting: list[Meeting | None] = [None] * len(self._runs)
        last_active = list(range(len(self._runs)))
        while True:
            for rank, meeting in enumerate(waiting):
                if meeting is None:
                    waiting[rank] = self._next(rank)
            kinds = [None if meeting is None else meeting.kind for meeting in waiting]
            here = [meeting for meeting in waiting if meeting is not None]
            if len(here) < len(waiting):
                return [machine.record for machine in self._machines]
            active = [rank for rank, kind in enumerate(kinds) if kind != "finished"]
            if not active:
                self._take_model(here[0].models[0], last_active[0])
                last_active = list(range(len(waiting)))
                waiting = [None] * len(waiting)
                continue
            if any(waiting[rank] != waiting[active[0]] for rank in active):
                return [machine.record for machine in self._machines]
            first = waiting[active[0]]
            assert first is not None
            if first.kind == "wrapped":
                for model in first.models:
                    self._take_model(model, 0)
            else:
                last_active = active
                self._average(first.models, active, waiting)
            for rank in active:
                waiting[rank] = None

    def _next(self, rank: int) -> Meeting | None:
        try:
            return next(self._runs[rank])
        except StopIteration:
            return None
        except BaseException as error:
            self._machines[rank].note_end(error)
            return None

    def _average(self, models: list[int], active: list[int], waiting: list[Meeting | None]) -> None:
        ended = [rank for rank in range(len(waiting)) if rank not in active]
        joins = any(meeting is not None and meeting.joins for meeting in waiting)
        for model in models:
            rows = [self._machines[rank].trainable[model] for rank in range(len(waiting))]
            weights = [self._machines[rank].weight_so_far.get(model, 1.0) for rank in active]
            whole = float(len(waiting)) if joins else sum(weights)
            means = []
            for column in zip(*rows):
                given = [(column[rank].grad, weight) for rank, weight in zip(active, weights)]
                means.append(_mean(given, whole))
            for rank in active:
                for p, mean in zip(rows[rank], means):
                    if mean is not None:
                        p.grad = mean.clone()
            for rank in ended:
                self._step_without_data(rows[rank], means, waiting[rank])
            self._take_buffers(model, active[0])

    def _step_without_data(
        self, row: list[nn.Parameter], means: list[torch.Tensor | None], meeting: Meeting | None
    ) -> None:
        assert meeting is not None
        before = [p.grad for p in row]
        for p, mean in zip(row, means):
            p.grad = None if mean is None else mean.clone()
        for optimizer in meeting.steps:
            optimizer.step()
        for p, gradient in zip(row, before):
            p.grad = gradient

    def _take_model(self, model: int, root: int) -> None:
        source = self._machines[root].nets[model]
        with torch.no_grad():
            for machine in self._machines:
                for p, q in zip(machine.nets[model].parameters(), source.parameters()):
                    p.data.copy_(q.data)
        self._take_buffers(model, root)

    def _take_buffers(self, model: int, root: int) -> None:
        source = self._machines[root].nets[model]
        for machine in self._machines:
            for b, c in zip(machine.nets[model].buffers(), source.buffers()):
                b.copy_(c)


def _mean(given: list[tuple[torch.Tensor | None, float]], whole: float) -> torch.Tensor | None:
    present = [(g, weight) for g, weight in given if g is not None]
    if not present:
        return None
    total = None
    for gradient, weight in present:
        if weight == 0:
            continue
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        term = dense * (weight / whole)
        total = term if total is None else total + term
    if total is None:
        total = torch.zeros_like(present[0][0].to_dense())
    # Rows stay rows: hooks and clipping look at what a gradient is.
    return total.to_sparse(1) if all(g.is_sparse for g, _ in present) else total


def make_reference(rank: int, world_size: int, job: str, folder: Path) -> Run:
    """Prepare this process to simulate programs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def run(program: Program, options: dict[str, Any]) -> Any:
        return ReferenceRun(Ranks(program, options["refused"], options["parts"]).run())

    return run


class ReferenceRun:
    """Records of all simulated ranks, as the answer of one worker."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.raised = None

    def errors(self) -> list[Any]:
        return []
