"""Live progress of a training loop: epoch, loss, samples per second, fraction of the time spent waiting.

On a terminal with rich it keeps one line up to date; elsewhere it prints a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

_PRINT_EVERY_S = 5.0
# Speed and waiting are averages over about this many steps.
_WINDOW = 50


def waited_s(model: Any) -> float | None:
    """Return how many seconds Paceline's wrapper has waited for gradients; None for other models."""
    return getattr(model, "waited_s", None)


class Live:
    """Shows progress; use as `with Live(...) as live:` and call `live.step(...)` after each step.

    Args:
        title: Name of the training.
        total: Number of steps.
        is_shown: True on one process only.
    """

    def __init__(self, title: str, total: int, is_shown: bool) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._is_shown = is_shown
        self._bar: Any = None
        self._task: Any = None
        self._history: list[tuple[float, int, float]] = []  # time; samples and seconds waited so far
        self._samples = 0
        self._printed = time.monotonic()

    def __enter__(self) -> Live:
        if self._is_shown and sys.stdout.isatty():
            self._start_bar()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, loss: float, samples: int, waited_s: float | None) -> None:
        """Count a step of `samples` samples (of all processes together)."""
        if not self._is_shown:
            return
        self._done += 1
        self._samples += samples
        now = time.monotonic()
        self._history.append((now, self._samples, waited_s or 0.0))
        del self._history[:-_WINDOW]
        is_time = now - self._printed >= _PRINT_EVERY_S or self._done == self._total
        if self._bar is None and not is_time:
            return
        facts = {"epoch": f"{epoch}", "loss": f"{loss:.4f}", "speed": self._speed(), "waiting": "-"}
        if waited_s is not None:
            facts["waiting"] = self._waiting()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, **facts)
        else:
            self._printed = now
            print(
                f"{self._title}: step {self._done} of {self._total}, epoch {facts['epoch']}, "
                f"loss {facts['loss']}, {facts['speed']} samples/s, waiting {facts['waiting']}",
                flush=True,
            )

    def _start_bar(self) -> None:
        try:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        except ImportError:
            return
        texts = ("epoch {task.fields[epoch]}", "loss {task.fields[loss]}", "{task.fields[speed]} samples/s")
        waiting = "waiting for gradients {task.fields[waiting]}"
        columns = [TextColumn(text) for text in ("{task.description}", *texts, waiting)]
        self._bar = Progress(columns[0], BarColumn(20), *columns[1:], TimeElapsedColumn())
        blank = {"epoch": "-", "loss": "-", "speed": "-", "waiting": "-"}
        self._task = self._bar.add_task(self._title, total=self._total, **blank)
        self._bar.start()

    def _speed(self) -> str:
        (start, samples_before, _), (end, samples, _) = self._history[0], self._history[-1]
        return f"{(samples - samples_before) / (end - start):,.0f}" if end > start else "-"

    def _waiting(self) -> str:
        (start, _, waited_before), (end, _, waited) = self._history[0], self._history[-1]
        return f"{100 * (waited - waited_before) / (end - start):.0f} %" if end > start else "-"
