"""`paceline bench hook`: what taking each parameter's gradient adds to a backward, without other ranks."""

from __future__ import annotations

from typing import Any

from paceline.bench.contest import Contest, Entry, Plan, Timing, bound, changes, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import overhead, slowest_median
from paceline.bench.units import format_time

MODEL = "many"
# Short, and so many of them: what is measured is a tenth of a backward.
SAMPLE_S = 0.02


def _entry(key: str, label: str, **options: Any) -> Entry:
    return Entry(key, label, "paceline.torch.bench.hook:Backward", options, no_torch, bound)


ENTRIES = (
    _entry("alone", "alone", way="alone"),
    _entry("empty", "an empty hook on each parameter", way="empty"),
    # With one rank, hooks are there only if they are to raise on a NaN.
    _entry("paceline", "Paceline DDP", way="paceline", nonfinite="raise"),
    _entry(
        "paceline_view",
        "Paceline DDP, bucket view",
        way="paceline",
        nonfinite="raise",
        gradient_as_bucket_view=True,
    ),
    _entry("torch", "torch DDP on Gloo", way="torch"),
    _entry("torch_view", "torch DDP on Gloo, bucket view", way="torch", gradient_as_bucket_view=True),
    _entry("torch_noop", "torch DDP, averaging nothing (its noop_hook)", way="torch_noop"),
)


def run(plan: Plan) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    with plan.contest(ENTRIES) as contest:
        plan.say("checking gradients")
        facts = contest.prepare(MODEL, model=MODEL)
        timings = contest.measure(MODEL, plan.rounds, SAMPLE_S)
    parameters = next((fact[0]["tensors"] for fact in facts.values()), 0)
    return Report(
        theme="hook",
        title=f"one backward in torch, {parameters} parameters, one rank",
        command=plan.command,
        machine=machine,
        columns=["way", "backward", "overhead", "per parameter", "beyond an empty hook"],
        rows=_rows(contest, parameters, timings),
        notes=[
            f"backward: median of {plan.rounds} rounds. overhead: backward minus backward alone in the same "
            "round, median over rounds; per parameter: divided by their number, with what happens once in "
            "each backward.",
            "It holds taking the gradient, copying it, averaging it with nobody's and bringing the mean "
            "back. An empty hook: what torch takes for calling one.",
            *changes(contest, "a backward", timings),
            *plan.notes(contest),
        ],
        data={
            "parameters": parameters,
            "rounds": plan.rounds,
            "rows": [{"way": key, "samples_s": timing.samples} for key, timing in timings.items()],
        },
        is_complete=not contest.ours_failed,
    )


def _rows(contest: Contest, parameters: int, timings: dict[str, Timing]) -> list[list[str]]:
    rows: list[list[str]] = []
    for contender in contest.contenders:
        key, label = contender.entry.key, contender.entry.label
        if key not in timings:
            rows.append([label, "failed", "-", "-", "-"])
            continue
        samples = timings[key].samples
        cells = [label, format_time(slowest_median(samples))]
        if key == "alone" or "alone" not in timings:
            rows.append([*cells, "-", "-", "-"])
            continue
        added = overhead(samples, timings["alone"].samples).median
        cells += [format_time(added), format_time(added / parameters)]
        if key == "empty" or "empty" not in timings:
            rows.append([*cells, "-"])
            continue
        own = overhead(samples, timings["empty"].samples).median
        rows.append([*cells, format_time(own / parameters)])
    return rows
