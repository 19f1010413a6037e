"""Optimizer steps and batches of data loaders, noted while this process records.

The one idea: torch has global hooks for steps, and one method through which every DataLoader yields; they are
touched only in a process that records all. Nothing here is called for each gradient.
"""

from __future__ import annotations

import functools

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from paceline.trace.recording import batches, optimizer_steps


@functools.cache
def note_steps() -> None:
    """Note all steps and batches of this process from now on, whenever it records."""
    steps = optimizer_steps()
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = batches().around(iterator.__next__)  # type: ignore[method-assign]
