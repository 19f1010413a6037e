"""Paddle's reference: every rank on a copy of the models in float64; means from their definition."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from tests.differential.lockstep import Lockstep, Parted, ReferenceRun, Simulated
from tests.differential.paddle_machine import Machine, buffers_of, held, put
from tests.differential.pool import Run
from tests.differential.programs import Program
from tests.differential.walk import Parting, Sync


class Ranks(Lockstep):
    """All ranks of a program."""

    def __init__(self, program: Program, refused: dict[str, bool], parting: Parting) -> None:
        ranks = range(program.get("ranks", 2))
        super().__init__([Machine(program, rank, Simulated(), {}, refused, parting) for rank in ranks])

    def average(self, model: int, active: list[int], waiting: Sequence[Sync]) -> None:
        rows = [machine.trainable[model] for machine in self.machines]
        weights = {rank: self.machines[rank].weight_so_far.get(model, 1.0) for rank in active}
        # join() counts a rank without data as one with zeros.
        whole = float(len(rows)) if any(sync.joins for sync in waiting) else sum(weights.values())
        kept = {rank: [held(p) for p in rows[rank]] for rank in range(len(rows)) if rank not in active}
        for column in zip(*rows):
            if kept and all(p.stop_gradient for p in column):
                continue  # frozen: existing gradients stay as they are
            mean = _mean([(column[rank].grad, weights[rank]) for rank in active], whole)
            for rank, p in enumerate(column):
                if mean is not None:
                    put(p, paddle.to_tensor(mean))
                elif rank in kept:
                    put(p, None)
        for rank, before in kept.items():
            for optimizer in waiting[rank].steps:
                optimizer.step()
            for p, gradient in zip(rows[rank], before):
                put(p, gradient)
        self._take_buffers(model, active[0])

    def take_model(self, model: int, root: int) -> None:
        source = self.machines[root].nets[model].parameters()
        for rank, machine in enumerate(self.machines):
            for p, q in zip(machine.nets[model].parameters(), source):
                if rank != root:
                    p.set_value(q)
        self._take_buffers(model, root)

    def _take_buffers(self, model: int, root: int) -> None:
        source = buffers_of(self.machines[root].nets[model])
        for rank, machine in enumerate(self.machines):
            for name, buffer in buffers_of(machine.nets[model]).items():
                if rank != root:
                    buffer.set_value(source[name])


def _mean(given: list[tuple[paddle.Tensor | None, float]], whole: float) -> np.ndarray[Any, Any] | None:
    present = [(g.numpy(), weight) for g, weight in given if g is not None]
    if not present:
        return None
    if any(g.shape != present[0][0].shape for g, _ in present):
        raise Parted
    terms = [g * (weight / whole) for g, weight in present if weight]
    total: np.ndarray[Any, Any] = sum(terms, np.zeros_like(present[0][0]))
    return total


def make_reference(rank: int, world_size: int, job: str, folder: Path) -> Run:
    """Prepare this process to simulate programs."""
    warnings.simplefilter("ignore")

    def run(program: Program, options: dict[str, Any]) -> Any:
        paddle.set_grad_enabled(True)  # an error in a backward of the previous program may have left them off
        return ReferenceRun(Ranks(program, options["refused"], options["parting"]).run())

    return run
