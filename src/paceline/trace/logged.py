"""Values that a program logs, such as its loss, to be shown while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsFloat

from paceline.trace.recording import recording
from paceline.trace.records import Event, float_bits

_LOGGED = int(Event.LOGGED)
listeners: list[Callable[[str, float], None]] = []
"""Called with each value that this process logs, even if nothing is recorded."""


def log(name: str, value: SupportsFloat) -> None:
    """Show a value in `paceline top` and on the dashboard, beside this rank.

    Does nothing, not even `float(value)`, if nothing is recorded: outside of `paceline run` and `spawn`.
    Never waits for another rank. Each rank may log its own values, at any time.

    Args:
        name: The name of the value. "loss" has a column of its own. "samples", logged in each step, is the
            number of samples that this rank has computed in it, and replaces the batch size. A process can
            log at most 64 names.
        value: A number, or a tensor that holds one. A tensor on a GPU is copied, which waits for the GPU.

    Example:
        >>> loss.backward()
        >>> paceline.log("loss", loss.detach())
    """
    if recording.note is None:
        recording.begin_if_asked(0, 1)  # the launcher's RANK and WORLD_SIZE replace these
    note = recording.note
    if note is None and not listeners:
        return
    known = float(value)
    for listener in listeners:
        listener(name, known)
    if note is not None and (number := recording.number_name(name)) is not None:
        note(_LOGGED, number, float_bits(known))
        recording.logged[name] = known
