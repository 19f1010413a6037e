"""The time that recording its backwards adds to a training step.

The same processes take all samples, with and without a recording in turn, because two processes differ by
more than the cost of a recording.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.report import Report
from benchmarks.runner import (
    STEADY_MALLOC,
    Benchmark,
    Case,
    Runner,
    Settings,
    bound,
    check_names,
    no_torch,
)
from benchmarks.samples import iterations_for, overhead, slowest_median
from paceline import units
from paceline.units import format_time

MODELS = ("toy", "rl", "mlp", "gpt", "cnn")
RECORDINGS = {
    "off": "no recording",
    "flight": "the flight recorder, as in each job of `paceline run`",
    "trace": "all, as with `--trace`",
}
_TARGET = "benchmarks.workers.torch_step:RecordedStep"
CASES = (Case("paceline", "Paceline DDP", _TARGET, {"variant": "paceline"}, no_torch, bound),)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    totals_s: dict[str, list[float]] = {}
    with Runner(settings) as runner:
        for model in given.models or MODELS:
            runner.prepare(model, model=model)
            _check(runner, model)
            samples = _measure(runner, model, settings, given.sample_s)
            totals = runner.on_all("time_totals", model, iterations=20).get("paceline", [])
            if samples and totals:
                rows += [*_rows(model, samples, max(totals)), []]
                data += [
                    {"model": model, "recording": key, "samples_s": each} for key, each in samples.items()
                ]
                totals_s[model] = totals
    return settings.report(
        "trace",
        f"one training step with and without a recording, {settings.ranks} ranks on one host",
        ["model", "recording", "step", "more", "part of the step, with the 95 % interval"],
        rows,
        notes=[
            f"step: median of {settings.rounds} rounds of {given.sample_s:g} s on each rank, then the "
            "slowest rank. more: the difference to no recording in the same round, median over rounds, plus "
            "the step's part of what is written once a second, which is measured separately.",
            "The same processes take the samples of all three, in turn. With --trace, the optimizer's step "
            "and a batch are recorded, too.",
            "Gradients were checked before timing: close to the mean as computed on one process, and the "
            "same bits on all ranks and with each kind of recording.",
            *runner.notes(),
        ],
        data={"rows": data, "totals_s": totals_s},
        is_complete=runner.is_complete and bool(rows),
        text_columns=2,
    )


def _check(runner: Runner, model: str) -> None:
    """Remove the case unless all kinds of recording give the same gradients on all ranks."""
    for key, each in runner.on_all("digests", model, recordings=list(RECORDINGS)).items():
        if len({digest for digests in each for digest in digests.values()}) > 1:
            runner.take_out(key, f"{model}: gradients differ between ranks, or with a recording")


def _measure(runner: Runner, model: str, settings: Settings, sample_s: float) -> dict[str, list[list[float]]]:
    """Return the seconds per step for each kind of recording, as `[rank][round]`; empty: it failed."""

    def sample(key: str, iterations: int) -> list[float]:
        taken = runner.on_all("time_in", model, recording=key, iterations=iterations).get("paceline", [])
        return [seconds / iterations for seconds in taken]

    iterations = 3
    for _ in range(3):  # the first steps are slow
        if not (taken := sample("off", iterations)):
            return {}
        iterations = iterations_for(max(taken), sample_s, 1_000_000)
    rounds: dict[str, list[list[float]]] = {key: [] for key in RECORDINGS}
    for number in range(settings.rounds):
        settings.show(f"{model}: round {number + 1} of {settings.rounds}")
        for key in RECORDINGS if number % 2 == 0 else reversed(RECORDINGS):
            if not (taken := sample(key, iterations)):
                return {}
            rounds[key].append(taken)
    return {key: [list(rank) for rank in zip(*each, strict=True)] for key, each in rounds.items()}


def _rows(model: str, samples: dict[str, list[list[float]]], totals_s: float) -> list[list[str]]:
    off = samples["off"]
    step_s = slowest_median(off)
    of_totals_s = totals_s * step_s  # once in a second
    rows = [[model, RECORDINGS["off"], format_time(step_s), "-", "-"]]
    for key in ("flight", "trace"):
        more, percent = overhead(samples[key], off), step_s / 100
        parts = [(each + of_totals_s) / percent for each in (more.median, more.low, more.high)]
        rows.append(
            [
                "",
                RECORDINGS[key],
                format_time(slowest_median(samples[key])),
                format_time(more.median + of_totals_s),
                "{:+.2f} % ({:+.2f} .. {:+.2f})".format(*parts),
            ]
        )
    return rows


def _cases(given: argparse.Namespace) -> tuple[Case, ...]:
    check_names("--models", given.models, MODELS)
    return CASES


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = "of toy,rl,mlp,gpt,cnn (default: all)"
    add("--models", type=units.listed(str), default=(), metavar="A,B", help=models)
    add(
        "--sample-s",
        type=units.positive("seconds"),
        default=0.03,
        metavar="S",
        help="seconds of a sample (default 0.03: many short ones separate small differences from noise)",
    )


BENCHMARK = Benchmark(
    "time that recording its backwards adds to a training step",
    200,
    run,
    _cases,
    _add_arguments,
    lambda given: STEADY_MALLOC,
    has_starts=False,
)
