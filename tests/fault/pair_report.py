"""The findings of `make pairs`: a file with a line for each part that has run, and the table of all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path

from benchmarks.report import Machine, Report
from tests.fault.pair_driver import Findings
from tests.fault.pair_parts import Part, all_parts

_COLUMNS = (
    "program",
    "faults",
    "points",
    "cases",
    "all struck",
    "one of two",
    "unstruck",
    "findings",
    "CPU s",
)
_NONE = Findings(0, 0, 0, 0, 0.0)


class Journal:
    """The parts that have run, in a file, so that an interrupted run keeps its finished parts.

    Args:
        path: Created if it does not exist. Findings at another commit no longer count.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or json.loads(path.read_text().partition("\n")[0] or "{}") != {"commit": commit}:
            path.write_text(json.dumps({"commit": commit}) + "\n")

    def add(self, part: Part, findings: Findings) -> None:
        """Write the findings of a part."""
        with self._path.open("a") as file:
            file.write(json.dumps({"part": str(part), "findings": asdict(findings)}) + "\n")

    def found(self) -> dict[str, Findings]:
        """By the part's text."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines()[1:]]
        return {line["part"]: Findings(**line["findings"]) for line in lines}


def report_of(found: Mapping[str, Findings], command: str, commit: str) -> Report:
    """The table: a row for each part that has run, and the sums."""
    total = add(found.values())
    rows = [
        [part.program.__name__, part.kind, str(len(part.program.points)), *_cells(found[str(part)])]
        for part in all_parts()
        if str(part) in found
    ]
    rows += [[], ["all", "", "", *_cells(total)]]
    return Report(
        theme="pairs",
        title=f"{total.cases:,} pairs of faults with state",
        command=command,
        machine=Machine.here(),
        columns=list(_COLUMNS),
        rows=rows,
        notes=[
            "A rank waits at one of its points until another rank has passed one of its own. Then it is "
            "killed, or stopped and continued when the others have ended, or it goes on (held). In the last "
            "kind one rank is stopped, and another killed when the first has reached its point. Points: the "
            "labelled points that a step of the program passes; there is a case for each pair of them and "
            "of three ranks.",
            "A finding: survivors disagree how many steps were good, memory of one changes after it has "
            "raised, a wrong mean or message, an error that is not Paceline's, or a hang.",
            "One of two: the rank that was to be killed could not come to its point any more, because it "
            "waited for the one that was stopped. Unstruck: the program came to its end first; any rank may "
            "claim a chunk. In the rest a slow rank was taken for a stopped one before.",
            f"At commit {commit}.",
        ],
        is_complete=not total.wrong,
        text_columns=2,
    )


def add(many: Iterable[Findings]) -> Findings:
    """The sum of all."""

    def plus(one: Findings, other: Findings) -> Findings:
        return replace(
            one,
            cases=one.cases + other.cases,
            struck=one.struck + other.struck,
            partly=one.partly + other.partly,
            unstruck=one.unstruck + other.unstruck,
            cpu_s=one.cpu_s + other.cpu_s,
            wrong=[*one.wrong, *other.wrong],
        )

    return reduce(plus, many, _NONE)


def _cells(findings: Findings) -> list[str]:
    numbers = (findings.cases, findings.struck, findings.partly, findings.unstruck, len(findings.wrong))
    return [*(f"{number:,}" for number in numbers), f"{findings.cpu_s:.0f}"]
