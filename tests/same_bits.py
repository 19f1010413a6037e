"""Train on several numbers of processes and hosts, and print the hash with which each ends: `make same-bits`.

python -m tests.same_bits --steps 300 --framework torch
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.harness import run_ranks
from tests.multiprocess.test_virtual_ranks import do_by_hand, train_a_part
from tests.multiprocess.virtual_training import Run
from tests.several_hosts import be_on_host

KINDS = ("averaged", "gpt")
LAYOUTS = {"2x2 hosts": (0, 0, 1, 1), "3+1 hosts": (0, 0, 0, 1)}  # of torch, over Gloo


def train_over_hosts(rank: int, kind: str, hosts: tuple[int, ...], steps: int) -> str:
    be_on_host(hosts[rank])
    return Run("torch", kind, rank, len(hosts), None).train(steps)


def digests(framework: str, kind: str, steps: int) -> dict[str, str]:
    """By layout: the hash with which all its processes have ended."""
    found: dict[str, set[str]] = {}
    for processes in (1, 2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            options = {"framework": framework, "kind": kind, "begin": 0, "end": steps, "folder": Path(folder)}
            ended = run_ranks(train_a_part, processes, options, framework=framework, deadline_s=3600)
        found[f"{processes} on one host"] = set(ended)
    with tempfile.TemporaryDirectory() as folder:
        for number, processes in enumerate((3, 1, 4, 2)):
            begin, end = (steps * part // 4 for part in (number, number + 1))
            options = {
                "framework": framework,
                "kind": kind,
                "begin": begin,
                "end": end,
                "folder": Path(folder),
            }
            ended = run_ranks(train_a_part, processes, options, framework=framework, deadline_s=3600)
    found["3, then 1, 4 and 2"] = set(ended)
    if framework == "torch":
        for name, hosts in LAYOUTS.items():
            options = {"kind": kind, "hosts": hosts, "steps": steps}
            ended = run_ranks(train_over_hosts, len(hosts), options, group="gloo", deadline_s=3600)
            found[name] = set(ended)
    by_hand = {"framework": framework, "kind": kind, "steps": steps}
    found["by hand"] = set(run_ranks(do_by_hand, 1, by_hand, framework=framework, deadline_s=3600))
    return {name: " ".join(sorted(each)) for name, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--framework", choices=("torch", "paddle"), action="append")
    options = parser.parse_args()
    is_same = True
    for framework in options.framework or ("torch", "paddle"):
        for kind in KINDS:
            began = time.monotonic()
            found = digests(framework, kind, options.steps)
            is_same = is_same and len(set(found.values())) == 1
            print(f"{framework}, {kind}, {options.steps} steps ({time.monotonic() - began:.0f} s)")
            for layout, digest in found.items():
                print(f"  {layout:20} {digest[:16]}", flush=True)
    print("the same bits" if is_same else "DIFFERENT BITS")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
