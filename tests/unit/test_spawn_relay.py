"""The output of `spawn` if standard output is not the process's own, as in a notebook."""

from __future__ import annotations

import io
import os
import threading

from paceline.launch.spawn import _relay


class Writes(io.StringIO):
    """Keeps each chunk as it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_lines_come_whole_however_long_they_are():
    reader, writer = os.pipe()
    shown = Writes()
    relay = threading.Thread(target=_relay, args=(os.fdopen(reader, "rb"), shown))
    relay.start()
    long = "ü" * (1 << 20)  # of two bytes, which chunks of a pipe may cut
    with open(writer, "wb") as file:
        file.write(f"first\n{long}\nlast".encode())
    relay.join()
    assert shown.getvalue() == f"first\n{long}\nlast"
    assert all(piece.endswith("\n") for piece in shown.pieces[:-1]) and len(shown.pieces) <= 3
