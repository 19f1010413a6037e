"""Writes what a program logs as scalars for TensorBoard, with torch's own writer."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from pathlib import Path

from paceline.errors import ConfigError
from paceline.trace import logged


def log_to_tensorboard(folder: str | os.PathLike[str]) -> None:
    """Also write what this rank passes to `paceline.log` from now on as scalars for TensorBoard.

    Not collective, and independent of recording. The step of a scalar is the number of times that its name
    was logged before. The file is complete when the program ends.

    Args:
        folder: The folder of torch's `SummaryWriter`; made if it is not there. Each rank needs its own.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder can't be written to.

    Example:
        >>> if rank == 0:
        ...     log_to_tensorboard("runs/first")
        >>> paceline.log("loss", loss.detach())     # "loss" at step 0, on rank 0
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "log_to_tensorboard: TensorBoard is not installed.",
            seen=str(error),
            hint="pip install tensorboard; `paceline top` and `paceline run --dashboard` need none",
        ) from error
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        writer = SummaryWriter(os.fspath(folder))
    except OSError as error:
        raise ConfigError(
            f"log_to_tensorboard: {os.fspath(folder)} can't be written to.",
            seen=error.strerror or str(error),
            hint="a folder, new or old, in which files can be made",
        ) from error
    steps: Counter[str] = Counter()

    def write(name: str, value: float) -> None:
        writer.add_scalar(name, value, steps[name])
        steps[name] += 1

    logged.listeners.append(write)
    atexit.register(writer.close)
