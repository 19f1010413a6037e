"""`make demo`: shows how much faster data parallelism is on this machine, and that the model is the same.

Trains on handwritten digits with three variants that take turns: N processes with Paceline, one process with
all cores and the same global batches, and N processes with torch's own DistributedDataParallel on Gloo.
Prints a table, bars, and one sentence that says whether it is faster here; `--output demo.png` draws them. On
a busy machine it trains for fewer epochs, says so, and shows what it could measure. The exit status is 1 if
the replicas differ or the accuracy is too low. `make demo-paddle` does the same with
`examples/paddle_digits.py` and paddle.DataParallel.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Paddle prints many lines when it starts.
QUIET = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore:No ccache found:UserWarning"}
LEAST_ACCURACY = 0.97
LIMIT_S = 900.0
"""The time limit of all runs together in seconds. The output names the runs that it cut off."""
LEAST_ROUNDS = 3
BAR = 40
NOT_MEASURED = "could not be measured"


@dataclass(frozen=True)
class Framework:
    """A framework and its example.

    Attributes:
        name: Its value for the example's `--ddp`.
        wrapper: The framework's own wrapper for several processes.
        script: The example.
        options: Options of the example.
        epochs: Number of epochs.
        fewest: Number of epochs on a busy machine.
        model: Description of the model.
        why: Why several processes are faster here than the threads of one process.
        weights: Name of the file that the example writes.
    """

    name: str
    wrapper: str
    script: Path
    options: tuple[str, ...]
    epochs: int
    fewest: int
    model: str
    why: str
    weights: str


FRAMEWORKS = {
    "torch": Framework(
        "torch",
        "torch's DDP",
        Path(__file__).with_name("digits.py"),
        ("--model", "gru", "--batch", "120", "--lr", "0.3"),
        25,
        8,
        "a GRU that reads handwritten digits row by row",
        "Its operations are many and small: the threads of one process have little to divide among them.",
        "weights.pt",
    ),
    "paddle": Framework(
        "paddle",
        "paddle.DataParallel",
        Path(__file__).with_name("paddle_digits.py"),
        (),
        15,
        5,
        "a convolutional network for handwritten digits",
        "",
        "weights.npz",
    ),
}


@dataclass(frozen=True)
class Run:
    """The result of one run of the example."""

    accuracy: float
    samples_per_s: float
    replicas_are_identical: bool
    weights: dict[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """One variant of the training.

    Attributes:
        title: Name in the output.
        ranks: Number of processes.
        options: Further options of the example.
        bind: `--bind` of `paceline run`. The incumbent is not bound to cores, because Gloo has threads of its
            own, and the framework's launcher does not bind either.
        is_incumbent: Whether it is the framework's own. A crash of it is reported, but is no error.
    """

    title: str
    ranks: int
    options: tuple[str, ...] = ()
    bind: str = "auto"
    is_incumbent: bool = False


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one variant is as another: median, minimum and maximum over rounds."""

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
        "--rounds", type=int, default=LEAST_ROUNDS, help="runs of each variant (default: %(default)s)"
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="draw the speeds (needs matplotlib)")
    args = parser.parse_args()
    framework = FRAMEWORKS[args.framework]
    ways = ways_of(framework, args.ranks, cores)
    rounds, epochs = args.rounds, framework.epochs
    others = other_programs()
    if others >= cores:
        rounds, epochs = 1, framework.fewest
        print(
            f"The machine is busy: {others:.0f} other threads want its {cores} cores. So there is one round, "
            f"of {epochs} epochs instead of {framework.epochs}, which may take minutes."
        )
    often = "once" if rounds == 1 else f"{rounds} times"
    print(f"Trains {framework.model}, {often} in each of {len(ways)} ways.\n", flush=True)
    runs = run_all(framework, ways, rounds, epochs)
    show(framework, ways, runs)
    if others > cores / 2:
        print(
            f"The machine was busy before ({others:.0f} threads on {cores} cores), which slows threads of "
            "one process down more than processes of one thread: run it again when the machine is idle."
        )
    if args.output is not None:
        draw(framework, ways, runs, args.output)
    ours = measured(runs[0])
    if not all(each.replicas_are_identical for each in ours):
        print("demo: the replicas differ", file=sys.stderr)
        return 1
    if epochs == framework.epochs and ours and ours[0].accuracy < LEAST_ACCURACY:
        print(f"demo: test accuracy {ours[0].accuracy:.4f} is below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    return 0


def other_programs() -> float:
    """Return how many threads of other programs want a core now, as the mean over half a second.

    The load average would not do, because it is high for a minute after `make` has built something.
    """
    found = []
    try:
        for _ in range(25):
            found.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return statistics.mean(found)


def ways_of(framework: Framework, ranks: int, cores: int) -> tuple[Way, Way, Way]:
    """Return the variants: Paceline, one process, and the incumbent."""
    all_cores = f"all {cores} cores" if cores > 1 else "the only core"
    return (
        Way(f"{ranks} processes, Paceline", ranks),
        Way(f"1 process, {all_cores}", 1),
        Way(f"{ranks} processes, {framework.wrapper}", ranks, ("--ddp", framework.name), "none", True),
    )


def run_all(framework: Framework, ways: Sequence[Way], rounds: int, epochs: int) -> list[list[Run | None]]:
    """Run the variants in turn, every other round in reverse; return the results of each variant by round."""
    runs: list[list[Run | None]] = [[] for _ in ways]
    until_s = time.monotonic() + LIMIT_S
    began_s, length_s = time.monotonic(), 0.0
    with progress(rounds * len(ways)) as begin:
        for number in range(rounds):
            if time.monotonic() + length_s > until_s:
                begin(f"There is no time for more than {number} of {rounds} rounds: the machine is slow.")
                break
            for count, at in enumerate(range(len(ways)) if number % 2 == 0 else reversed(range(len(ways)))):
                name = f"round {number + 1}: {ways[at].title}"
                begin(name)
                limit_s = (until_s - time.monotonic()) / (len(ways) - count)
                runs[at].append(try_to_run(framework, ways[at], epochs, limit_s, name, begin))
                begin("")
            length_s = (time.monotonic() - began_s) / (number + 1)
    return runs


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on a terminal, lines elsewhere.

    Yields a function to call with a text at the beginning of a run, and with "" at its end.
    """
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda text: print(text, flush=True) if text else None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, description=text) if text else bar.advance(task)


def try_to_run(
    framework: Framework, way: Way, epochs: int, limit_s: float, name: str, show_line: Callable[[str], None]
) -> Run | None:
    """Run the example, again if the incumbent crashes. None: it could not be measured, and a line says why.

    Args:
        framework: The framework and its example.
        way: The variant to run.
        epochs: Number of epochs.
        limit_s: Time limit in seconds.
        name: Name of the run in the output.
        show_line: Shows a line.
    """
    until_s = time.monotonic() + limit_s
    for _ in range(2):
        ended = run(framework, way, epochs, until_s, name, show_line)
        if ended.run is not None and (not ended.status or way.is_incumbent):
            if ended.status:
                show_line(f"{name}: trained, and its process then crashed ({ended.why})")
            return ended.run
        if ended.is_late:
            show_line(f"{name}: {NOT_MEASURED} within {limit_s:.0f} s; this machine is too busy")
            return None
        if not way.is_incumbent:
            print(ended.output, file=sys.stderr)  # contains the launcher's error
            raise SystemExit(ended.status or 1)
        show_line(f"{name}: crashed ({ended.why})")
    return None


@dataclass(frozen=True)
class Ended:
    """The end of a run of the example.

    Attributes:
        run: The result that it has written; None: nothing, or only a part.
        status: Its exit status.
        is_late: Whether it reached the time limit.
        output: All of its output.
    """

    run: Run | None
    status: int
    is_late: bool
    output: str

    @property
    def why(self) -> str:
        """The launcher's last line about a crash."""
        found = re.findall(r"^paceline: .* failed.*?\(pid \d+\): (.+)$", self.output, re.MULTILINE)
        return found[-1] if found else f"exit status {self.status}"


def run(
    framework: Framework, way: Way, epochs: int, until_s: float, name: str, show_line: Callable[[str], None]
) -> Ended:
    """Run the example with `paceline run`, and show its epochs."""
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        weights, report = Path(folder, framework.weights), Path(folder, "report.json")
        launcher = [sys.executable, "-m", "paceline", "run", "-n", str(way.ranks), "--bind", way.bind]
        options = [*framework.options, "--epochs", str(epochs), *way.options]
        files = ["--save", str(weights), "--report", str(report)]
        process = subprocess.Popen(
            [*launcher, str(framework.script), *options, *files],
            env={**QUIET, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            process.kill()  # the processes that it has started end with it

        alarm = threading.Timer(max(0.0, until_s - time.monotonic()), stop)
        alarm.start()
        with process:
            try:
                output = follow(process, epochs, name, show_line)
                status = process.wait()
            finally:
                alarm.cancel()
                process.kill()
        return Ended(result_of(report, weights), status, is_late.is_set(), output)


def follow(process: subprocess.Popen[str], epochs: int, name: str, show_line: Callable[[str], None]) -> str:
    """Show the epochs of a process until it ends; return its output."""
    output: list[str] = []
    shown_s = time.monotonic()
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        epoch = re.search(r"step \d+ of \d+, epoch (\d+)", line)
        if epoch is not None and time.monotonic() - shown_s > 4:
            shown_s = time.monotonic()
            show_line(f"{name}: epoch {epoch[1]} of {epochs}")
    return "".join(output)


def result_of(report: Path, weights: Path) -> Run | None:
    """Return the result that a run has written; None: it has not written all of it."""
    try:
        return Run(**json.loads(report.read_text()), weights=load(weights))
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, zipfile.BadZipFile):
        return None


def measured(runs: Sequence[Run | None]) -> list[Run]:
    """Return the runs of a variant that could be measured."""
    return [each for each in runs if each is not None]


def load(path: Path) -> dict[str, np.ndarray]:
    """Load the weights that an example has saved."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    import torch

    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def ratio(some: Sequence[Run | None], others: Sequence[Run | None]) -> Ratio | None:
    """Return the ratio of speeds, round by round, because the runs of a round share the machine's load.

    None: no round has both.
    """
    ratios = [
        a.samples_per_s / b.samples_per_s
        for a, b in zip(some, others, strict=True)
        if a is not None and b is not None and b.samples_per_s
    ]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def conclusion(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run | None]]) -> str:
    """Say whether data parallelism is faster for this model on this machine, as far as the rounds show it."""
    ours, alone, theirs = runs
    gain, over_theirs = ratio(ours, alone), ratio(ours, theirs)
    ranks = ways[0].ranks
    if gain is None:
        text = f"Whether it is faster here {NOT_MEASURED}: other programs leave this machine too little time."
    elif len(ours) < LEAST_ROUNDS:
        text = f"Fewer than {LEAST_ROUNDS} rounds tell nothing for sure: add ARGS='--rounds {LEAST_ROUNDS}'."
    elif gain.low > 1:
        text = f"It is faster here: {ranks} processes train {gain} as fast as one process with all cores. "
        text += framework.why
    elif gain.high < 1:
        text = (
            f"It does not pay here: {ranks} processes reach {gain} of one process with all cores. The cores "
            "may be threads of fewer real ones, or the caches and the memory are shared with other programs."
        )
    else:
        text = (
            f"Whether it is faster here can't be told: {ranks} processes reach {gain} of one process with "
            "all cores. Other programs may be running; --rounds 10 tells more."
        )
    if over_theirs is not None and over_theirs.low > 1 and len(ours) >= LEAST_ROUNDS:
        text += f" They train {over_theirs} as fast as with {framework.wrapper}."
    else:
        text += f" Against {framework.wrapper}: {over_theirs or NOT_MEASURED}."
    return text.replace("  ", " ") + f" `{installed_command()} tune train.py` measures your own script."


def installed_command() -> str:
    """Return what to type for the command `paceline` of this environment, which need not be activated."""
    name = "paceline"
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) == str(path) or not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def same_bits(runs: Sequence[Run]) -> bool:
    """Return whether all runs have ended with exactly the same weights."""
    first = runs[0].weights
    return all(each.weights[name].tobytes() == first[name].tobytes() for each in runs[1:] for name in first)


def rows_of(
    framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run | None]]
) -> list[tuple[str, str]]:
    """Return the rows of the table: accuracies, differences between weights, and ratios of speeds."""
    ranks = ways[0].ranks
    ours, alone = measured(runs[0]), measured(runs[1])
    firsts = [next(iter(measured(of_way)), None) for of_way in runs]
    replicas = "yes" if all(each.replicas_are_identical for each in ours) else "NO"
    difference = NOT_MEASURED
    if ours and alone:
        one = alone[0].weights
        furthest = max(np.abs(ours[0].weights[name] - weights).max() for name, weights in one.items())
        difference = f"{furthest:.1e} of {max(np.abs(weights).max() for weights in one.values()):.2f}"
    return [
        *(
            (f"test accuracy: {way.title}", NOT_MEASURED if first is None else f"{first.accuracy:.4f}")
            for way, first in zip(ways, firsts, strict=True)
        ),
        (f"all {ranks} replicas have the same bits", replicas if ours else NOT_MEASURED),
        (
            "every run of Paceline ends with the same bits",
            ("yes" if same_bits(ours) else "no") if ours else NOT_MEASURED,
        ),
        (f"largest difference of a weight, 1 or {ranks} processes", difference),
        ("speed against 1 process with all cores", str(ratio(runs[0], runs[1]) or NOT_MEASURED)),
        (f"speed against {framework.wrapper} on Gloo", str(ratio(runs[0], runs[2]) or NOT_MEASURED)),
    ]


def speeds(runs: Sequence[Sequence[Run | None]]) -> list[float]:
    """Return the samples per second of each variant, as the median over rounds; 0: not measured."""
    return [statistics.median([each.samples_per_s for each in measured(of_way)] or [0.0]) for of_way in runs]


def show(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run | None]]) -> None:
    """Print the table, the bars and the sentence."""
    rows = rows_of(framework, ways, runs)
    medians = speeds(runs)
    bars = [
        (
            way.title,
            "█" * round(BAR * speed / max(*medians, 1.0)),
            f"{speed:,.0f} samples/s" if speed else NOT_MEASURED,
        )
        for way, speed in zip(ways, medians)
    ]
    if importlib.util.find_spec("rich") is None:
        for name, value in (*rows, *((name, f"{bar} {speed}") for name, bar, speed in bars)):
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
    """Return the speeds as bars that fit the terminal."""
    from rich.bar import Bar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(max_width=BAR)
    grid.add_column(justify="right")
    for at, ((name, _, speed), median) in enumerate(zip(bars, medians, strict=True)):
        color = "blue" if at == 0 else "bright_black"
        grid.add_row(name, Bar(max(*medians, 1.0), 0, median, color=color), speed)
    return grid


def draw(framework: Framework, ways: Sequence[Way], runs: Sequence[Sequence[Run | None]], path: Path) -> None:
    """Draw the speeds as a picture, with each round as a dot."""
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
        found = [each.samples_per_s for each in measured(of_way)] or [0.0]
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
