"""`paceline bench features`: what the options of DistributedDataParallel add to a step."""

from __future__ import annotations

from typing import Any

from paceline.bench.contest import Contest, Plan, Timing
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import overhead, slowest_median
from paceline.bench.step import SAMPLE_S, entry
from paceline.bench.units import format_time

MODELS = ("many", "gpt")
ENTRIES = (
    entry("alone", "alone, no synchronisation", way="alone"),
    entry("paceline", "Paceline DDP", way="paceline"),
    entry("unused", "find_unused_parameters=True", way="paceline", find_unused_parameters=True),
    entry("static", "static_graph=True", way="paceline", static_graph=True),
    entry("check", "check_replicas_every=1", way="paceline", check_replicas_every=1),
)


def run(plan: Plan) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with plan.contest(ENTRIES) as contest:
        for model in MODELS:
            plan.say(f"{model}: checking gradients")
            facts = contest.prepare(model, model=model)
            timings = contest.measure(model, plan.rounds, SAMPLE_S)
            tensors = next((fact[0]["tensors"] for fact in facts.values()), 0)
            rows += [*_rows(contest, model, tensors, timings), []]
            data += [
                {"model": model, "way": key, "parameters": tensors, "samples_s": timing.samples}
                for key, timing in timings.items()
            ]
    return Report(
        theme="features",
        title=f"options of DistributedDataParallel, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["model", "way", "step", "overhead", "beyond the default"],
        rows=rows,
        notes=[
            f"step: median of {plan.rounds} rounds on each rank, then the slowest rank. overhead: step minus "
            "step alone in the same round, median over rounds.",
            "beyond the default: the same against Paceline DDP without the option, in per cent of its step, "
            "with the 95 % interval.",
            "check_replicas_every=1 compares the replicas in each step; 100 costs a hundredth of it.",
            *plan.notes(contest),
        ],
        data={"ranks": plan.ranks, "rounds": plan.rounds, "rows": data},
        is_complete=not contest.ours_failed,
        text_columns=2,
    )


def _rows(contest: Contest, model: str, tensors: int, timings: dict[str, Timing]) -> list[list[str]]:
    rows: list[list[str]] = []
    for contender in contest.contenders:
        key = contender.entry.key
        cells = [f"{model}, {tensors} parameters" if not rows else "", contender.entry.label]
        if key not in timings:
            rows.append([*cells, "failed", "-", "-"])
            continue
        samples = timings[key].samples
        cells.append(format_time(slowest_median(samples)))
        if key == "alone" or "alone" not in timings:
            rows.append([*cells, "-", "-"])
            continue
        added = overhead(samples, timings["alone"].samples).median
        rows.append([*cells, format_time(added), _beyond(key, timings)])
    return rows


def _beyond(key: str, timings: dict[str, Timing]) -> str:
    if key in ("alone", "paceline") or "paceline" not in timings:
        return "-"
    default = timings["paceline"].samples
    more, step_s = overhead(timings[key].samples, default), slowest_median(default) / 100
    return f"{more.median / step_s:+.1f} % ({more.low / step_s:+.1f} .. {more.high / step_s:+.1f})"
