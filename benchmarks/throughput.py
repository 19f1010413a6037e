"""Samples per second of the same batch, by one process or by several.

`solo` is one rank with the machine to itself. `alone` is all ranks at once without synchronisation: they lose
only what they take from each other (memory bandwidth, shared caches, clock). The other cases also pay for
synchronisation; `Statistics.waited_s` is the waiting in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.job import Launch
from benchmarks.report import Report
from benchmarks.runner import (
    STEADY_MALLOC,
    Benchmark,
    Case,
    Runner,
    Settings,
    Timing,
    bound,
    check_names,
    no_torch,
    rows_of,
    unbound,
)
from benchmarks.samples import Interval, ratio, slowest_by_round, slowest_median
from benchmarks.step import size_of
from paceline import units
from paceline.errors import ConfigError
from paceline.units import format_time

# The number of samples in each model's whole batch, which is divided equally among the ranks.
MODELS = {"rl": 64, "gru": 64, "gpt": 8, "cnn": 32, "mlp-2m": 64, "mlp-4m": 64}
OPTIMIZERS = {"Adam": False, "Adam, fused": True}
SAMPLE_S = 0.1


def cases_for(ranks: int) -> tuple[Case, ...]:
    """Return the cases for this number of ranks."""

    def one(key: str, label: str, launch: Any, processes: int = 0, **options: Any) -> Case:
        target = "benchmarks.workers.torch_training:Training"
        return Case(key, label, target, options, no_torch, launch, processes)

    view = {"gradient_as_bucket_view": True}
    ours: dict[str, Any] = {"wrapper": "paceline"}
    sharded = {**ours, "optimizer": "paceline"}
    shared = {**sharded, "options": {"share_parameters": True}}
    scatter = {**sharded, "options": {"share_parameters": True, "reduce": "scatter"}}
    return (
        one("one", "one process, all cores", unbound, 1),
        one("solo", "one rank by itself", lambda _: _first_of(bound(ranks)), 1, parts=ranks, threads=1),
        one("alone", "the ranks, not synchronised", bound, averages=False),
        one("torch", "torch DDP", unbound, wrapper="torch"),
        one("torch_view", "torch DDP, bucket view", unbound, wrapper="torch", options=view),
        one("zero", "torch DDP, ZeroRedundancyOptimizer", unbound, wrapper="torch", optimizer="zero"),
        one("paceline", "Paceline", bound, **ours),
        one("paceline_sharded", "Paceline, ShardedOptimizer", bound, **sharded),
        one("paceline_shared", "Paceline, one model", bound, **shared),
        one("paceline_scatter", "Paceline, one model, scatter", bound, **scatter),
    )


def _first_of(launch: Launch) -> Launch:
    return Launch(cores=launch.cores[:1])


class Speed(NamedTuple):
    """Samples per second of one case: the median over rounds, and the slowest and the fastest round."""

    median: float
    low: float
    high: float


def speed(timing: Timing, samples: int) -> Speed:
    """Return the throughput of all ranks, which the slowest rank determines.

    Args:
        timing: Seconds per step.
        samples: Number of samples in one step of all ranks together.

    Example:
        Two ranks that take 0.1 s in one round, and 0.1 and 0.2 s in the next, for 64 samples: 640 and 320.
    """
    seconds = slowest_by_round(timing.samples)
    return Speed(samples / slowest_median(timing.samples), samples / max(seconds), samples / min(seconds))


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    models = given.models or list(MODELS)
    ranks = settings.ranks
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    with Runner(settings) as runner:
        for model in models:
            for optimizer, fused in OPTIMIZERS.items():
                during = f"{model}, {optimizer}"
                facts = runner.prepare(during, model=model, fused=fused)
                runner.take_out_unequal(facts, "parameters")
                timings = runner.measure(during, SAMPLE_S)
                parts = runner.on_all("parts_of_step", during)
                measured = Measured(MODELS[model], ranks, timings, parts)
                heading = f"{during}{size_of(facts)}"
                rows += [*rows_of(runner.cases, timings, 9, measured.cells, heading), []]
                data += measured.as_data(model, optimizer)
    batches = ", ".join(f"{model} {MODELS[model]}" for model in models)
    return settings.report(
        "throughput",
        f"samples per second of the same batch, one process and {ranks} ranks on one host",
        [
            "model",
            "case",
            "samples/s",
            "slowest .. fastest round",
            "/ one process",
            "95 % interval",
            "/ torch DDP",
            "of N times",
            "step",
            "optimizer",
            "waits",
        ],
        rows,
        notes=[
            f"samples/s: of the whole batch ({batches}), which the ranks share; median of "
            f"{settings.rounds} rounds, as fast as the slowest rank. / one process, / torch DDP: divided "
            "round by round, median over rounds.",
            f"of N times: relative to {ranks} times the speed of a rank by itself, which has its part of the "
            "batch, one core, and the machine to itself. 'The ranks, not synchronised' lose what they take "
            "from each other: memory bandwidth, shared caches, clock.",
            "optimizer: time per step in the optimizer, the slowest rank's mean, including the waiting of "
            "sharded optimizers. waits: for other ranks at the end of backward, mean of all ranks, by "
            "ddp.stats().",
            "Before timing, three steps were compared with a training by one process that takes each rank's "
            "part in turn, and the parameters between ranks.",
            "Ranks have one thread for each of their cores; malloc keeps freed memory in all of them.",
            *runner.notes(),
        ],
        data={"rows": data},
        is_complete=runner.is_complete,
        text_columns=2,
    )


class Measured(NamedTuple):
    """The measurements of one model with one optimizer."""

    samples: int
    ranks: int
    timings: Mapping[str, Timing]
    parts: Mapping[str, list[dict[str, float | None]]]

    def samples_of(self, key: str) -> int:
        """Return the samples of one step in this case: a rank by itself has only its part of the batch."""
        return self.samples // self.ranks if key == "solo" else self.samples

    def faster(self, key: str, than: str) -> Interval | None:
        """Return how many times as fast as another case this one is; None: the other was not measured."""
        if than not in self.timings:
            return None
        times = ratio(self.timings[than].samples, self.timings[key].samples)
        factor = self.samples_of(key) / self.samples_of(than)
        return Interval(*(factor * value for value in (times.median, times.low, times.high)))

    def of_ideal(self, key: str) -> float | None:
        """Return the throughput, divided by `ranks` times that of a rank by itself."""
        times = self.faster(key, "solo")
        return None if times is None else times.median / self.ranks

    def optimizer_s(self, key: str) -> float:
        """Return the slowest rank's seconds per step in the optimizer."""
        return max(each["optimizer_s"] or 0.0 for each in self.parts[key])

    def waited_s(self, key: str) -> float | None:
        """Return the seconds per step of waiting for other ranks, as the mean over ranks; None: unknown."""
        known = [each["waited_s"] for each in self.parts[key] if each["waited_s"] is not None]
        return sum(known) / len(known) if known else None

    def cells(self, key: str) -> list[str]:
        """Return the row of a case."""
        timing = self.timings[key]
        found = speed(timing, self.samples_of(key))
        is_part = key == "solo"
        one = None if is_part or key == "one" else self.faster(key, "one")
        torch = None if is_part or key in ("alone", "torch") else self.faster(key, "torch")
        ideal, waited_s = self.of_ideal(key), self.waited_s(key)
        return [
            _count(found.median),
            f"{_count(found.low)} .. {_count(found.high)}",
            "-" if one is None else f"{one.median:.2f}",
            "-" if one is None else f"{one.low:.2f} .. {one.high:.2f}",
            "-" if torch is None else f"{torch.median:.2f}",
            "-" if ideal is None or is_part else f"{100 * ideal:.0f} %",
            format_time(slowest_median(timing.samples)),
            format_time(self.optimizer_s(key)),
            "-" if waited_s is None else format_time(waited_s),
        ]

    def as_data(self, model: str, optimizer: str) -> list[dict[str, Any]]:
        """Return plain values for JSON."""
        return [
            {
                "model": model,
                "optimizer": optimizer,
                "case": key,
                "batch": self.samples_of(key),
                "samples_per_s": speed(timing, self.samples_of(key))._asdict(),
                "of_ideal": self.of_ideal(key),
                "optimizer_s": self.optimizer_s(key),
                "waited_s": self.waited_s(key),
                "iterations": timing.iterations,
                "samples_s": timing.samples,
            }
            for key, timing in self.timings.items()
        ]


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _cases(given: argparse.Namespace) -> Sequence[Case]:
    check_names("--models", given.models, list(MODELS))
    uneven = [f"{each}: {MODELS[each]}" for each in given.models or MODELS if MODELS[each] % given.ranks]
    if uneven:
        raise ConfigError(
            f"--ranks {given.ranks}: a batch cannot be cut into equal parts for so many ranks.",
            seen="samples of a batch: " + ", ".join(uneven),
        )
    return cases_for(given.ranks)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        type=units.listed(str),
        default=(),
        metavar="A,B",
        help="of rl,gru,gpt,cnn,mlp-2m,mlp-4m (default: all, which takes some minutes)",
    )


BENCHMARK = Benchmark(
    "samples per second of the same batch, by one process with all cores and by several ranks",
    15,
    run,
    _cases,
    _add_arguments,
    lambda given: STEADY_MALLOC,
)
