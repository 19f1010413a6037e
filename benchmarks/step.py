"""The time that data parallelism adds to a training step, beside the framework's own, and with options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.report import Report
from benchmarks.runner import (
    BEFORE,
    STEADY_MALLOC,
    Benchmark,
    Case,
    Runner,
    Settings,
    Timing,
    bound,
    check_names,
    no_paddle,
    no_torch,
    rows_of,
    unbound,
)
from benchmarks.samples import Interval, overhead, overhead_cells, ratio, slowest_median
from paceline import units
from paceline.units import format_time

MODELS = {"torch": ("toy", "rl", "mlp", "gpt", "cnn"), "paddle": ("toy", "rl", "deep", "mlp")}
MODELS_OF_OPTIONS = ("many", "gpt")
MODELS_OF_VIRTUAL_RANKS = ("toy", "cnn", "gpt")
# A step of the larger models takes tens of milliseconds; a few of them average out the scheduler's effects.
SAMPLE_S = 0.1


def _case(key: str, label: str, **options: Any) -> Case:
    launch = unbound if options["variant"] == "torch" else bound
    return Case(key, label, "benchmarks.workers.torch_step:Step", options, no_torch, launch)


def _paddle_case(key: str, label: str, **options: Any) -> Case:
    launch = unbound if options["variant"] == "paddle" else bound
    return Case(key, label, "benchmarks.workers.paddle_step:Step", options, no_paddle, launch)


_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
CASES = {
    "torch": (
        _case("alone", "alone, no synchronisation", variant="alone"),
        _case("torch", "torch DDP on Gloo", variant="torch"),
        _case("torch_view", "torch DDP on Gloo, bucket view", variant="torch", **_VIEW),
        _case("paceline", "Paceline DDP", variant="paceline"),
        _case("paceline_view", "Paceline DDP, bucket view", variant="paceline", **_VIEW),
    ),
    "paddle": (
        _paddle_case("alone", "alone, no synchronisation", variant="alone"),
        _paddle_case("paddle", "paddle.DataParallel on Gloo", variant="paddle"),
        _paddle_case("paceline", "Paceline DataParallel", variant="paceline"),
        _paddle_case("paceline_view", "Paceline, bucket view", variant="paceline", **_VIEW),
    ),
}
CASES_OF_OPTIONS = (
    _case("alone", "alone, no synchronisation", variant="alone"),
    _case("paceline", "Paceline DDP", variant="paceline"),
    _case("unused", "find_unused_parameters=True", variant="paceline", find_unused_parameters=True),
    _case("static", "static_graph=True", variant="paceline", static_graph=True),
    _case("check", "check_replicas_every=1", variant="paceline", check_replicas_every=1),
)

CASES_OF_VIRTUAL_RANKS = tuple(
    Case(
        f"paceline_{variant}",
        label,
        "benchmarks.workers.torch_step:AccumulatedStep",
        {"variant": variant},
        no_torch,
        bound,
    )
    for variant, label in (
        ("accumulated", "4 micro-batches, no_sync()"),
        ("virtual", "4 virtual ranks on each process"),
    )
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    framework = given.framework
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for model in given.models or MODELS[framework]:
            facts = runner.prepare(model, model=model)
            runner.take_out_unequal(facts, "gradients")
            timings = runner.measure(model, SAMPLE_S)
            rows += [*_rows(runner, f"{model}{size_of(facts)}", timings), []]
            data += _as_data(model, facts, timings)
    malloc = [
        "malloc keeps freed memory in all cases (as jemalloc does), so that page faults of new gradients "
        "are not mistaken for synchronisation; --system-malloc measures without."
    ]
    return settings.report(
        "step" if framework == "torch" else f"step-{framework}",
        f"one training step in {framework}, {settings.ranks} ranks on one host",
        ["model", "case", "step", "overhead", "95 % interval", f"{framework}'s overhead / this"],
        rows,
        notes=[
            f"step: median of {settings.rounds} rounds on each rank, then the slowest rank. overhead: step "
            "minus step alone in the same round, each of the slowest rank; median over rounds.",
            *([] if given.system_malloc else malloc),
            "'alone' runs on all ranks at once, so that the cores are as busy as with synchronisation. "
            f"{framework}'s overhead: the smaller one of its cases.",
            f"Ranks are bound to cores as `paceline run` does; those of {framework}'s own are not, as "
            "with its launcher.",
            "Gradients were checked before timing: close to the mean as computed on one process, and the "
            "same bits on all ranks.",
            *runner.notes(),
        ],
        data={"framework": framework, "rows": data},
        is_complete=runner.is_complete,
        text_columns=2,
    )


def run_options(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report the time that options of DistributedDataParallel add."""
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for model in MODELS_OF_OPTIONS:
            facts = runner.prepare(model, model=model)
            timings = runner.measure(model, SAMPLE_S)
            tensors = next((fact[0]["tensors"] for fact in facts.values()), 0)
            rows += [*_rows_of_options(runner, f"{model}, {tensors} parameters", timings), []]
            data += [
                {"model": model, "case": key, "parameters": tensors, "samples_s": timing.samples}
                for key, timing in timings.items()
            ]
    return settings.report(
        "features",
        f"options of DistributedDataParallel, {settings.ranks} ranks on one host",
        ["model", "case", "step", "overhead", "beyond the default"],
        rows,
        notes=[
            f"step: median of {settings.rounds} rounds on each rank, then the slowest rank. overhead: step "
            "minus step alone in the same round, median over rounds.",
            "beyond the default: the same against Paceline DDP without the option, in per cent of its step, "
            "with the 95 % interval.",
            "check_replicas_every=1 compares the replicas in each step; 100 costs a hundredth of it.",
            *runner.notes(),
        ],
        data={"rows": data},
        is_complete=runner.is_complete,
        text_columns=2,
    )


