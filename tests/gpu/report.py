"""The findings of a check, as a table for people and for benchmarks/results.

A pure function of the parts' results; see `benchmarks.report` for the forms of a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import Machine, Report
from benchmarks.samples import overhead, overhead_cells, slowest_median
from paceline.units import format_time
from tests.gpu.machine import Accelerator
from tests.gpu.parts import Ended
from tests.gpu.ways import ALONE, INCUMBENT, LABELS

MOST_DIFFERENT = 1e-3
"""The relative difference of two losses that counts as equal: kernels of a GPU may add in any order."""


def make_report(
    gpu: Accelerator, machine: Machine, ended: Sequence[Ended], found: Sequence[dict[str, Any]], command: str
) -> Report:
    """The report of a check.

    Args:
        gpu: The GPU that it ran on.
        machine: The rest of the machine.
        ended: The result of each part.
        found: The results of the benches; see `steps`.
        command: The command that makes it again.
    """
    rows: list[list[str]] = []
    for each in found:
        rows += [*_rows(each), []]
    wrong = differing(found)
    kind = "one GPU" if gpu.count == 1 else f"{gpu.count} GPUs" if gpu.count else "no GPU"
    return Report(
        theme="gpu",
        title=f"training steps on {gpu.name}, {kind}",
        command=command,
        machine=machine,
        columns=[
            "model",
            "ranks",
            "way",
            "step",
            "host",
            "overhead",
            "95 % interval",
            "torch's overhead / this",
            "launches",
            "losses differ by",
        ],
        rows=rows,
        notes=[
            f"{gpu.name}: {gpu.details}.",
            "step: until the GPU has finished, the median over rounds of the slowest rank. host: until "
            "Python has handed the step to the GPU; far below step, nothing waits for it. overhead: step "
            "minus the step alone in the same round. All ways take turns in one process, and a single rank "
            "does all that several do.",
            "launches: kernels and copies that one step gives to the device, by torch's profiler.",
            "losses differ by: the largest difference to torch DDP's loss in any step of training with Adam, "
            "as a part of the loss; 'alone' shows what other batches do on several ranks, and what the GPU's "
            "own order of sums does on one.",
            *(f"{each.part.name}: {each.summary}.{quoted(each)}" for each in ended),
            *wrong,
        ],
        data={"gpu": vars(gpu), "benches": list(found), "parts": [_as_data(each) for each in ended]},
        is_complete=not wrong and all(each.is_good for each in ended),
        text_columns=3,
    )


def differing(found: Sequence[dict[str, Any]]) -> list[str]:
    """Losses that differ from torch DDP's, a sentence on each."""
    return [
        f"WRONG: {each['model']}, {each['world_size']} ranks over {each['backend']}: the losses of "
        f"{LABELS[key]} differ from torch DDP's by {difference:.2g}"
        for each in found
        for key, difference in each["differences"].items()
        if key.startswith("paceline") and not difference <= MOST_DIFFERENT
    ]


def _rows(found: dict[str, Any]) -> list[list[str]]:
    steps, hosts = found["steps_s"], found["hosts_s"]
    alone = steps[ALONE]
    added = {key: overhead(each, alone) for key, each in steps.items() if key != ALONE}
    theirs = [each for key, each in added.items() if not key.startswith("paceline")]
    reference = min(theirs, key=lambda interval: interval.median) if theirs else None
    millions = found["parameters"] / 1e6
    heading = f"{found['model']}, {millions:.3g} M" if millions >= 1 else found["model"]
    rows = []
    for key, each in steps.items():
        cells = [heading, f"{found['world_size']}, {found['backend']}"] if not rows else ["", ""]
        cells += [LABELS[key], format_time(slowest_median(each)), format_time(slowest_median(hosts[key]))]
        cells += overhead_cells(key, added.get(key), reference)
        count = found["launches"][key]
        cells.append("-" if count is None else f"{count:.0f}")
        rows.append([*cells, f"{found['differences'][key]:.1g}" if key != INCUMBENT else "-"])
    return rows


def quoted(ended: Ended) -> str:
    """The output of a failed part, as a block below its line."""
    if ended.is_good or not ended.tail:
        return ""
    return "\n".join(["", "", "  ```", *(f"  {line}" for line in ended.tail.splitlines()), "  ```"])


def _as_data(ended: Ended) -> dict[str, Any]:
    return {
        "name": ended.part.name,
        "status": ended.status,
        "seconds": ended.seconds,
        "counts": ended.counts,
        "culprit": ended.culprit,
        "output": "" if ended.is_good else ended.tail,
    }
