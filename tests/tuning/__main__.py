"""Checks for three models that the answer of `paceline tune` is within 5 % of the best layout.

The best layout is found without any code of `paceline tune`: in each round, each layout is launched anew and
runs alone on the machine, and the script reports its rate by its own clock. This takes some minutes, and
needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tuning.train import MODELS

SCRIPT = str(Path(__file__).with_name("train.py"))
LIMIT = 0.95
WITHIN_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tuning", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument(
        "--rounds", type=int, default=5, help="launches of each layout (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each launch (default: %(default)g)"
    )
    parser.add_argument(
        "--tune-seconds", type=float, default=60.0, help="paceline tune --seconds (default: %(default)g)"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    args = parser.parse_args()
    lines = [
        "| model | layout | samples/s | from | to | of the best | tune |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    is_good = True
    for model in args.models.split(","):
        answer, layouts = tuned(model, args.tune_seconds)
        rates = exhaustive(model, layouts, args.rounds, args.seconds)
        medians = {layout: statistics.median(each) for layout, each in rates.items()}
        best = max(medians.values())
        for layout, each in rates.items():
            part = medians[layout] / best
            mark = (
                f"recommends it ({'within' if part >= LIMIT else 'NOT within'} 5 %)"
                if layout == answer
                else ""
            )
            lines.append(
                f"| {model} | {layout[0]} x {layout[1]} | {medians[layout]:,.0f} | {min(each):,.0f} | "
                f"{max(each):,.0f} | {part:.3f} | {mark} |"
            )
        is_good = is_good and medians[answer] >= LIMIT * best
        print("\n".join(lines[-len(rates) :]), flush=True)
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    return 0 if is_good else 1


def tuned(model: str, seconds: float) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """Run tune; return the layout that it recommends, and all layouts that it tried."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "answer.json")
        command = ["tune", "--seconds", str(seconds), "--json", str(report), SCRIPT, model]
        run(command, XDG_CACHE_HOME=folder)
        found = json.loads(report.read_text())
    layouts = [(each["layout"]["ranks"], each["layout"]["threads"]) for each in found["turns"]]
    return (found["answer"]["layout"]["ranks"], found["answer"]["layout"]["threads"]), layouts


def exhaustive(
    model: str, layouts: list[tuple[int, int]], rounds: int, seconds: float
) -> dict[tuple[int, int], list[float]]:
    """Launch each layout in each round; return its samples per second, by launch."""
    rates: dict[tuple[int, int], list[float]] = {layout: [] for layout in layouts}
    for number in range(rounds):
        for layout in layouts if number % 2 == 0 else layouts[::-1]:
            ranks, threads = layout
            options = ["run", "-n", str(ranks), "--threads", str(threads)]
            output = run([*options, "--prefix", "never", SCRIPT, model, "--seconds", str(seconds)])
            rates[layout].append(float(output.rpartition("samples per second:")[2].split()[0]))
    return rates


def run(arguments: list[str], **environment: str) -> str:
    """Run a command of Paceline, and return its standard output."""
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{arguments}: exit status {ended.returncode}\n{ended.stdout}")
    if arguments[0] == "tune":
        print(ended.stdout, flush=True)
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
