"""`paceline bench all_reduce`: one all-reduce of float32 in place, by size, against Gloo and Open MPI."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.bench.conductor import Launch
from paceline.bench.contest import Entry, Plan, Timing, bound, changes, no_torch
from paceline.bench.machine import Machine
from paceline.bench.report import Report
from paceline.bench.rounds import slowest_median
from paceline.bench.units import format_ratio, format_size, format_time

SIZES = (4, 16 << 10, 256 << 10, 4 << 20, 25 << 20)
# Long enough that the start of a sample (tens of microseconds apart on two ranks) does not show in it.
SAMPLE_S = 0.02


def _mpirun() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _no_mpi() -> str:
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed"
    return "" if _mpirun() else "there is no mpirun"


def _mpi_launch(ranks: int) -> Launch:
    environment = {
        # Both refuse by default, the first in containers and the second with more ranks than cores.
        **{f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")},
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return Launch((_mpirun() or "mpirun", "-n", str(ranks)), environment)


_HERE = "paceline.bench.on_numpy"
_TORCH = "paceline.torch.bench.all_reduce"
ENTRIES = (
    Entry("paceline_region", "Paceline, in the region", f"{_HERE}:PacelineInRegion", launch=bound),
    Entry("paceline_any", "Paceline, any array", f"{_HERE}:PacelineAnyArray", launch=bound),
    Entry("paceline_torch", "Paceline, torch backend", f"{_TORCH}:PacelineBackend", {}, no_torch, bound),
    Entry("gloo", "Gloo", f"{_TORCH}:Gloo", missing=no_torch),
    Entry("openmpi", "Open MPI", f"{_HERE}:OpenMpi", missing=_no_mpi, launch=_mpi_launch),
)
# (who is slower, who is faster) of the ratio columns.
_RATIOS = (
    ("gloo", "paceline_region", "Gloo / region"),
    ("gloo", "paceline_any", "Gloo / any"),
    ("gloo", "paceline_torch", "Gloo / backend"),
    ("openmpi", "paceline_region", "Open MPI / region"),
)


def run(plan: Plan, sizes: Sequence[int]) -> Report:
    """Measure and report; see the command's help for the arguments."""
    machine = Machine.here()
    timings: dict[int, dict[str, Timing]] = {}
    with plan.contest(ENTRIES) as contest:
        for nbytes in sizes:
            size = format_size(nbytes)
            plan.say(f"{size}: checking answers")
            contest.prepare(size, nbytes=nbytes)
            timings[nbytes] = contest.measure(size, plan.rounds, SAMPLE_S)
    shown = [contender.entry for contender in contest.contenders]
    ratios = [ratio for ratio in _RATIOS if {ratio[0], ratio[1]} <= {entry.key for entry in shown}]
    return Report(
        theme="all_reduce",
        title=f"all_reduce of float32, {plan.ranks} ranks on one host: time of one call",
        command=plan.command,
        machine=machine,
        columns=["bytes", *(entry.label for entry in shown), *(heading for _, _, heading in ratios)],
        rows=[_row(nbytes, timings[nbytes], shown, ratios) for nbytes in sizes],
        notes=[
            f"Median of {plan.rounds} rounds on each rank, then the slowest rank; contenders take turns.",
            "Back-to-back calls on the same memory, sum in place; answers were checked against a known sum.",
            "Ranks are bound to cores where their own launcher does that: not Gloo's, as under torchrun.",
            *(note for nbytes in sizes for note in changes(contest, format_size(nbytes), timings[nbytes])),
            *plan.notes(contest),
        ],
        data={"ranks": plan.ranks, "rounds": plan.rounds, "rows": _as_data(timings)},
        is_complete=not contest.ours_failed,
    )


def _row(
    nbytes: int, timings: dict[str, Timing], shown: Sequence[Entry], ratios: Sequence[tuple[str, str, str]]
) -> list[str]:
    seconds = {key: slowest_median(timing.samples) for key, timing in timings.items()}
    cells = [format_time(seconds[entry.key]) if entry.key in seconds else "failed" for entry in shown]
    for slower, faster, _ in ratios:
        both = slower in seconds and faster in seconds
        cells.append(format_ratio(seconds[slower] / seconds[faster]) if both else "-")
    return [format_size(nbytes), *cells]


def _as_data(timings: dict[int, dict[str, Timing]]) -> list[dict[str, object]]:
    return [
        {
            "bytes": nbytes,
            "contender": key,
            "median_s": slowest_median(timing.samples),
            "iterations": timing.iterations,
            "samples_s": timing.samples,
        }
        for nbytes, by_key in timings.items()
        for key, timing in by_key.items()
    ]
