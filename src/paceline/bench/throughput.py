"""`paceline bench throughput`: samples per second of the same batch, by one process or by several.

One idea: the way from one rank to N times one rank is a ladder of which every rung is measured. `solo` is a
rank with the machine to itself; `alone` are all ranks at once that do not train together, and so lose only
what they take from each other (memory bandwidth, shared caches, clock); the ways that train together lose
what synchronising costs on top, of which `Statistics.waited_s` says how much is waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.bench.conductor import Launch
from paceline.bench.contest import Contest, Entry, Plan, Timing, bound, changes, no_torch, unbound
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import Interval, ratio, slowest_by_round, slowest_median
from paceline.bench.step import STEADY_MALLOC
from paceline.bench.units import format_time
from paceline.errors import ConfigError

# The samples of each model's whole batch; every rank gets as many of them.
MODELS = {"rl": 64, "gru": 64, "gpt": 8, "cnn": 32, "mlp-2m": 64, "mlp-4m": 64}
VARIANTS = {"Adam": False, "Adam, fused": True}
SAMPLE_S = 0.1
ENVIRONMENT = STEADY_MALLOC


def entries(ranks: int) -> tuple[Entry, ...]:
    """The contenders, for so many ranks."""

    def one(key: str, label: str, launch: Any, processes: int = 0, **options: Any) -> Entry:
        target = "paceline.torch.bench.throughput:Training"
        return Entry(key, label, target, options, no_torch, launch, processes)

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
    """Samples per second of one way: the median over rounds, and the slowest and the fastest round."""

    median: float
    low: float
    high: float


def speed(timing: Timing, samples: int) -> Speed:
    """How fast a way is whose slowest rank decides.

    Args:
        timing: Seconds of a step.
        samples: What all ranks together handle in one step.

    Example:
        Two ranks that take 0.1 s in one round, and 0.1 and 0.2 s in the next, for 64 samples: 640 and 320.
    """
    seconds = slowest_by_round(timing.samples)
    return Speed(samples / slowest_median(timing.samples), samples / max(seconds), samples / min(seconds))


def run(plan: Plan, models: Sequence[str]) -> Report:
    """Measure and report; see the command's help for the arguments."""
    uneven = [f"{model}: {MODELS[model]}" for model in models if MODELS[model] % plan.ranks]
    if uneven:
        raise ConfigError(
            f"--ranks {plan.ranks}: a batch cannot be cut into equal parts for so many ranks.",
            seen="samples of a batch: " + ", ".join(uneven),
        )
    machine = Machine.here()
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    changed: list[str] = []
    with plan.contest(entries(plan.ranks)) as contest:
        for model in models:
            for variant, fused in VARIANTS.items():
                during = f"{model}, {variant}"
                plan.say(f"{during}: checking steps")
                facts = contest.prepare(during, model=model, fused=fused)
                _check_replicas(contest, facts)
                timings = contest.measure(during, plan.rounds, SAMPLE_S)
                shares = contest.on_all("shares", during)
                measured = _Measured(MODELS[model], plan.ranks, timings, shares)
                rows += [*_rows(contest, f"{during}{_size_of(facts)}", measured), []]
                changed += changes(contest, during, timings)
                data += _as_data(model, variant, measured)
    return Report(
        theme="throughput",
        title=f"samples per second of the same batch, one process and {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=[
            "model",
            "way",
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
        rows=rows,
        notes=[
            f"samples/s: of the whole batch ({_batches(models)}), which the ranks share; median of "
            f"{plan.rounds} rounds, as fast as the slowest rank. / one process, / torch DDP: divided round "
            "by round, median over rounds.",
            f"of N times: of {plan.ranks} times a rank by itself, which has a part of the batch, one core, "
            "and the machine to itself. What 'the ranks, not synchronised' lack of it, they take from each "
            "other: memory bandwidth, shared caches, clock.",
            "optimizer: of a step, the slowest rank's mean, with the waiting of those that share the step. "
            "waits: for other ranks at the end of backward, mean of all ranks, as ddp.stats() says.",
            "Before timing, three steps were compared with a training by one process that takes each rank's "
            "part in turn, and the parameters between ranks.",
            "Ranks have one thread for each core that they have; malloc keeps freed memory in all of them.",
            *changed,
            *plan.notes(contest),
        ],
        data={"ranks": plan.ranks, "rounds": plan.rounds, "rows": data},
        is_complete=not contest.ours_failed,
        text_columns=2,
    )


