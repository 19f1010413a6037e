"""Optimizer steps and batches of data loaders, noted while this process records.

The one idea: Paddle has no hooks for steps, so the methods themselves are wrapped; only in a process that
records all.
"""

from __future__ import annotations

import functools

from paceline.paddle import internals
from paceline.tracing.recording import noted
from paceline.tracing.records import Event


@functools.cache
def note_steps() -> None:
    """Note all steps and batches of this process from now on, whenever it records."""
    for optimizer in internals.classes_with("step", internals.optimizers()):
        optimizer.step = noted(optimizer.step, Event.OPTIMIZER_BEGAN, Event.OPTIMIZER_ENDED)
    for iterator in internals.classes_with("__next__", internals.loader_iterators()):
        iterator.__next__ = noted(iterator.__next__, Event.DATA_BEGAN, Event.DATA_ENDED)
