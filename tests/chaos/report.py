"""The table of many trials: one row for each family of faults, with torch's own DDP beside ours. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.judge import Verdict, is_silent, judge
from tests.chaos.trial import Result

_COLUMNS = (
    "fault",
    "n",
    "what came of it",
    "findings",
    "named",
    "median / p99 / max",
    "torch: n",
    "silent",
    "named",
    "median / max",
)


@dataclass(frozen=True)
class Row:
    """One trial, as far as the table needs it."""

    seed: int
    told: str
    family: str
    way: str
    asks_for_name: bool
    is_late: bool
    verdict: Verdict
    is_silent: bool
    took_s: float
    details: str

    @classmethod
    def of(cls, result: Result) -> Row:
        plan = result.plan
        verdict = judge(result)
        return cls(
            plan.seed,
            str(plan),
            plan.fault.kind.family,
            plan.job.way,
            plan.must_name,
            plan.is_late,
            verdict,
            is_silent(result),
            result.took_s,
            details(result) if verdict.wrong else "",
        )


def details(result: Result) -> str:
    """How each rank of a trial ended, for a reader."""
    parts = []
    for number, ended in enumerate(result.ranks):
        parts.append(f"--- rank {number}: status {ended.status} {ended.how}")
        if ended.report is not None:
            report = ended.report
            parts.append(
                f"{report.how} after {report.steps} steps: {report.kind} {report.ranks}\n{report.text}"
            )
        parts.append(f"printed: ...{ended.output[-3000:]}")
    return "\n".join(parts)


def table(ours: Sequence[Row], torchs: Sequence[Row]) -> str:
    """Markdown."""
    lines = [_line(_COLUMNS), _line(["---", "--:", "---", *["--:"] * 7])]
    for family in dict.fromkeys(row.family for row in ours):
        mine = [row for row in ours if row.family == family and row.verdict.outcome != _UNSTRUCK]
        others = [row for row in torchs if row.family == family and row.verdict.outcome != _UNSTRUCK]
        if mine:
            lines.append(_line([family, *_ours(mine), *_torchs(others)]))
    return "\n".join(lines)


def summary(ours: Sequence[Row], torchs: Sequence[Row]) -> str:
    """The sentences below the table."""
    struck = [row for row in ours if row.verdict.outcome != _UNSTRUCK]
    lines = [
        f"- {len(struck)} faults struck, in {len(ours)} trials; in the others the job was over before. "
        f"{sum(bool(row.verdict.wrong) for row in ours)} findings."
    ]
    for title, rows in (
        (
            'where gradients go through memory, or the backend "paceline"',
            [r for r in struck if r.asks_for_name],
        ),
        (
            "over a process group of another library, or while wrapping over one",
            [r for r in struck if not r.asks_for_name],
        ),
    ):
        named, survivors = _named(rows)
        times = [s for row in rows if not row.is_late for s in row.verdict.seconds]
        told = f"{_times(times)} from fault to error, those left out that only a time-out tells"
        lines.append(f"- {title}: {named} of {survivors} survivors' errors name the rank; {told}.")
    if torchs:
        struck = [row for row in torchs if row.verdict.outcome != _UNSTRUCK]
        named, survivors = _named(struck)
        times = [s for row in struck if not row.is_late for s in row.verdict.seconds]
        lines.append(
            f"- torch's DDP over Gloo: {len(struck)} faults; {sum(row.is_silent for row in struck)} silent; "
            f"{named} of {survivors} name the rank; {_times(times)}."
        )
    return "\n".join(lines)


_UNSTRUCK = "did not strike"


def _ours(rows: Sequence[Row]) -> list[str]:
    outcomes = Counter(row.verdict.outcome for row in rows)
    told = ", ".join(
        outcome if count == len(rows) else f"{outcome} ({count})" for outcome, count in outcomes.most_common()
    )
    named, survivors = _named(rows)
    seconds = [each for row in rows for each in row.verdict.seconds]
    findings = sum(bool(row.verdict.wrong) for row in rows)
    return [
        str(len(rows)),
        told,
        str(findings or "-"),
        f"{named}/{survivors}" if survivors else "-",
        _times(seconds),
    ]


def _torchs(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["", "", "", ""]
    named, survivors = _named(rows)
    silent = sum(row.is_silent for row in rows)
    times = [each for row in rows for each in row.verdict.seconds]
    told = f"{_ms(statistics.median(times))} / {_ms(max(times))}" if times else "-"
    return [str(len(rows)), str(silent or "-"), f"{named}/{survivors}" if survivors else "-", told]


def _named(rows: Iterable[Row]) -> tuple[int, int]:
    rows = list(rows)
    return sum(row.verdict.named for row in rows), sum(row.verdict.survivors for row in rows)


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{_ms(statistics.median(ordered))} / {_ms(p99)} / {_ms(ordered[-1])}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
