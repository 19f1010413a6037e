"""The reference: one process that simulates all ranks, one after the other, and averages between them.

It runs every rank's program on a copy of the models in float64 (float32 under autocast) until the ranks
synchronise, computes the means from the definition, and continues them. It has no knowledge of when a wrapper
averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.differential import lockstep
from tests.differential.lockstep import Lockstep, Parted, ReferenceRun
from tests.differential.pool import Run
from tests.differential.programs import Program
from tests.differential.torch_machine import Machine
from tests.differential.walk import Parting, Sync


class Simulated(lockstep.Simulated):
    """A subject that does not average, with the members that only torch's side has."""

    def wrap(self, net: nn.Module, options: dict[str, Any], nest: str | None = None) -> nn.Module:
        return net

    def clip(self, wrapper: nn.Module, trainable: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(trainable, max_norm)


class Ranks(Lockstep):
    """All ranks of a program."""

    def __init__(self, program: Program, refused: dict[str, bool], parting: Parting) -> None:
        ranks = range(program.get("ranks", 2))
        super().__init__([Machine(program, rank, Simulated(), {}, refused, parting) for rank in ranks])

    def average(self, model: int, active: list[int], waiting: Sequence[Sync]) -> None:
        rows = [machine.trainable[model] for machine in self.machines]
        weights = [self.machines[rank].weight_so_far.get(model, 1.0) for rank in active]
        joins = any(sync.joins for sync in waiting)
        whole = float(len(waiting)) if joins else sum(weights)
        means = []
        for column in zip(*rows):
            mean = _mean([(column[rank].grad, weight) for rank, weight in zip(active, weights)], whole)
            if mean is not None and any(mean.shape != p.shape for p in column):
                raise Parted
            means.append(mean)
        for rank, row in enumerate(rows):
            if rank not in active:
                self._step_without_data(row, means, waiting[rank])
                continue
            for p, mean in zip(row, means):
                if mean is not None:
                    p.grad = mean.clone()
        self._take_buffers(model, active[0])

    def _step_without_data(
        self, row: list[nn.Parameter], means: list[torch.Tensor | None], sync: Sync
    ) -> None:
        before = [p.grad for p in row]
        for p, mean in zip(row, means):
            p.grad = None if mean is None else mean.clone()
        try:
            for optimizer in sync.steps:
                optimizer.step()
        except RuntimeError:  # its state has another shape than the parameter has now
            raise Parted from None
        for p, gradient in zip(row, before):
            p.grad = gradient

    def take_model(self, model: int, root: int) -> None:
        source = self.machines[root].nets[model]
        with torch.no_grad():
            for machine in self.machines:
                for p, q in zip(machine.nets[model].parameters(), source.parameters()):
                    if p.shape != q.shape:
                        raise Parted
                    p.data.copy_(q.data)
        self._take_buffers(model, root)

    def _take_buffers(self, model: int, root: int) -> None:
        source = self.machines[root].nets[model]
        for machine in self.machines:
            for b, c in zip(machine.nets[model].buffers(), source.buffers()):
                b.copy_(c)


def _mean(given: list[tuple[torch.Tensor | None, float]], whole: float) -> torch.Tensor | None:
    present = [(g, weight) for g, weight in given if g is not None]
    if not present:
        return None
    if any(g.shape != present[0][0].shape for g, _ in present):
        raise Parted
    total = None
    for gradient, weight in present:
        if weight == 0:
            continue
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        term = dense * (weight / whole)
        total = term if total is None else total + term
    if total is None:
        total = torch.zeros_like(present[0][0].to_dense())
    # Sparse rows stay sparse: hooks and clipping depend on the layout of a gradient.
    return total.to_sparse(1) if all(g.is_sparse for g, _ in present) else total


def make_reference(rank: int, world_size: int, job: str, folder: Path) -> Run:
    """Prepare this process to simulate programs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def run(program: Program, options: dict[str, Any]) -> Any:
        return ReferenceRun(Ranks(program, options["refused"], options["parting"]).run())

    return run
