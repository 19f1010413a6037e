"""`make demo`: what data parallelism gives on this machine: how much faster, and the same model.

Trains on handwritten digits in three ways that take turns: N processes with Paceline, one process with all
cores and the same global batches, and N processes with torch's own DistributedDataParallel on Gloo. Prints a
table, bars, and one sentence that says whether it pays here; `--output demo.png` draws them. Ends with exit
status 1 if the replicas differ or the model is not good enough. `make demo-paddle` does the same with
`examples/paddle_digits.py` and paddle.DataParallel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Paddle says a lot when it starts.
QUIET = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore:No ccache found:UserWarning"}
LEAST_ACCURACY = 0.97
LIMIT_S = 300.0
LEAST_ROUNDS = 3
BAR = 40


@dataclass(frozen=True)
class Framework:
    """Which example is run.

    Attributes:
        name: As `--ddp` of the example spells it.
        wrapper: Its own way to train on several processes.
        script: The example.
        options: What the example is given.
        model: What it trains.
        why: Why several processes are faster with it than the threads of one.
        weights: Name of the file that it writes.
    """

    name: str
    wrapper: str
    script: Path
    options: tuple[str, ...]
    model: str
    why: str
    weights: str


FRAMEWORKS = {
    "torch": Framework(
        "torch",
        "torch's DDP",
        Path(__file__).with_name("digits.py"),
        ("--model", "gru", "--batch", "120", "--lr", "0.3", "--epochs", "25"),
        "a GRU that reads handwritten digits row by row",
        "Its operations are many and small: the threads of one process have little to divide among them.",
        "weights.pt",
    ),
    "paddle": Framework(
        "paddle",
        "paddle.DataParallel",
        Path(__file__).with_name("paddle_digits.py"),
        (),
        "a convolutional network for handwritten digits",
        "",
        "weights.npz",
    ),
}


@dataclass(frozen=True)
class Run:
    """What one run of the example gave."""

    accuracy: float
    samples_per_s: float
    replicas_are_identical: bool
    weights: dict[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        title: What people call it.
        ranks: Number of processes.
        options: Further options of the example.
        bind: `--bind` of `paceline run`. Gloo has threads of its own, and the framework's launcher binds
            nothing either, so the incumbent is not bound to cores.
    """

    title: str
    ranks: int
    options: tuple[str, ...] = ()
    bind: str = "auto"


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one way is as another: the median over rounds, the least and the most."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:  # a single round
            return f"{self.median:.2f}x"
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--ranks", type=int, default=min(4, max(2, cores)), help="default: cores, 2 to 4")
    parser.add_argument(
        "--rounds", type=int, default=LEAST_ROUNDS, help="runs of each way (default: %(default)s)"
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the speeds (needs matplotlib)")
    args = parser.parse_args()
    framework = FRAMEWORKS[args.framework]
    ways = ways_of(framework, args.ranks, cores)
    load = os.getloadavg()[0]
    print(f"Trains {framework.model}, {args.rounds} times in each of {len(ways)} ways.\n", flush=True)
    runs = run_all(framework, ways, args.rounds)
    show(framework, ways, runs)
    if load > cores / 2:
        print(
            f"The machine was busy before (load {load:.1f} on {cores} cores), which slows threads of one "
            "process down more than processes of one thread: run it again when the machine is idle."
        )
    if args.output is not None:
        draw(framework, ways, runs, args.output)
    ours = runs[0]
    if not all(each.replicas_are_identical for each in ours):
        print("demo: the replicas differ", file=sys.stderr)
        return 1
    if ours[0].accuracy < LEAST_ACCURACY:
        print(f"demo: test accuracy {ours[0].accuracy:.4f} is below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    return 0


def ways_of(framework: Framework, ranks: int, cores: int) -> tuple[Way, Way, Way]:
    """Ours, one process, and the incumbent."""
    all_cores = f"all {cores} cores" if cores > 1 else "the only core"
    return (
        Way(f"{ranks} processes, Paceline", ranks),
        Way(f"1 process, {all_cores}", 1),
        Way(f"{ranks} processes, {framework.wrapper}", ranks, ("--ddp", framework.name), "none"),
    )


def run_all(framework: Framework, ways: Sequence[Way], rounds: int) -> list[list[Run]]:
    """Run the ways in turns, every other round backwards; what each of them gave, by round."""
    runs: list[list[Run]] = [[] for _ in ways]
    with progress(rounds * len(ways)) as begin:
        for number in range(rounds):
            for at in range(len(ways)) if number % 2 == 0 else reversed(range(len(ways))):
                begin(f"round {number + 1}: {ways[at].title}")
                runs[at].append(run(framework, ways[at]))
                begin("")
    return runs


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal; lines elsewhere. Call the value with what begins, and with "" when it is over."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda text: print(text, flush=True) if text else None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text) if text else bar.advance(task)


def run(framework: Framework, way: Way) -> Run:
    """Run the example with `paceline run`; its output is shown if it fails."""
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        weights, report = Path(folder, framework.weights), Path(folder, "report.json")
        launcher = [sys.executable, "-m", "paceline", "run", "-n", str(way.ranks), "--bind", way.bind]
        files = ["--save", str(weights), "--report", str(report)]
        try:
            ended = subprocess.run(
                [*launcher, str(framework.script), *framework.options, *way.options, *files],
                timeout=LIMIT_S,
                check=False,
                env={**QUIET, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"demo: training took longer than {LIMIT_S:.0f} s") from None
        if ended.returncode:
            print(ended.stdout, file=sys.stderr)  # the launcher has said why
            raise SystemExit(ended.returncode)
        return Run(**json.loads(report.read_text()), weights=load(weights))


def load(path: Path) -> dict[str, np.ndarray]:
    """The weights that an example has saved."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    import torch

    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def ratio(some: Sequence[Run], others: Sequence[Run]) -> Ratio:
    """How many times as fast, round by round: two runs of a round were made within the same seconds."""
    ratios = [a.samples_per_s / b.samples_per_s for a, b in zip(some, others, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def conclusion(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run]]) -> str:
    """Whether data parallelism pays for this model on this machine, and no more than the rounds tell."""
    ours, alone, theirs = runs
    gain, over_theirs = ratio(ours, alone), ratio(ours, theirs)
    ranks = ways[0].ranks
    if len(ours) < LEAST_ROUNDS:
        text = f"Fewer than {LEAST_ROUNDS} rounds tell nothing for sure: --rounds {LEAST_ROUNDS}."
    elif gain.low > 1:
        text = f"It pays here: {ranks} processes train {gain} as fast as one process with all cores. "
        text += framework.why
    elif gain.high < 1:
        text = (
            f"It does not pay here: {ranks} processes reach {gain} of one process with all cores. The cores "
            "may be threads of fewer real ones, or the caches and the memory are shared with other programs."
        )
    else:
        text = (
            f"Whether it pays here can't be told: {ranks} processes reach {gain} of one process with all "
            "cores. Other programs may be running; --rounds 10 tells more."
        )
    if over_theirs.low > 1 and len(ours) >= LEAST_ROUNDS:
        text += f" They train {over_theirs} as fast as with {framework.wrapper}."
    else:
        text += f" Against {framework.wrapper}: {over_theirs}."
    return text.replace("  ", " ") + " `paceline tune train.py` measures your own script."


def same_bits(runs: Sequence[Run]) -> bool:
    """Whether all runs have ended with exactly the same weights."""
    first = runs[0].weights
    return all(each.weights[name].tobytes() == first[name].tobytes() for each in runs[1:] for name in first)


def rows_of(
    framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run]]
) -> list[tuple[str, str]]:
    """The table: what is the same, and how far."""
    ours, alone, theirs = runs
    ranks, one = ways[0].ranks, alone[0].weights
    difference = max(np.abs(ours[0].weights[name] - weights).max() for name, weights in one.items())
    largest = max(np.abs(weights).max() for weights in one.values())
    replicas = all(each.replicas_are_identical for each in ours)
    return [
        *(
            (f"test accuracy: {way.title}", f"{each[0].accuracy:.4f}")
            for way, each in zip(ways, runs, strict=True)
        ),
        (f"all {ranks} replicas have the same bits", "yes" if replicas else "NO"),
        ("every run of Paceline ends with the same bits", "yes" if same_bits(ours) else "no"),
        (f"largest difference of a weight, 1 or {ranks} processes", f"{difference:.1e} of {largest:.2f}"),
        ("speed against 1 process with all cores", str(ratio(ours, alone))),
        (f"speed against {framework.wrapper} on Gloo", str(ratio(ours, theirs))),
    ]


def speeds(runs: Sequence[Sequence[Run]]) -> list[float]:
    """Samples per second of each way: the median over rounds."""
    return [statistics.median(each.samples_per_s for each in of_way) for of_way in runs]


def show(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run]]) -> None:
    """The table, the bars and the sentence."""
    rows = rows_of(framework, ways, runs)
    medians = speeds(runs)
    bars = [
        (way.title, "█" * round(BAR * speed / max(medians)), f"{speed:,.0f}")
        for way, speed in zip(ways, medians)
    ]
    if importlib.util.find_spec("rich") is None:
        for name, value in (*rows, *((name, f"{bar} {speed} samples/s") for name, bar, speed in bars)):
            print(f"{name:<56} {value}")
    else:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        table = Table(framework.model, "", title="Paceline demo", title_justify="left")
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
        console.print(_drawn_bars(bars, medians))
    print(f"\n{conclusion(framework, ways, runs)}")


def _drawn_bars(bars: Sequence[tuple[str, str, str]], medians: Sequence[float]) -> Any:
    """The speeds as bars that are as wide as the terminal has room for."""
    from rich.bar import Bar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(max_width=BAR)
    grid.add_column(justify="right")
    for at, ((name, _, speed), median) in enumerate(zip(bars, medians, strict=True)):
        color = "blue" if at == 0 else "bright_black"
        grid.add_row(name, Bar(max(medians), 0, median, color=color), f"{speed} samples/s")
    return grid


def draw(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run]], path: Path) -> None:
    """The speeds as a picture, with each round as a dot."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"demo: {path} is not drawn: matplotlib is not installed", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    medians = speeds(runs)
    axes.barh(range(len(ways)), medians, color=["#0b5394", "#999999", "#cc4125"])
    for at, of_way in enumerate(runs):
        found = [each.samples_per_s for each in of_way]
        axes.plot(found, [at] * len(found), "o", color="black", markersize=4)
        axes.annotate(
            f"{medians[at]:,.0f}", (max(found), at), xytext=(8, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(ways)), [way.title for way in ways])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.set(title=framework.model, xlabel="samples per second: median, and each round")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"The picture is in {path}.")


if __name__ == "__main__":
    sys.exit(main())
