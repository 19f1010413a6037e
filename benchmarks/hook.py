"""The time that taking each parameter's gradient adds to a backward, without other ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from benchmarks.report import Report
from benchmarks.runner import (
    STEADY_MALLOC,
    Benchmark,
    Case,
    Runner,
    Settings,
    Timing,
    bound,
    no_torch,
    rows_of,
)
from benchmarks.samples import overhead, slowest_median
from paceline.units import format_time

MODEL = "many"
# Many short samples, because the measured overhead is a tenth of a backward.
SAMPLE_S = 0.02


def _case(key: str, label: str, **options: Any) -> Case:
    return Case(key, label, "benchmarks.workers.torch_step:Backward", options, no_torch, bound)


_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
# With one rank, Paceline has hooks only if they must raise on a NaN.
_OURS: dict[str, Any] = {"variant": "paceline", "nonfinite": "raise"}
CASES = (
    _case("alone", "alone", variant="alone"),
    _case("empty", "an empty hook on each parameter", variant="empty"),
    _case("paceline", "Paceline DDP", **_OURS),
    _case("paceline_view", "Paceline DDP, bucket view", **_OURS, **_VIEW),
    _case("torch", "torch DDP on Gloo", variant="torch"),
    _case("torch_view", "torch DDP on Gloo, bucket view", variant="torch", **_VIEW),
    _case("torch_noop", "torch DDP, averaging nothing (its noop_hook)", variant="torch_noop"),
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    with Runner(settings) as runner:
        facts = runner.prepare("a backward", model=MODEL)
        timings = runner.measure("a backward", SAMPLE_S)
    parameters = next((fact[0]["tensors"] for fact in facts.values()), 0)
    return settings.report(
        "hook",
        f"one backward in torch, {parameters} parameters, one rank",
        ["case", "backward", "overhead", "per parameter", "beyond an empty hook"],
        rows_of(runner.cases, timings, 4, lambda key: _cells(key, parameters, timings)),
        notes=[
            f"backward: median of {settings.rounds} rounds. overhead: backward minus backward alone in the "
            "same round, median over rounds; per parameter: divided by their number, with what happens once "
            "in each backward.",
            "It includes taking the gradient, copying it, averaging it over one rank and writing it back. "
            "An empty hook: torch's cost of calling one.",
            *runner.notes(),
        ],
        data={
            "parameters": parameters,
            "rows": [{"case": key, "samples_s": timing.samples} for key, timing in timings.items()],
        },
        is_complete=runner.is_complete,
    )


def _cells(key: str, parameters: int, timings: Mapping[str, Timing]) -> list[str]:
    samples = timings[key].samples
    backward = format_time(slowest_median(samples))
    if key == "alone" or "alone" not in timings:
        return [backward, "-", "-", "-"]
    added = overhead(samples, timings["alone"].samples).median
    cells = [backward, format_time(added), format_time(added / parameters)]
    if key == "empty" or "empty" not in timings:
        return [*cells, "-"]
    return [*cells, format_time(overhead(samples, timings["empty"].samples).median / parameters)]


BENCHMARK = Benchmark(
    "time that taking gradients adds to a backward on one rank",
    300,
    run,
    lambda given: CASES,
    environment=lambda given: STEADY_MALLOC,
    has_ranks=False,
)
