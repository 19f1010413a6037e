"""`paceline bench step`: what data parallelism adds to a training step, against the framework's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.contest import (
    BEFORE,
    Contest,
    Entry,
    Plan,
    Timing,
    bound,
    changes,
    no_paddle,
    no_torch,
    unbound,
)
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import Interval, overhead, slowest_median
from paceline.bench.units import format_ratio, format_time

MODELS = {"torch": ("toy", "rl", "mlp", "gpt", "cnn"), "paddle": ("toy", "rl", "deep", "mlp")}
# A step of the larger models takes tens of milliseconds; a few of them average out the scheduler.
SAMPLE_S = 0.1


# Gradients are allocated anew in each step. By default malloc gives large pieces back to the kernel, and the
# page faults that follow cost more than what is measured here, by chance for some ways and not for others.
STEADY_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


def entry(key: str, label: str, **options: Any) -> Entry:
    """An entry of `paceline.torch.bench.step`; `options` are those of its Step."""
    launch = unbound if options["way"] == "torch" else bound
    return Entry(key, label, "paceline.torch.bench.step:Step", options, no_torch, launch)


def _paddle_entry(key: str, label: str, **options: Any) -> Entry:
    launch = unbound if options["way"] == "paddle" else bound
    return Entry(key, label, "paceline.paddle.bench.step:Step", options, no_paddle, launch)


ENTRIES = {
    "torch": (
        entry("alone", "alone, no synchronisation", way="alone"),
        entry("torch", "torch DDP on Gloo", way="torch"),
        entry("torch_view", "torch DDP on Gloo, bucket view", way="torch", gradient_as_bucket_view=True),
        entry("paceline", "Paceline DDP", way="paceline"),
        entry("paceline_view", "Paceline DDP, bucket view", way="paceline", gradient_as_bucket_view=True),
    ),
    "paddle": (
        _paddle_entry("alone", "alone, no synchronisation", way="alone"),
        _paddle_entry("paddle", "paddle.DataParallel on Gloo", way="paddle"),
        _paddle_entry("paceline", "Paceline DataParallel", way="paceline"),
        _paddle_entry("paceline_view", "Paceline, bucket view", way="paceline", gradient_as_bucket_view=True),
    ),
}


def run(plan: Plan, models: Sequence[str], framework: str = "torch") -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    changed: list[str] = []
    with plan.contest(ENTRIES[framework]) as contest:
        for model in models:
            plan.say(f"{model}: checking gradients")
            facts = contest.prepare(model, model=model)
            _check_replicas(contest, facts)
            timings = contest.measure(model, plan.rounds, SAMPLE_S)
            heading = f"{model}{_size_of(facts)}"
            rows += [*_rows(contest, heading, timings), []]
            changed += changes(contest, model, timings)
            data += _as_data(model, facts, timings)
    return Report(
        theme="step" if framework == "torch" else f"step-{framework}",
        title=f"one training step in {framework}, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=["model", "way", "step", "overhead", "95 % interval", f"{framework}'s overhead / this"],
        rows=rows,
        notes=[
            f"step: median of {plan.rounds} rounds on each rank, then the slowest rank. overhead: step minus "
            "step alone in the same round, each of the slowest rank; median over rounds.",
            *_malloc_note(plan),
            "'alone' runs on all ranks at once, so that the cores are as busy as with synchronisation. "
            f"{framework}'s overhead: the smallest of its ways.",
            f"Ranks are bound to cores as `paceline run` does; those of {framework}'s own are not, as "
            "with its launcher.",
            "Gradients were checked before timing: close to the mean as computed on one process, and the "
            "same bits on all ranks.",
            *changed,
            *plan.notes(contest),
        ],
        data={"framework": framework, "ranks": plan.ranks, "rounds": plan.rounds, "rows": data},
        is_complete=not contest.ours_failed,
        text_columns=2,
    )


def _malloc_note(plan: Plan) -> list[str]:
    if not STEADY_MALLOC.items() <= plan.environment.items():
        return []
    return [
        "malloc keeps freed memory in all of them (as jemalloc does), so that page faults of new gradients "
        "are not mistaken for synchronisation; --system-malloc measures without."
    ]


def _check_replicas(contest: Contest, facts: dict[str, list[dict[str, Any]]]) -> None:
    """Take out whoever gave different gradients to different ranks ('alone' does, by intent)."""
    for contender in contest.contenders:
        digests = {fact["gradient_digest"] for fact in facts.get(contender.entry.key, [])}
        if len(digests) > 1 and contender.entry.key != "alone":
            contender.take_out("gradients differ between ranks")


def _size_of(facts: dict[str, list[dict[str, Any]]]) -> str:
    if not facts:
        return ""
    count = next(iter(facts.values()))[0]["parameters"]
    size = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k" if count >= 1e4 else str(count)
    return f", {size} parameters"


def _rows(contest: Contest, heading: str, timings: dict[str, Timing]) -> list[list[str]]:
    added = overheads(timings)
    theirs = [interval for key, interval in added.items() if not key.startswith(("paceline", BEFORE))]
    reference = min(theirs, key=lambda interval: interval.median) if theirs else None
    rows: list[list[str]] = []
    for contender in contest.contenders:
        key = contender.entry.key
        cells = [heading if not rows else "", contender.entry.label]
        if key not in timings:
            rows.append([*cells, "failed", "-", "-", "-"])
            continue
        cells.append(format_time(slowest_median(timings[key].samples)))
        rows.append([*cells, *overhead_cells(key, added.get(key), reference)])
    return rows


def overheads(timings: dict[str, Timing]) -> dict[str, Interval]:
    """What each way adds to a step alone, by key; empty when nobody ran alone."""
    if "alone" not in timings:
        return {}
    alone = timings["alone"].samples
    return {key: overhead(timing.samples, alone) for key, timing in timings.items() if key != "alone"}


def overhead_cells(key: str, ours: Interval | None, theirs: Interval | None) -> list[str]:
    """Overhead, its interval, and the framework's overhead over ours: no larger than samples allow to say."""
    if ours is None:
        return ["-", "-", "-"]
    cells = [format_time(ours.median), f"{format_time(ours.low)} .. {format_time(ours.high)}"]
    if theirs is None or theirs.low <= 0 or not key.startswith(("paceline", BEFORE)):
        return [*cells, "-"]
    if ours.low > 0:
        return [*cells, format_ratio(theirs.median / ours.median)]
    # Ours can't be told from zero: only a lower bound of the ratio is known.
    return [*cells, f"> {format_ratio(theirs.median / ours.high)}" if ours.high > 0 else "no overhead"]


def _as_data(
    model: str, facts: dict[str, list[dict[str, Any]]], timings: dict[str, Timing]
) -> list[dict[str, Any]]:
    added = overheads(timings)
    rows = []
    for key, timing in timings.items():
        row: dict[str, Any] = {"model": model, "way": key, "parameters": facts[key][0]["parameters"]}
        row["median_s"] = slowest_median(timing.samples)
        if key in added:
            row["overhead_s"] = vars(added[key])
        rows.append({**row, "iterations": timing.iterations, "samples_s": timing.samples})
    return rows
