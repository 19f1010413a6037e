"""The time of a whole launch of a program that wraps a small model and ends.

Each sample is a whole launch, as a user makes it, so it includes the launcher's work before the program and
Python's work after it. For comparison, one process imports torch, which is the minimum for all of them, and
`python -X importtime` shows the parts of the imports.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.job import Launch
from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Settings, no_torch, rows_of
from paceline.units import format_time

_LIMIT_S = 120.0
_PACKAGE = "paceline"
_PROGRAMS = {
    "paceline": """\
import torch
import paceline.torch
from paceline.torch import DistributedDataParallel

paceline.torch.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
torch.distributed.barrier()
print("wrapped", flush=True)
torch.distributed.destroy_process_group()
""",
    "torch": """\
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
torch.distributed.barrier()
print("wrapped", flush=True)
torch.distributed.destroy_process_group()
""",
    "import": 'import torch\n\nprint("wrapped", flush=True)\n',
}
_LAUNCHERS = {
    "paceline": ("-m", "paceline", "run", "-n", "{ranks}"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"),
    "none": (),
}


def _case(key: str, label: str, launcher: str, program: str, **environment: str) -> Case:
    options = {"launcher": launcher, "program": program}
    return Case(key, label, "", options, no_torch, lambda ranks: Launch(environment=environment))


CASES = (
    _case("paceline", "paceline run, Paceline DDP", "paceline", "paceline"),
    _case(
        "paceline_alone",
        "the same with PACELINE_FORK_RANKS=0",
        "paceline",
        "paceline",
        PACELINE_FORK_RANKS="0",
    ),
    _case("paceline_torch", "paceline run, torch DDP on Gloo", "paceline", "torch"),
    _case("torch", "torchrun, torch DDP on Gloo", "torchrun", "torch"),
    _case("import", "one process that imports torch", "none", "import"),
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Start each case once in each round, and report."""
    cases, absent = settings.able()
    samples: dict[str, list[dict[str, float]]] = {case.key: [] for case in cases}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _PROGRAMS.items():
            _program(folder, name).write_text(text)
        for number in range(-1, settings.rounds):  # the first one fills the file cache and is not counted
            for case in cases:
                if case.key in failures:
                    continue
                count = f"{number + 1} of {settings.rounds}" if number >= 0 else "warming up"
                settings.show(f"{case.label}: {count}")
                try:
                    sample = _start(case, settings, folder)
                except _Failed as failed:
                    failures[case.key] = str(failed)
                    continue
                if number >= 0:
                    samples[case.key].append(sample)
        imports = [] if no_torch() else _imports()
    measured = {key: each for key, each in samples.items() if each}
    return settings.report(
        "start",
        f"a program that wraps a linear layer and ends, {settings.ranks} ranks on one host",
        ["case", "median", "fastest", "slowest", "processor time"],
        rows_of(cases, measured, 4, lambda key: _cells(measured[key])),
        notes=[
            "From the start of the command to its end; processor time is that of all its processes, median.",
            *_describe(imports),
            *absent,
            *(f"{case.label} failed: {failures[case.key]}" for case in cases if case.key in failures),
        ],
        data={"rows": samples, "imports": [[each.name, each.own_s, each.total_s] for each in imports]},
        is_complete=not any(case.is_ours for case in cases if case.key in failures),
    )


class _Failed(Exception):
    pass


def _start(case: Case, settings: Settings, folder: str) -> dict[str, float]:
    """Make one launch, and return its seconds and its processor time."""
    launcher, program = case.options["launcher"], case.options["program"]
    launch, ranks = case.launch(settings.ranks), 1 if launcher == "none" else settings.ranks
    arguments = [part.format(ranks=ranks) for part in _LAUNCHERS[launcher]]
    command = [launch.python, *arguments, str(_program(folder, program))]
    environment = _environment({**settings.environment, **launch.environment})
    before, begin = _children_s(), time.perf_counter()
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"did not end within {_LIMIT_S:.0f} s") from None
    seconds = time.perf_counter() - begin
    if ended.returncode != 0 or ended.stdout.count("wrapped") != ranks:
        lines = [line for line in ended.stderr.splitlines() if re.search(r"\w", line)]
        raise _Failed(f"exit status {ended.returncode}: {lines[-1] if lines else 'it wrote nothing'}")
    return {"seconds": seconds, "processor_s": _children_s() - before}


def _program(folder: str, name: str) -> Path:
    return Path(folder) / f"wrap_{name}.py"  # no name of a module that it imports


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    # As for a user: with compiled modules, and the launcher's number of threads.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, **added}


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _cells(samples: list[dict[str, float]]) -> list[str]:
    seconds = [one["seconds"] for one in samples]
    processor_s = statistics.median(one["processor_s"] for one in samples)
    times = (statistics.median(seconds), min(seconds), max(seconds), processor_s)
    return [format_time(each) for each in times]


@dataclass(frozen=True)
class Import:
    """One line of `python -X importtime`.

    Attributes:
        name: The name of the module.
        own_s: Seconds that its own code took.
        total_s: The same, including its imports.
        depth: How many modules were importing it, directly or through others.
    """

    name: str
    own_s: float
    total_s: float
    depth: int


def parse_import_times(text: str) -> list[Import]:
    """Parse the lines of `python -X importtime`: a module comes after those that it imported.

    Example:
        >>> parse_import_times("import time:       161 |        242 |   _io")
        [Import(name='_io', own_s=0.000161, total_s=0.000242, depth=1)]
    """
    lines = re.finditer(r"^import time: +(\d+) \| +(\d+) \| ( *)(\S+)$", text, re.MULTILINE)
    return [Import(m[4], int(m[1]) / 1e6, int(m[2]) / 1e6, len(m[3]) // 2) for m in lines]


def _imports() -> list[Import]:
    command = [
        Launch().python,
        "-X",
        "importtime",
        "-c",
        "import gc; gc.disable(); import torch, paceline.torch",
    ]
    ended = subprocess.run(command, env=_environment({}), capture_output=True, text=True, check=False)
    return parse_import_times(ended.stderr)


def _describe(imports: Iterable[Import]) -> list[str]:
    """Return a note on torch's own import, on Paceline's further imports, and on the slowest of those."""
    rows = list(imports)
    torch = next((each for each in rows if each.name == "torch" and each.depth == 0), None)
    if torch is None:
        return []
    after = rows[rows.index(torch) + 1 :]
    ours = [each for each in after if each.name.split(".")[0] == _PACKAGE]
    others = [each for each in after if each not in ours]
    slowest = sorted(after, key=lambda each: -each.own_s)[:5]

    def sum_of(some: Iterable[Any]) -> str:
        return format_time(sum(each.own_s for each in some))

    return [
        f"`-X importtime`, without collections: torch {format_time(torch.total_s)}; besides, paceline.torch "
        f"with {len(ours)} modules of its own {sum_of(ours)} and {len(others)} others {sum_of(others)}. "
        "The slowest: " + ", ".join(f"{each.name} {format_time(each.own_s)}" for each in slowest) + "."
    ]


BENCHMARK = Benchmark(
    "time of a program that wraps a model and ends, including launcher and imports",
    10,
    run,
    lambda given: CASES,
    has_starts=False,
)
