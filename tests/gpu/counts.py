"""The launches and the device memory of a step, compared with torch's DDP; no GPU is needed.

python -m tests.gpu.counts --markdown benchmarks/results    a minute; the machine may be busy

Counted on the test device, by one rank that does all that several do. Launches are those of models with all
their tensors, each of a few elements; memory is that of a model whose parameters take 64 MiB.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Machine, Report
from tests.device import torch as stand_in
from tests.gpu import device as devices
from tests.gpu.models import TASKS
from tests.gpu.steps import Job, Way
from tests.gpu.ways import ALONE, INCUMBENT, LABELS, here

FORMS = {"cnn": "tiny", "gpt": "tiny", "toy": "tiny", "wide": "whole"}
_SETTLING = 3
"""Steps before anything is counted: buckets are laid out anew after the first one."""


def count(ways: list[str], job: Job) -> dict[str, dict[str, float]]:
    """For each variant the launches of a step, and its peak memory in sizes of the parameters."""
    module = torch.get_device_module(job.kind)
    found = {}
    for key in ways:
        gc.collect()
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.max_memory_allocated()
        way = Way(key, job, None)
        size = sum(each.nbytes for each in way.module.parameters())
        for _ in range(_SETTLING):
            way.step()
        module.synchronize()
        module.reset_peak_memory_stats()
        way.step()
        module.synchronize()
        most = (module.max_memory_allocated() - before) / size
        calls = devices.count_calls(job.kind, way.step, 1)
        found[key] = {"launches": calls.launches or 0, "memory": most}
        del way
    return found


def rows_of(model: str, tensors: int, found: dict[str, dict[str, float]]) -> list[list[str]]:
    rows = []
    theirs = found[INCUMBENT]["launches"] - found[ALONE]["launches"]
    for key, each in found.items():
        added = each["launches"] - found[ALONE]["launches"]
        cells = [f"{model}, {tensors} parameters" if not rows else "", LABELS[key], f"{each['launches']:.0f}"]
        cells += ["-", "-"] if key == ALONE else [f"{added:.0f}", f"{added / theirs:.2f}"]
        memory = f"{each['memory']:.2f}" if FORMS[model] == "whole" else "-"
        rows.append([*cells, memory])
    return [*rows, []]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(FORMS))
    parser.add_argument("--markdown", type=Path, help="a file or a folder for the table")
    given = parser.parse_args()
    machine = Machine.here()
    device = devices.begin(stand_in.NAME, 0)
    dist.init_process_group(stand_in.NCCL, store=dist.HashStore(), rank=0, world_size=1)
    rows: list[list[str]] = []
    data: dict[str, Any] = {}
    for model in given.models.split(","):
        job = Job(TASKS[model], FORMS[model], device, 0)
        data[model] = count(here(), job)
        tensors = len(list(TASKS[model].build(FORMS[model]).parameters()))
        rows += rows_of(model, tensors, data[model])
    dist.destroy_process_group()
    report = Report(
        theme="device-counts",
        title="what a step gives to a device and holds of its memory, beside torch's DDP",
        command=shlex.join(["python", "-m", "tests.gpu.counts", *sys.argv[1:]]),
        machine=machine,
        columns=["model", "way", "launches", "beyond the model's", "/ torch's", "memory"],
        rows=rows,
        notes=[
            "launches: kernels, copies and calls of the process group that a forward and a backward give to "
            "the device of tests, by torch's profiler; beyond the model's: without those of the model alone; "
            "/ torch's: divided by those of torch DDP with its defaults. One rank does all that several do.",
            "memory: the most that a step holds of the device's, in sizes of the parameters, these included.",
        ],
        data=data,
        text_columns=2,
    )
    report.show()
    if given.markdown:
        print(f"written: {report.write_markdown(given.markdown)}")


if __name__ == "__main__":
    main()
