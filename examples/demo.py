"""`make demo`: trains digits on several processes and shows that nothing is lost and time is won.

Runs `examples/digits.py` with `paceline run` on N processes, then on one with the same global batches, then
on N with torch's own DistributedDataParallel on Gloo, and compares. Ends with exit status 1 if the replicas
differ or the model is not good enough. `make demo-paddle` does the same with `examples/paddle_digits.py` and
paddle.DataParallel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Paddle says a lot when it starts.
QUIET = {"GLOG_minloglevel": "2", "PYTHONWARNINGS": "ignore:No ccache found:UserWarning"}
LEAST_ACCURACY = 0.97
LIMIT_S = 300.0


@dataclass(frozen=True)
class Framework:
    """Which example is run.

    Attributes:
        name: As `--ddp` of the example spells it.
        wrapper: Its own way to train on several processes.
        script: The example.
        weights: Name of the file that it writes.
    """

    name: str
    wrapper: str
    script: Path
    weights: str


FRAMEWORKS = {
    "torch": Framework("torch", "torch's DDP", Path(__file__).with_name("digits.py"), "weights.pt"),
    "paddle": Framework(
        "paddle", "paddle.DataParallel", Path(__file__).with_name("paddle_digits.py"), "weights.npz"
    ),
}


@dataclass(frozen=True)
class Run:
    """What one run of the example gave."""

    accuracy: float
    samples_per_s: float
    replicas_are_identical: bool
    weights: dict[str, np.ndarray]


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--ranks", type=int, default=min(4, max(2, cores)), help="default: cores, 2 to 4")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch")
    args = parser.parse_args()
    framework = FRAMEWORKS[args.framework]
    several = run(framework, f"{args.ranks} processes, Paceline", args.ranks, args.epochs, [])
    alone = run(framework, "1 process, the same global batches", 1, args.epochs, [])
    # Not bound to cores: Gloo has threads of its own, and the framework's launcher binds nothing either.
    title = f"{args.ranks} processes, {framework.wrapper} on Gloo"
    theirs = run(framework, title, args.ranks, args.epochs, ["--ddp", framework.name], "none")
    show(framework, args.ranks, several, alone, theirs)
    if not several.replicas_are_identical:
        print("demo: the replicas differ", file=sys.stderr)
        return 1
    if several.accuracy < LEAST_ACCURACY:
        print(f"demo: test accuracy {several.accuracy:.4f} is below {LEAST_ACCURACY}", file=sys.stderr)
        return 1
    return 0


def run(
    framework: Framework, title: str, ranks: int, epochs: int, options: list[str], bind: str = "auto"
) -> Run:
    """Run the example with `paceline run`, its output on our terminal."""
    print(f"\n{title}", flush=True)
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        weights, report = Path(folder, framework.weights), Path(folder, "report.json")
        launcher = [sys.executable, "-m", "paceline", "run", "-n", str(ranks), "--bind", bind]
        script = [
            str(framework.script),
            "--epochs",
            str(epochs),
            "--save",
            str(weights),
            "--report",
            str(report),
        ]
        try:
            result = subprocess.run(
                [*launcher, *script, *options], timeout=LIMIT_S, check=False, env={**QUIET, **os.environ}
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"demo: training took longer than {LIMIT_S:.0f} s") from None
        if result.returncode:
            raise SystemExit(result.returncode)  # the launcher has said why
        return Run(**json.loads(report.read_text()), weights=load(weights))


def load(path: Path) -> dict[str, np.ndarray]:
    """The weights that an example has saved."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    import torch

    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def speed(run: Run, alone: Run) -> str:
    """Samples per second, and how many times those of one process."""
    return f"{run.samples_per_s:,.0f} samples/s ({run.samples_per_s / alone.samples_per_s:.2f}x)"


def show(framework: Framework, ranks: int, several: Run, alone: Run, theirs: Run) -> None:
    """The table at the end."""
    difference = max(np.abs(several.weights[name] - weights).max() for name, weights in alone.weights.items())
    largest = max(np.abs(weights).max() for weights in alone.weights.values())
    replicas = "yes" if several.replicas_are_identical else "NO"
    rows = [
        (f"test accuracy, {ranks} processes", f"{several.accuracy:.4f}"),
        ("test accuracy, 1 process", f"{alone.accuracy:.4f}"),
        (f"largest difference of a weight, 1 or {ranks} processes", f"{difference:.1e} of {largest:.2f}"),
        (f"all {ranks} replicas bit-identical", replicas),
        ("speed, 1 process", speed(alone, alone)),
        (f"speed, {ranks} processes, Paceline", speed(several, alone)),
        (f"speed, {ranks} processes, {framework.wrapper} on Gloo", speed(theirs, alone)),
    ]
    print()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, value in rows:
            print(f"{name:<56} {value}")
        return
    table = Table("handwritten digits", "", title="Paceline demo", title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
