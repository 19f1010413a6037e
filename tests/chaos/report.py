"""The table of many trials: one row for each family of faults, with torch's own DDP beside ours."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.report import Machine, Report
from tests.chaos.judge import Verdict, is_silent, judge
from tests.chaos.plans import Expected
from tests.chaos.trial import Result

_UNSTRUCK = "did not strike"
_COLUMNS = (
    "fault",
    "what came of it",
    "n",
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
    """The columns of one trial that the table needs."""

    seed: int
    plan: str
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
            plan.is_late or plan.expected is Expected.LATER,
            verdict,
            is_silent(result),
            result.took_s,
            details(result) if verdict.wrong else "",
        )


def details(result: Result) -> str:
    """The end of each rank of a trial, for a reader."""
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


def report_of(ours: Sequence[Row], torchs: Sequence[Row], command: str, spent_s: float) -> Report:
    """The table and its notes."""
    rows = []
    for family in dict.fromkeys(row.family for row in ours):
        mine = [row for row in _struck(ours) if row.family == family]
        others = [row for row in _struck(torchs) if row.family == family]
        if mine:
            rows.append([family, *_ours(mine), *_torchs(others)])
    return Report(
        theme="chaos",
        title=f"{len(_struck(ours))} random faults in training jobs",
        command=command,
        machine=Machine.here(),
        columns=list(_COLUMNS),
        rows=rows,
        notes=_notes(ours, torchs, spent_s),
        is_complete=not any(row.verdict.wrong for row in ours),
        text_columns=2,
    )


def _notes(ours: Sequence[Row], torchs: Sequence[Row], spent_s: float) -> list[str]:
    struck = _struck(ours)
    findings = sum(bool(row.verdict.wrong) for row in ours)
    repeated = sum(row.verdict.is_void for row in ours)
    notes = [
        f"{len(ours)} trials took {spent_s:.0f} s. In {len(ours) - len(struck)} of them the job was over "
        f"before the fault struck, or ({repeated}) an innocent rank got no core for as long as the time-out. "
        f"Findings: {findings}. A finding is a hang, wrong weights, an error that is missing or names "
        "no rank or another rank, or something left behind.",
        "named: survivors' errors that name the rank that was struck. Times: from the fault to a survivor's "
        "exception; where a rank stops, the time-out of 2 s (torch: 4 s) is part of it. A skipped iteration "
        "is reported at the end of the job.",
    ]
    notes.append(f"All survivors: {_summary(struck)}")
    if torchs:
        struck = _struck(torchs)
        silent = sum(row.is_silent for row in struck)
        notes.append(
            f"torch's DDP over Gloo, given {len(struck)} of the same faults: {silent} jobs ended well, "
            f"although the replicas differ or hold a wrong model (silent). {_summary(struck)}"
        )
    return notes


def _summary(rows: Sequence[Row]) -> str:
    named, survivors = _named(rows)
    times = [each for row in rows if not row.is_late for each in row.verdict.seconds]
    return (
        f"{named} of {survivors} survivors' errors name the rank; median / p99 / max {_times(times)}, "
        "without faults that only a time-out or the end of the job shows."
    )


def _struck(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.verdict.outcome != _UNSTRUCK and not row.verdict.is_void]


def _ours(rows: Sequence[Row]) -> list[str]:
    outcomes = Counter(row.verdict.outcome for row in rows)
    text = ", ".join(
        outcome if count == len(rows) else f"{outcome} ({count})" for outcome, count in outcomes.most_common()
    )
    named, survivors = _named(rows)
    seconds = [each for row in rows for each in row.verdict.seconds]
    findings = sum(bool(row.verdict.wrong) for row in rows)
    shares = f"{named}/{survivors}" if survivors else "-"

    return [text, str(len(rows)), str(findings or "-"), shares, _times(seconds)]


def _torchs(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["", "", "", ""]
    named, survivors = _named(rows)
    silent = sum(row.is_silent for row in rows)
    times = [each for row in rows for each in row.verdict.seconds]
    times_text = f"{_ms(statistics.median(times))} / {_ms(max(times))}" if times else "-"
    return [str(len(rows)), str(silent or "-"), f"{named}/{survivors}" if survivors else "-", times_text]


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