class _Measured(NamedTuple):
    """What was measured of one model and one optimizer."""

    samples: int
    ranks: int
    timings: dict[str, Timing]
    shares: dict[str, list[dict[str, float | None]]]

    def handled(self, key: str) -> int:
        """Samples of one step of this way: a rank by itself has its part only."""
        return self.samples // self.ranks if key == "solo" else self.samples

    def faster(self, key: str, than: str) -> Interval | None:
        """How many times as fast as another way; None: one of them was not measured."""
        if than not in self.timings:
            return None
        times = ratio(self.timings[than].samples, self.timings[key].samples)
        factor = self.handled(key) / self.handled(than)
        return Interval(*(factor * value for value in (times.median, times.low, times.high)))

    def of_ideal(self, key: str) -> float | None:
        """What is reached of as many times a rank by itself as there are ranks."""
        times = self.faster(key, "solo")
        return None if times is None else times.median / self.ranks

    def optimizer_s(self, key: str) -> float:
        return max(share["optimizer_s"] or 0.0 for share in self.shares[key])

    def waited_s(self, key: str) -> float | None:
        waited = [share["waited_s"] for share in self.shares[key]]
        known = [seconds for seconds in waited if seconds is not None]
        return sum(known) / len(known) if known else None


def _check_replicas(contest: Contest, facts: dict[str, list[dict[str, Any]]]) -> None:
    """Take out whoever has other parameters on other ranks (`alone` has, by intent)."""
    for contender in contest.contenders:
        digests = {fact["digest"] for fact in facts.get(contender.entry.key, [])}
        if len(digests) > 1 and contender.entry.key != "alone":
            contender.take_out("parameters differ between ranks")


def _size_of(facts: dict[str, list[dict[str, Any]]]) -> str:
    if not facts:
        return ""
    count = next(iter(facts.values()))[0]["parameters"]
    return f", {count / 1e6:.1f} M parameters" if count >= 1e6 else f", {count / 1e3:.0f} k parameters"


def _batches(models: Sequence[str]) -> str:
    return ", ".join(f"{model} {MODELS[model]}" for model in models)


def _rows(contest: Contest, heading: str, measured: _Measured) -> list[list[str]]:
    rows: list[list[str]] = []
    for contender in contest.contenders:
        key = contender.entry.key
        cells = [heading if not rows else "", contender.entry.label]
        rows.append([*cells, *(_cells(key, measured) if key in measured.timings else ["failed", *["-"] * 8])])
    return rows


def _cells(key: str, measured: _Measured) -> list[str]:
    timing = measured.timings[key]
    found = speed(timing, measured.handled(key))
    is_part = key == "solo"
    one = None if is_part or key == "one" else measured.faster(key, "one")
    torch = None if is_part or key in ("alone", "torch") else measured.faster(key, "torch")
    ideal = measured.of_ideal(key)
    waited_s = measured.waited_s(key)
    return [
        _count(found.median),
        f"{_count(found.low)} .. {_count(found.high)}",
        "-" if one is None else f"{one.median:.2f}",
        "-" if one is None else f"{one.low:.2f} .. {one.high:.2f}",
        "-" if torch is None else f"{torch.median:.2f}",
        "-" if ideal is None or is_part else f"{100 * ideal:.0f} %",
        format_time(slowest_median(timing.samples)),
        format_time(measured.optimizer_s(key)),
        "-" if waited_s is None else format_time(waited_s),
    ]


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _as_data(model: str, variant: str, measured: _Measured) -> list[dict[str, Any]]:
    return [
        {
            "model": model,
            "variant": variant,
            "way": key,
            "batch": measured.handled(key),
            "samples_per_s": speed(timing, measured.handled(key))._asdict(),
            "of_ideal": measured.of_ideal(key),
            "optimizer_s": measured.optimizer_s(key),
            "waited_s": measured.waited_s(key),
            "iterations": timing.iterations,
            "samples_s": timing.samples,
        }
        for key, timing in measured.timings.items()
    ]
