"""One in-place all-reduce of float32, by size, compared with Gloo, Open MPI and DeepSpeed."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.job import Launch
from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Runner, Settings, Timing, bound, no_torch
from benchmarks.samples import slowest_median
from paceline import units
from paceline.units import format_ratio, format_size, format_time

SIZES = (4, 16 << 10, 256 << 10, 4 << 20, 25 << 20)
# Long enough that the ranks' different starts (tens of microseconds apart) do not matter.
SAMPLE_S = 0.02


def _mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _no_mpi() -> str:
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed"
    return "" if _mpirun() else "there is no mpirun"


def _no_deepspeed() -> str:
    return no_torch() or ("" if importlib.util.find_spec("deepspeed") else "deepspeed is not installed")


def _mpi_launch(ranks: int) -> Launch:
    environment = {
        # Open MPI refuses to run as root (in containers) and with more ranks than cores, by default.
        **{f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")},
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return Launch((_mpirun() or "mpirun", "-n", str(ranks)), environment)


_WORKERS = "benchmarks.workers.all_reduce"
CASES = (
    Case("paceline_region", "Paceline, in the region", f"{_WORKERS}:PacelineInRegion", launch=bound),
    Case("paceline_any", "Paceline, any array", f"{_WORKERS}:PacelineAnyArray", launch=bound),
    Case("paceline_torch", "Paceline, torch backend", f"{_WORKERS}:PacelineBackend", {}, no_torch, bound),
    Case("gloo", "Gloo", f"{_WORKERS}:Gloo", missing=no_torch),
    Case("openmpi", "Open MPI", f"{_WORKERS}:OpenMpi", missing=_no_mpi, launch=_mpi_launch),
    Case("deepspeed", "DeepSpeed", f"{_WORKERS}:DeepSpeed", {}, _no_deepspeed, bound),
)
# (slower, faster) of the columns of ratios.
_RATIOS = (
    ("gloo", "paceline_region", "Gloo / region"),
    ("gloo", "paceline_any", "Gloo / any"),
    ("gloo", "paceline_torch", "Gloo / backend"),
    ("openmpi", "paceline_region", "Open MPI / region"),
    ("deepspeed", "paceline_torch", "DeepSpeed / backend"),
)


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Measure and report."""
    timings: dict[int, dict[str, Timing]] = {}
    with Runner(settings) as runner:
        for nbytes in given.sizes:
            size = format_size(nbytes)
            runner.prepare(size, nbytes=nbytes)
            timings[nbytes] = runner.measure(size, SAMPLE_S)
    ratios = [ratio for ratio in _RATIOS if {ratio[0], ratio[1]} <= {case.key for case in runner.cases}]
    return settings.report(
        "all_reduce",
        f"all_reduce of float32, {settings.ranks} ranks on one host: time of one call",
        ["bytes", *(case.label for case in runner.cases), *(heading for _, _, heading in ratios)],
        [_row(nbytes, timings[nbytes], runner.cases, ratios) for nbytes in given.sizes],
        notes=[
            f"Median of {settings.rounds} rounds on each rank, then the slowest rank; cases take turns.",
            "Back-to-back calls on the same memory, sum in place; results were checked against a known sum.",
            "Ranks are bound to cores where their own launcher does that: not Gloo's, as under torchrun.",
            *runner.notes(),
        ],
        data={
            "rows": [
                {
                    "bytes": nbytes,
                    "case": key,
                    "median_s": slowest_median(timing.samples),
                    "iterations": timing.iterations,
                    "samples_s": timing.samples,
                }
                for nbytes, by_key in timings.items()
                for key, timing in by_key.items()
            ]
        },
        is_complete=runner.is_complete,
    )


def _row(
    nbytes: int,
    timings: Mapping[str, Timing],
    cases: Sequence[Case],
    ratios: Sequence[tuple[str, str, str]],
) -> list[str]:
    seconds = {key: slowest_median(timing.samples) for key, timing in timings.items()}
    cells = [format_time(seconds[case.key]) if case.key in seconds else "failed" for case in cases]
    for slower, faster, _ in ratios:
        both = slower in seconds and faster in seconds
        cells.append(format_ratio(seconds[slower] / seconds[faster]) if both else "-")
    return [format_size(nbytes), *cells]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=units.listed(units.size),
        default=SIZES,
        metavar="A,B",
        help="default 4,16KiB,256KiB,4MiB,25MiB",
    )


BENCHMARK = Benchmark("time of one all_reduce, by size", 30, run, lambda given: CASES, _add_arguments)
