"""`paceline bench trace`: what recording its passes adds to a training step.

The one idea: the same processes make all samples, now with and now without a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.contest import Contest, Entry, Plan, bound, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import iterations_for, overhead, slowest_median
from paceline.bench.units import format_time

MODELS = ("toy", "rl", "mlp", "gpt", "cnn")
WAYS = {
    "off": "no recording",
    "flight": "the flight recorder, as in each job of `paceline run`",
    "trace": "all, as with `--trace`",
}
ENTRIES = (
    Entry(
        "paceline",
        "Paceline DDP",
        "paceline.torch.bench.recorded:RecordedStep",
        {"way": "paceline"},
        no_torch,
        bound,
    ),
)


def run(plan: Plan, models: Sequence[str], sample_s: float) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    totals_s: dict[str, list[float]] = {}
    with plan.contest(ENTRIES) as contest:
        for model in models:
            plan.say(f"{model}: checking gradients")
            contest.prepare(model, model=model)
            _check(contest, model)
            samples = _measure(contest, model, plan, sample_s)
            totals = contest.on_all("time_totals", model, iterations=20).get("paceline", [])
            if samples and totals:
                rows += [*_rows(model, samples, max(totals)), []]
                data += [{"model": model, "way": way, "samples_s": each} for way, each in samples.items()]
                totals_s[model] = totals
    return Report(
        theme="trace",
        title=f"one training step with and without a recording, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["model", "recording", "step", "more", "part of the step, with the 95 % interval"],
        rows=rows,
        notes=[
            f"step: median of {plan.rounds} rounds of {sample_s:g} s on each rank, then the slowest rank. "
            "more: the difference to no recording in the same round, median over rounds; with a step's part "
            "of what is written once in a second, and measured by itself.",
            "The same processes make the samples of all three, in turn. With --trace the optimizer's step is "
            "noted, and a batch.",
            "Gradients were checked before timing: close to the mean as computed on one process, and the "
            "same bits on all ranks and with each kind of recording.",
            *plan.notes(contest),
        ],
        data={"ranks": plan.ranks, "rounds": plan.rounds, "rows": data, "totals_s": totals_s},
        is_complete=not contest.ours_failed and bool(rows),
        text_columns=2,
    )


def _check(contest: Contest, model: str) -> None:
    """Take it out unless all ways of recording give the same gradients on all ranks."""
    found = contest.on_all("digests", model, ways=list(WAYS))
    for contender in contest.contenders:
        each = found.get(contender.entry.key, [])
        if len({digest for ways in each for digest in ways.values()}) > 1:
            contender.take_out(f"{model}: gradients differ between ranks, or with a recording")


def _measure(contest: Contest, model: str, plan: Plan, sample_s: float) -> dict[str, list[list[float]]]:
    """Seconds for each step: of each way, `[rank][round]`; empty: it failed."""

    def sample(way: str, iterations: int) -> list[float]:
        taken = contest.on_all("time_in", model, way=way, iterations=iterations).get("paceline", [])
        return [seconds / iterations for seconds in taken]

    iterations = 3
    for _ in range(3):  # the first steps are slow
        if not (taken := sample("off", iterations)):
            return {}
        iterations = iterations_for(max(taken), sample_s, 1_000_000)
    rounds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(plan.rounds):
        plan.say(f"{model}: round {number + 1} of {plan.rounds}")
        ways = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
        for way in ways:
            if not (taken := sample(way, iterations)):
                return {}
            rounds[way].append(taken)
    return {way: [list(rank) for rank in zip(*each, strict=True)] for way, each in rounds.items()}


def _rows(model: str, samples: dict[str, list[list[float]]], totals_s: float) -> list[list[str]]:
    off = samples["off"]
    step_s = slowest_median(off)
    of_totals_s = totals_s * step_s  # once in a second
    rows = [[model, WAYS["off"], format_time(step_s), "-", "-"]]
    for way in ("flight", "trace"):
        more, part = overhead(samples[way], off), step_s / 100
        rows.append(
            [
                "",
                WAYS[way],
                format_time(slowest_median(samples[way])),
                format_time(more.median + of_totals_s),
                "{:+.2f} % ({:+.2f} .. {:+.2f})".format(
                    *((each + of_totals_s) / part for each in (more.median, more.low, more.high))
                ),
            ]
        )
    return rows
