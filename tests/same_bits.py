"""Train on several numbers of processes and hosts, and print the hash with which each ends: `make same-bits`.

python -m tests.same_bits --steps 300 --stops 20 --framework torch
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks.report import Machine
from tests.harness import run_ranks
from tests.multiprocess.test_virtual_ranks import do_by_hand, parts_of, train_in_parts
from tests.multiprocess.virtual_training import Run
from tests.several_hosts import be_on_host

KINDS = {"averaged": "CNN with dropout and BatchNorm", "gpt": "GPT"}
LAYOUTS = {"2x2 hosts": (0, 0, 1, 1), "3+1 hosts": (0, 0, 0, 1)}  # of torch, over Gloo
_DEADLINE_S = 3600


def train_over_hosts(rank: int, kind: str, hosts: tuple[int, ...], steps: int) -> str:
    be_on_host(hosts[rank])
    return Run("torch", kind, rank, len(hosts), None).train(steps)


def digests(framework: str, kind: str, steps: int, stops: int, seed: int) -> dict[str, str]:
    """By layout: the hash with which all its processes have ended."""
    found: dict[str, set[str]] = {}
    for processes in (1, 2, 3, 4):
        undisturbed = [(processes, 0, steps)]
        name = f"{processes} processes" if processes > 1 else "1 process"
        found[name] = train_in_parts(framework, kind, undisturbed, _DEADLINE_S)
    if framework == "torch":
        for name, hosts in LAYOUTS.items():
            options = {"kind": kind, "hosts": hosts, "steps": steps}
            found[name] = set(run_ranks(train_over_hosts, len(hosts), options, group="gloo", deadline_s=3600))
    parts = parts_of(steps, stops, seed)
    found[f"{stops} stops"] = train_in_parts(framework, kind, parts, _DEADLINE_S)
    by_hand = {"framework": framework, "kind": kind, "steps": steps}
    found["by hand"] = set(run_ranks(do_by_hand, 1, by_hand, framework=framework, deadline_s=_DEADLINE_S))
    return {name: " ".join(sorted(each)) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=300)
    add("--stops", type=int, default=20, help="of one run, each resumed on a random number of processes")
    add("--seed", type=int, default=0, help="of these stops")
    add("--framework", choices=("torch", "paddle"), action="append")
    add("--markdown", type=Path, metavar="FOLDER", help="write the table there, too")
    options = parser.parse_args()
    is_same, rows = True, []
    for framework in options.framework or ("torch", "paddle"):
        for number, kind in enumerate(KINDS):
            began = time.monotonic()
            found = digests(framework, kind, options.steps, options.stops, options.seed + number)
            is_same = is_same and len(set(found.values())) == 1
            print(f"{framework}, {kind}, {options.steps} steps ({time.monotonic() - began:.0f} s)")
            for layout, digest in found.items():
                print(f"  {layout:20} {digest[:16]}", flush=True)
                rows.append(f"| {framework}, {KINDS[kind]} | {layout} | {digest[:16]} |")
    print("the same bits" if is_same else "DIFFERENT BITS")
    if options.markdown is not None:
        (options.markdown / "same-bits.md").write_text(_table(rows, options.steps, options.stops))
    return 0 if is_same else 1


def _table(rows: list[str], steps: int, stops: int) -> str:
    return "\n".join(
        [
            "# The same bits on any number of processes",
            "",
            f"`python -m tests.same_bits {shlex.join(sys.argv[1:])}`: the hash of parameters and buffers "
            f"after {steps} steps of eight virtual ranks. In the rows with {stops} stops a training is "
            "stopped after so many random steps and resumed from its state, each time on a random number of "
            "processes from 1 to 4. By hand: the framework alone, with the tree of additions written out.",
            "",
            "  \n".join(Machine.here().describe().splitlines()),
            "",
            "| training | layout | hash |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
