"""Trains on several numbers of processes and hosts, and prints the final hash of each: `make same-bits`.

python -m tests.same_bits --steps 300 --stops 20 --framework torch
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import Machine, Report
from tests.harness import run_ranks
from tests.multiprocess.test_virtual_ranks import do_by_hand, parts_of, train_in_parts
from tests.multiprocess.virtual_training import Run
from tests.several_hosts import be_on_host

KINDS = {"averaged": "CNN with dropout and BatchNorm", "gpt": "GPT"}
LAYOUTS = {"2x2 hosts": (0, 0, 1, 1), "3+1 hosts": (0, 0, 0, 1)}  # of torch, over Gloo
_DEADLINE_S = 3600
_SHOWN = 16  # characters of a hash


def train_over_hosts(rank: int, kind: str, hosts: tuple[int, ...], steps: int) -> str:
    be_on_host(hosts[rank])
    return Run("torch", kind, rank, len(hosts), None).train(steps)


def runs_of(framework: str, kind: str, steps: int, stops: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield each training, once it has ended: its layout, segments, and the final hashes of its processes.

    A segment has its number of processes, and its first and last step.
    """

    def ended(layout: str, parts: list[tuple[int, int, int]], found: set[str]) -> dict[str, Any]:
        digest = " ".join(each[:_SHOWN] for each in sorted(found))
        return {"training": f"{framework}, {KINDS[kind]}", "layout": layout, "parts": parts, "hash": digest}

    several = {f"{processes} processes": [(processes, 0, steps)] for processes in (2, 3, 4)}
    stopped = {f"{stops} stops": parts_of(steps, stops, seed)}
    for layout, parts in ({"1 process": [(1, 0, steps)]} | several | stopped).items():
        yield ended(layout, parts, train_in_parts(framework, kind, parts, _DEADLINE_S))
    for layout, hosts in (LAYOUTS if framework == "torch" else {}).items():
        options = {"kind": kind, "hosts": hosts, "steps": steps}
        found = set(run_ranks(train_over_hosts, len(hosts), options, group="gloo", deadline_s=_DEADLINE_S))
        yield ended(layout, [(len(hosts), 0, steps)], found)
    by_hand = {"framework": framework, "kind": kind, "steps": steps}
    found = set(run_ranks(do_by_hand, 1, by_hand, framework=framework, deadline_s=_DEADLINE_S))
    yield ended("by hand", [(1, 0, steps)], found)


def make_report(machine: Machine, runs: list[dict[str, Any]], command: str, steps: int) -> Report:
    """The hashes as a table."""
    found: dict[str, set[str]] = {}
    for run in runs:
        found.setdefault(run["training"], set()).add(run["hash"])
    is_same = all(len(each) == 1 for each in found.values())
    return Report(
        theme="same-bits",
        title="The same bits on any number of processes",
        command=command,
        machine=machine,
        columns=["training", "layout", "hash"],
        rows=[[run["training"], run["layout"], run["hash"]] for run in runs],
        notes=[
            f"hash: of parameters and buffers after {steps} steps of eight virtual ranks. "
            + ("Of each training all are the same." if is_same else "DIFFERENT BITS."),
            "stops: after so many random steps the training is stopped, and resumed from its state, each "
            "time on a random number of processes from 1 to 4. The other layouts train without a stop.",
            "by hand: the framework alone, with the tree of additions written out.",
        ],
        data={"steps": steps, "runs": runs},
        is_complete=is_same,
        text_columns=3,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--stops", type=int, default=20, help="of one run, each resumed on a random number of processes")
    add("--seed", type=int, default=0, help="of these stops")
    add("--framework", choices=("torch", "paddle"), action="append")
    add("--markdown", type=Path, metavar="FOLDER", help="write the table there, too, and all of it as JSON")
    options = parser.parse_args()
    machine, runs = Machine.here(), []
    for framework in options.framework or ("torch", "paddle"):
        for number, kind in enumerate(KINDS):
            for run in runs_of(framework, kind, options.steps, options.stops, options.seed + number):
                print(f"{run['training']}, {run['layout']}: {run['hash']}", flush=True)
                runs.append(run)
    command = shlex.join(["python", "-m", "tests.same_bits", *sys.argv[1:]])
    report = make_report(machine, runs, command, options.steps)
    print()
    report.show()
    if options.markdown is not None:
        print(f"written: {report.write_markdown(options.markdown)}")
    return 0 if report.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
