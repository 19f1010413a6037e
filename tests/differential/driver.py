"""The command line of a generator: the seeds, the framework, and the report on a program that fails.

python -m tests.differential.kept_errors --framework paddle --seeds 0:200 --minutes 10
python -m tests.differential.kept_errors --seed 17                  # one program, shown in full
python -m tests.differential.kept_errors --program found.json       # one that a report printed

`make fuzz WHAT=kept_errors` does the same; it accepts the name of any generator.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from tests.differential.programs import Program

Check = Callable[[Program], str]
"""Returns the failure of a program, in words; empty: none. An exception is a failure, too."""


class Generator(Protocol):
    """The contents of a module of generated programs."""

    FRAMEWORKS: tuple[str, ...]

    def generate(self, seed: int, framework: str) -> Program: ...

    def show(self, program: Program) -> str: ...

    def checking(self, framework: str) -> AbstractContextManager[Check]: ...


def seeds_of(text: str) -> Iterable[int]:
    """The seeds of a range such as "0:200", or "0:", which has no end."""
    first, _, last = text.partition(":")
    return range(int(first or 0), int(last)) if last else itertools.count(int(first or 0))


def main(generator: Generator) -> int:
    """Check the programs that the command line asks for. Exit status 1: at least one failed."""
    arguments = _arguments(generator)
    is_one = arguments.seed is not None or arguments.program is not None
    seeds = seeds_of(arguments.seeds) if arguments.seed is None else [arguments.seed]
    if arguments.program is not None:
        programs: Iterable[Program] = [json.loads(Path(arguments.program).read_text())]
    else:
        programs = (generator.generate(seed, arguments.framework) for seed in seeds)
    begun_s = time.monotonic()
    until_s = float("inf") if arguments.minutes is None else begun_s + 60 * arguments.minutes
    num_checked = num_found = 0
    with generator.checking(arguments.framework) as check:
        for program in programs:
            try:
                text = check(program)
            except Exception as error:  # an error of a rank, as the harness raises it
                text = str(error) or repr(error)
            num_checked += 1
            if text or is_one:
                parts = [generator.show(program), text or "nothing is wrong", json.dumps(program)]
                print(f"=== seed {program.get('seed')}", *parts, sep="\n", flush=True)
            num_found += bool(text)
            if time.monotonic() > until_s:
                break
    print(f"{num_checked} programs in {time.monotonic() - begun_s:.0f} s, {num_found} with a fault")
    return 1 if num_found else 0


def plainly(check: Callable[[Program, str], str], framework: str) -> AbstractContextManager[Check]:
    """A check that keeps no state between two programs."""
    return nullcontext(lambda program: check(program, framework))


def _arguments(generator: Generator) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=generator.__doc__)
    frameworks = generator.FRAMEWORKS
    parser.add_argument("--framework", default=frameworks[0], choices=frameworks)
    parser.add_argument("--seeds", default="0:100", help="a range, 0:100, or the first one of as many as fit")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, help="one program, shown in full")
    parser.add_argument("--program", help="a file with one program as JSON")
    return parser.parse_args()
