"""Optimizer steps and batches of data loaders, noted while this process records.

The one idea: torch has global hooks for steps, and one method through which every DataLoader yields; they are
touched only in a process that records all. Nothing here is called for each gradient.
"""

from __future__ import annotations

import functools

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from paceline.tracing.recording import note_event, noted
from paceline.tracing.records import Event


@functools.cache
def note_steps() -> None:
    """Note all steps and batches of this process from now on, whenever it records."""
    register_optimizer_step_pre_hook(lambda *_: note_event(Event.OPTIMIZER_BEGAN))
    register_optimizer_step_post_hook(lambda *_: note_event(Event.OPTIMIZER_ENDED))
    iterator = dataloader._BaseDataLoaderIter
    noting = noted(iterator.__next__, Event.DATA_BEGAN, Event.DATA_ENDED)
    iterator.__next__ = noting  # type: ignore[method-assign]
