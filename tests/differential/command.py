"""Runs the fuzzer as a command, for its tests; it forks ranks, which pytest's process must not do."""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness.command import run_module
from tests.harness.warm import warm_python

_DEADLINE_S = 300


def fuzz(framework: str, *arguments: str) -> tuple[int, str]:
    """Run it for a framework; return its exit status and output."""
    arguments = ("--framework", framework, *arguments)
    return run_module("tests.differential", *arguments, deadline_s=_DEADLINE_S, python=warm_python(framework))


def run_every_mode(framework: str, seeds: range, modes: Sequence[str]) -> None:
    """Run these seeds in all modes, and under the framework's own wrapper: all must run without a finding."""
    span = f"{seeds.start}:{seeds.stop}"
    status, output = fuzz(framework, "--seeds", span, "--shrink-seconds", "0", "--every-mode")
    assert status == 0, output
    rows = [[cell.strip() for cell in line.split("|")] for line in output.splitlines()]
    runs = {row[1]: row[2] for row in rows if len(row) == 10}  # by mode
    assert {mode: runs.get(mode) for mode in modes} == dict.fromkeys(modes, str(len(seeds))), output
    own = [int(row[2]) for row in rows if len(row) == 11 and row[1].partition(" ")[0] == framework]
    assert sum(own) == len(seeds), output
