"""The rows of a run in a file, each written as soon as its trial is over, so that none is lost.

Each is one line of JSON: first the options of the run, then the rows. A resumed run makes only the trials
that have no row yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.judge import Verdict
from tests.chaos.report import Row

Asked = Mapping[str, int]


class Journal:
    """The file of one run, which may be made in several parts.

    Args:
        path: A file that `begin` has made.

    Attributes:
        asked: The options of the run that decide which trials it has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_partial_line(path)
        first, *others = self._lines()
        self.asked: dict[str, int] = first["asked"]
        self._spent_before_s = max((each["spent_s"] for each in others), default=0.0)
        self._begun_s = time.monotonic()

    @classmethod
    def begin(cls, path: Path, asked: Asked) -> Journal:
        """Create the file; it must not exist."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"asked": dict(asked)}) + "\n")
        return cls(path)

    @property
    def spent_s(self) -> float:
        """Seconds that the run has taken, over all its parts."""
        return self._spent_before_s + time.monotonic() - self._begun_s

    def add(self, part: str, row: Row) -> None:
        """Write a row. Safe from any process.

        Args:
            part: The part of the run; it has each seed at most once.
        """
        line = json.dumps({"part": part, "spent_s": self.spent_s, "row": asdict(row)}) + "\n"
        with self.path.open("a", encoding="utf-8") as file:  # one write: lines of two processes stay whole
            file.write(line)

    def rows(self, part: str) -> list[Row]:
        """The rows of a part of the run, by seed."""
        found = [_row(each["row"]) for each in self._lines()[1:] if each["part"] == part]
        return sorted(found, key=lambda row: row.seed)

    def _lines(self) -> Sequence[Any]:
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def _row(plain: dict[str, Any]) -> Row:
    verdict = plain["verdict"]
    verdict |= {"wrong": tuple(verdict["wrong"]), "seconds": tuple(verdict["seconds"])}
    return Row(**plain | {"verdict": Verdict(**verdict)})


def _cut_partial_line(path: Path) -> None:
    """A line that was cut off when the machine or the disk failed"""
    text = path.read_bytes()
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