def run_virtual_ranks(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report the cost of virtual ranks, compared with micro-batches and `no_sync()`."""
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for model in given.models or MODELS_OF_VIRTUAL_RANKS:
            facts = runner.prepare(model, model=model)
            runner.take_out_unequal(facts, "gradients")
            timings = runner.measure(model, 2 * SAMPLE_S)

            def cells(key: str, timings: Mapping[str, Timing] = timings) -> list[str]:
                step = format_time(slowest_median(timings[key].samples))
                if key != "paceline_virtual" or "paceline_accumulated" not in timings:
                    return [step, "-"]
                without = timings["paceline_accumulated"].samples
                beside = ratio(timings[key].samples, without, settings.starts)
                return [step, f"{beside.median:.3f} ({beside.low:.3f} .. {beside.high:.3f})"]

            rows += [*rows_of(runner.cases, timings, 2, cells, f"{model}{size_of(facts)}"), []]
            data += _as_data(model, facts, timings)
    return settings.report(
        "virtual-ranks",
        f"a step of four micro-batches on each of {settings.ranks} ranks, as virtual ranks and without",
        ["model", "case", "step", "of the time without"],
        rows,
        notes=[
            f"step: median of {settings.rounds} rounds on each rank, then the slowest rank. of the time "
            "without: divided in the same round, the median over rounds, with the 95 % interval.",
            "Gradients were checked before timing: close to the mean over all micro-batches as computed on "
            "one process, and the same bits on all ranks.",
            *runner.notes(),
        ],
        data={"rows": data},
        is_complete=runner.is_complete,
        text_columns=2,
    )


def size_of(facts: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the number of parameters for a heading: ", 4.2 M parameters"."""
    if not facts:
        return ""
    count = next(iter(facts.values()))[0]["parameters"]
    size = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k" if count >= 1e4 else str(count)
    return f", {size} parameters"


def overheads(timings: Mapping[str, Timing]) -> dict[str, Interval]:
    """Return what each case adds to a step alone, by key; empty if the step alone was not measured."""
    if "alone" not in timings:
        return {}
    alone = timings["alone"].samples
    return {key: overhead(timing.samples, alone) for key, timing in timings.items() if key != "alone"}


def _rows(runner: Runner, heading: str, timings: Mapping[str, Timing]) -> list[list[str]]:
    added = overheads(timings)
    theirs = [interval for key, interval in added.items() if not key.startswith(("paceline", BEFORE))]
    reference = min(theirs, key=lambda interval: interval.median) if theirs else None

    def cells(key: str) -> list[str]:
        step = format_time(slowest_median(timings[key].samples))
        return [step, *overhead_cells(key, added.get(key), reference)]

    return rows_of(runner.cases, timings, 4, cells, heading)


def _rows_of_options(runner: Runner, heading: str, timings: Mapping[str, Timing]) -> list[list[str]]:
    added = overheads(timings)

    def cells(key: str) -> list[str]:
        step = format_time(slowest_median(timings[key].samples))
        overhead_s = format_time(added[key].median) if key in added else "-"
        return [step, overhead_s, _beyond_default(key, timings)]

    return rows_of(runner.cases, timings, 3, cells, heading)


def _beyond_default(key: str, timings: Mapping[str, Timing]) -> str:
    if key in ("alone", "paceline") or "paceline" not in timings:
        return "-"
    default = timings["paceline"].samples
    more, step_s = overhead(timings[key].samples, default), slowest_median(default) / 100
    return f"{more.median / step_s:+.1f} % ({more.low / step_s:+.1f} .. {more.high / step_s:+.1f})"


def _as_data(
    model: str, facts: Mapping[str, list[dict[str, Any]]], timings: Mapping[str, Timing]
) -> list[dict[str, Any]]:
    added = overheads(timings)
    rows = []
    for key, timing in timings.items():
        row: dict[str, Any] = {"model": model, "case": key, "parameters": facts[key][0]["parameters"]}
        row["median_s"] = slowest_median(timing.samples)
        if key in added:
            row["overhead_s"] = vars(added[key])
        rows.append({**row, "iterations": timing.iterations, "samples_s": timing.samples})
    return rows


def _cases(given: argparse.Namespace) -> tuple[Case, ...]:
    check_names("--models", given.models, MODELS[given.framework])
    return CASES[given.framework]


def _cases_of_virtual_ranks(given: argparse.Namespace) -> tuple[Case, ...]:
    check_names("--models", given.models, MODELS["torch"])
    return CASES_OF_VIRTUAL_RANKS


def _add_models_of_virtual_ranks(parser: argparse.ArgumentParser) -> None:
    what = f"of {','.join(MODELS['torch'])} (default {','.join(MODELS_OF_VIRTUAL_RANKS)})"
    parser.add_argument("--models", type=units.listed(str), default=(), metavar="A,B", help=what)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--framework", choices=("torch", "paddle"), default="torch", help="whose models (default torch)")
    add(
        "--models",
        type=units.listed(str),
        default=(),
        metavar="A,B",
        help="of toy,rl,mlp,gpt,cnn, or with paddle toy,rl,deep,mlp (default: all)",
    )
    add("--system-malloc", action="store_true", help="leave malloc alone (default: it keeps freed memory)")


BENCHMARK = Benchmark(
    "time that data parallelism adds to a training step",
    30,
    run,
    _cases,
    _add_arguments,
    lambda given: {} if given.system_malloc else STEADY_MALLOC,
)
OPTIONS = Benchmark(
    "time that find_unused_parameters and static_graph add to a step",
    30,
    run_options,
    lambda given: CASES_OF_OPTIONS,
    environment=lambda given: STEADY_MALLOC,
)
VIRTUAL_RANKS = Benchmark(
    "cost of virtual ranks, compared with micro-batches and no_sync()",
    30,
    run_virtual_ranks,
    _cases_of_virtual_ranks,
    _add_models_of_virtual_ranks,
    environment=lambda given: STEADY_MALLOC,
)
