"""Optimizer steps and batches of data loaders, noted while this process records.

The one idea: Paddle has no hooks for steps, so the methods themselves are wrapped; only in a process that
records all.
"""

from __future__ import annotations

import functools

from paceline.paddle import internals
from paceline.trace.recording import batches, optimizer_steps


@functools.cache
def note_steps() -> None:
    """Note all steps and batches of this process from now on, whenever it records."""
    steps, asked = optimizer_steps(), batches()
    for optimizer in internals.classes_with("step", internals.optimizers()):
        optimizer.step = steps.around(optimizer.step)
    for iterator in internals.classes_with("__next__", internals.loader_iterators()):
        iterator.__next__ = asked.around(iterator.__next__)
