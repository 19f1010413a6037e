"""The expected result of each of torch's tests (`outcomes.json`), unexpected results, and a table.

Every test has a line. It is an error if an unlisted test stops, and if a listed one passes, stops elsewhere,
or is missing in the installed torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.incumbents.run import Outcome

DATA = Path(__file__).with_name("outcomes.json")


@dataclass(frozen=True)
class Stop:
    """Tests that stop for one reason.

    Attributes:
        tests: Their names.
        at: A pattern of their messages when they stop.
        why: The reason, for the table.
        here: The test of Paceline that covers the behaviour; empty: there is none to cover.
        theirs_stops: Whether torch's own class, or Gloo, stops on this machine, too.
    """

    tests: tuple[str, ...]
    at: str
    why: str
    here: str
    theirs_stops: bool


@dataclass(frozen=True)
class Part:
    """The tests of one subject.

    Attributes:
        name: "ddp" or "collectives".
        passes: Tests that pass.
        skips: Tests that skip themselves, by the reason that they give.
        stops: Tests that stop.
    """

    name: str
    passes: tuple[str, ...]
    skips: Mapping[str, tuple[str, ...]]
    stops: tuple[Stop, ...]

    @property
    def skipping(self) -> list[str]:
        return [name for names in self.skips.values() for name in names]

    @property
    def stopping(self) -> dict[str, Stop]:
        return {name: stop for stop in self.stops for name in stop.tests}

    @property
    def names(self) -> list[str]:
        return sorted({*self.passes, *self.skipping, *self.stopping})

    def unexpected(self, name: str, outcome: Outcome) -> str | None:
        """The difference from the list; None: there is none."""
        stop = self.stopping.get(name)
        if outcome.kind == "stops":
            if stop is None:
                return f"stops, and no reason is listed: {outcome.last_words}"
            if not re.search(stop.at, outcome.seen):
                return f"stops elsewhere than at {stop.at!r}: {outcome.last_words}"
            return None
        expected = "stops" if stop else "passes" if name in self.passes else "skips"
        return None if outcome.kind == expected else f"{outcome.kind}, and is listed as one that {expected}"

    def table(self) -> str:
        """The tests that stop, as a table in Markdown."""
        lines = ["| torch's test | where it stops | what holds the behaviour here |", "|---|---|---|"]
        for stop in self.stops:
            names = ", ".join(f"`{name.removeprefix('test_')}`" for name in stop.tests)
            why = stop.why + ("; torch's own stops, too" if stop.theirs_stops else "")
            here = f"`{stop.here}`" if stop.here else "-"
            lines.append(f"| {names} | {why} | {here} |")
        return "\n".join(lines) + "\n"

    def count(self) -> str:
        """The number of each kind, in a sentence."""
        return (
            f"Of {len(self.names)} tests, {len(self.passes)} pass, {len(self.skipping)} skip themselves, and "
            f"{len(self.stopping)} stop."
        )


def parts() -> dict[str, Part]:
    """The expected results, by the name of the part."""
    data = json.loads(DATA.read_text())
    return {
        name: Part(
            name,
            tuple(part["passes"]),
            {reason: tuple(names) for reason, names in part["skips"].items()},
            tuple(Stop(**{**stop, "tests": tuple(stop["tests"])}) for stop in part["stops"]),
        )
        for name, part in data["parts"].items()
    }


def version() -> str:
    """The version of torch that the list is for."""
    return str(json.loads(DATA.read_text())["torch"])


def strangers(known: Mapping[str, Part], there: Iterable[str]) -> list[str]:
    """Tests of the installed torch without a line, and lines without a test."""
    listed = [name for part in known.values() for name in part.names]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    return [
        *(f"{name} has no line in {DATA.name}" for name in sorted(set(there) - set(listed))),
        *(f"{name} is listed, and torch has no such test" for name in sorted(set(listed) - set(there))),
        *(f"{name} is listed twice" for name in twice),
    ]
