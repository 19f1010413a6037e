"""`trace()` of a wrapped model: all ranks record for a while, and rank 0 writes the recordings to a file."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.trace import chrome, ring_file
from paceline.trace.recording import recording
from paceline.trace.ring_file import TRACE_RECORDS


@contextlib.contextmanager
def recorded(communicator: Communicator[Any], path: str | os.PathLike[str]) -> Iterator[None]:
    """Record while the context is entered. Collective at both ends."""
    output = Path(path)
    _on_first_rank(communicator, lambda: chrome.check(output))
    end = recording.enlarge(communicator.rank, communicator.world_size, TRACE_RECORDS)
    try:
        yield
        rows = communicator.all_gather(zlib.compress(recording.snapshot(), 1))  # most bytes are zeros
    finally:
        end()
    _on_first_rank(communicator, lambda: _write(output, rows))


def _write(output: Path, rows: list[bytes]) -> None:
    found = [ring_file.read(zlib.decompress(row)) for row in rows]
    chrome.write(output, [each for each in found if each is not None])


def _on_first_rank(communicator: Communicator[Any], act: Callable[[], None]) -> None:
    """Call `act` on rank 0, and raise its ConfigError on every rank. Collective."""
    reported = ""
    if communicator.rank == 0:
        try:
            act()
        except ConfigError as error:
            reported = str(error)
    if reported := communicator.all_gather(reported.encode())[0].decode():
        raise ConfigError(reported)
