"""The table of a long run, in its committed form. Independent of the framework."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Machine
from tests.differential.jobs import Tally
from tests.differential.judge import ENGINE_CRASH, EQUAL, INVALID, KNOWN, REFUSED, USER_ERROR

SILENT = ("ranks differ", "a rank went on alone", "wrong")
"""Prefixes of the kinds of findings in which training would have continued silently with wrong values."""


@dataclass(frozen=True)
class Campaign:
    """The facts of a run in its table, besides the tally.

    Attributes:
        framework: "torch" or "paddle".
        first_seed: The programs are those of this seed and of the ones that follow.
        command: The command that repeats it.
    """

    framework: str
    first_seed: int
    command: str


def table(tally: Tally, campaign: Campaign) -> str:
    """Markdown: the seeds, the outcomes by mode, findings, and the features of the programs.

    Example:
        For one program in one mode, equal: "1 programs, 1 runs", a row
        "| default | 1 | 1 | 0 | 0 | 0 | 0 | 0 |".
    """
    last = campaign.first_seed + tally.programs - 1
    runs = sum(tally.outcomes.values())
    silent = sum(count for kind, count in tally.outcomes.items() if kind.startswith(SILENT))
    found = sum(counts["finding"] for counts in tally.by_mode.values())
    machine = Machine.here()
    return "\n".join(
        [
            f"# Differential programs, {campaign.framework}",
            "",
            f"{tally.programs:,} programs, seeds {campaign.first_seed} to {last} (docs/design/testing.md, "
            f"Generated programs), {runs:,} runs in {len(tally.by_mode)} modes. "
            f"**Silent differences: {silent}.** Other findings: {found - silent}.",
            "",
            f"- command: `{campaign.command}`",
            f"- commit: {_commit()}",
            f"- machine: {'; '.join(machine.describe().splitlines())}",
            f"- took {tally.seconds / 60:.1f} minutes: {tally.programs / max(tally.seconds, 1e-9):.1f} "
            "programs a second",
            "",
            "| mode | runs | equal | refused on all ranks | the program's own error | an error without "
            "Paceline, too | a crash of the engine below | findings |",
            "|---|--:|--:|--:|--:|--:|--:|--:|",
            *(_mode_row(mode, counts) for mode, counts in sorted(tally.by_mode.items())),
            _mode_row("all", sum(tally.by_mode.values(), Counter())),
            "",
            *_incumbents(tally),
            *_counted("refused with", tally.refusals),
            *_counted("finding", _findings(tally)),
            "| feature | equal | refused | other | finding |",
            "|---|--:|--:|--:|--:|",
            *(_feature_row(feature, counts) for feature, counts in sorted(tally.by_feature.items())),
            "",
        ]
    )


def write(text: str, path: Path, framework: str) -> Path:
    """Write a table to a file; into a folder under a derived name, as in benchmarks/results."""
    if path.is_dir():
        machine = Machine.here()
        path = path / f"differential-{framework}_{machine.slug}.md"
    path.write_text(text)
    return path


def _mode_row(mode: str, counts: Counter[str]) -> str:
    columns = (EQUAL, REFUSED, USER_ERROR, INVALID, ENGINE_CRASH, "finding")
    row = [sum(counts.values()), *(counts[column] for column in columns)]
    return f"| {mode} | " + " | ".join(f"{count:,}" for count in row) + " |"


def _incumbents(tally: Tally) -> list[str]:
    """The results of the framework's own wrapper, if it ran."""
    if not tally.by_incumbent:
        return []
    columns = (EQUAL, REFUSED, USER_ERROR, INVALID, ENGINE_CRASH, KNOWN, "finding")
    asked = sum(sum(counts.values()) for counts in tally.by_incumbent.values())
    rows = [
        f"| {mode} | {sum(counts.values()):,} | {' | '.join(f'{counts[each]:,}' for each in columns)} |"
        for mode, counts in sorted(tally.by_incumbent.items())
    ]
    return [
        f"The framework's own wrapper ran {asked:,} of these programs beside it; the others use what it "
        "does not have. It is compared with the same reference, and its differences are no findings of "
        "Paceline's.",
        "",
        "| wrapper | runs | equal | an error on all ranks | the program's own error | an error without any "
        "wrapper, too | a crash of the engine below | a known difference | another difference |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        *_counted("a known difference of the framework's own wrapper", tally.differences),
    ]


def _feature_row(feature: str, counts: Counter[str]) -> str:
    row = " | ".join(str(counts[column]) for column in ("equal", "refused", "other", "finding"))
    return f"| {feature} | {row} |"


def _findings(tally: Tally) -> Counter[str]:
    named = ((each.verdict.kind, each.mode, each.program.get("seed")) for each in tally.findings)
    return Counter(f"{kind}, mode {mode}, seed {seed}" for kind, mode, seed in named)


def _counted(title: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    rows = [f"| {name} | {count:,} |" for name, count in counts.most_common()]
    return [f"| {title} | runs |", "|---|--:|", *rows, ""]


def _commit() -> str:
    """The commit of the working tree; "+" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
