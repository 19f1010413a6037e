"""The time of a step over a process group on the host, compared with torch's DDP; no GPU is needed.

python -m tests.gpu.host --markdown benchmarks/results      on an idle machine; some minutes
python -m tests.gpu.host --models gpt --ranks 1 --rounds 5  a part of it
python -m tests.gpu.host --compile --markdown benchmarks/results   the same, compiled, which takes longer

With a fast GPU the host is the limit of a step: it runs Python and launches kernels. This bench uses the
models of `make gpu-check` with all their tensors, each of a few elements, on the CPU and over Gloo. So the
time of a step beyond that of the model alone is the host's time for each parameter, bucket, buffer and
backward. A single rank does all that several do. Losses are compared with torch DDP's before anything is
timed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Machine, Report
from benchmarks.samples import Samples, overhead, slowest_by_round, slowest_median
from paceline.units import format_time
from tests.gpu.parts import Ended, Part, run_parts
from tests.gpu.report import differing, quoted
from tests.gpu.ways import ALONE, BATCHED, INCUMBENT, LABELS

MODELS = ("cnn", "gpt", "toy")
_DEADLINE_S = 600.0
_LOSSES = 20
_DRAWS = 1000


def part(model: str, ranks: int, results: Path, rounds: int, sample_s: float, *, is_compiled: bool) -> Part:
    """The bench of one model."""
    result = results / f"{model}-{ranks}.json"
    command = ["-m", "tests.gpu.steps", "--model", model, "--form", "tiny", "--device", "cpu"]
    command += ["--backend", "gloo", "--no-optimizer", "--losses", str(_LOSSES), "--rounds", str(rounds)]
    command += ["--sample-s", str(sample_s), "--result", str(result)]
    if is_compiled:
        command.append("--compile")
    name = f"{model}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return Part(name, tuple(command), _DEADLINE_S, ranks, result=result)


def make_report(
    machine: Machine,
    ended: Sequence[Ended],
    found: Sequence[dict[str, Any]],
    command: str,
    theme: str = "host-overhead",
) -> Report:
    """The report of the benches' results; see `steps`."""
    rows: list[list[str]] = []
    for each in found:
        rows += [*_rows(each), []]
    wrong = differing(found)
    return Report(
        theme=theme,
        title="what a step over a process group takes on the host, beside torch's DDP",
        command=command,
        machine=machine,
        columns=[
            "model",
            "ranks",
            "way",
            "step",
            "overhead",
            "95 % interval",
            "this / torch's overhead",
            "/ torch's, batched",
        ],
        rows=rows,
        notes=[
            "step: a forward and a backward on the CPU over Gloo, tiny tensors; the median over rounds of "
            "the slowest rank. All ways take turns in one process. A single rank does all that several do.",
            "overhead: step minus the step alone in the same round, the median over rounds. this / torch's "
            "overhead: divided by that of torch's way with the same option; 95 % interval by drawing rounds. "
            "batched: torch's with batched_grad_copy, where torch has it.",
            f"Before timing, the losses of {_LOSSES} steps with Adam were compared with torch DDP's.",
            *(f"{each.part.name}: {each.summary}.{quoted(each)}" for each in ended if not each.is_good),
            *wrong,
        ],
        data={"benches": list(found)},
        is_complete=not wrong and all(each.is_good for each in ended),
        text_columns=3,
    )


def _rows(found: dict[str, Any]) -> list[list[str]]:
    steps: dict[str, Samples] = found["steps_s"]
    sizes = f"{found['tensors']} parameters, {found['buffers']} buffers"
    rows = []
    for key, each in steps.items():
        cells = ["", ""] if rows else [f"{found['model']}, {sizes}", str(found["world_size"])]
        cells += [LABELS[key], format_time(slowest_median(each))]
        if key == ALONE:
            rows.append([*cells, "-", "-", "-", "-"])
            continue
        added = overhead(each, steps[ALONE])
        cells += [format_time(added.median), f"{format_time(added.low)} .. {format_time(added.high)}"]
        rows.append([*cells, *_ratios(key, steps)])
    return rows


def _ratios(key: str, steps: dict[str, Samples]) -> list[str]:
    if not key.startswith("paceline"):
        return ["-", "-"]
    copies = key == "paceline" and BATCHED in steps
    same = key.replace("paceline", INCUMBENT)
    return [_ratio(key, same, steps), _ratio(key, BATCHED, steps) if copies else "-"]


def _ratio(key: str, theirs: str, steps: dict[str, Samples]) -> str:
    rounds = list(zip(*(slowest_by_round(steps[each]) for each in (key, theirs, ALONE)), strict=True))
    found = _ratio_of_medians(rounds)
    if math.isinf(found):
        return "-"  # theirs is not distinguishable from zero
    draw = random.Random(0)
    drawn = sorted(_ratio_of_medians(draw.choices(rounds, k=len(rounds))) for _ in range(_DRAWS))
    low, high = drawn[_DRAWS // 40], drawn[-1 - _DRAWS // 40]
    return f"{found:.2f} ({low:.2f} .. {high:.2f})"


def _ratio_of_medians(rounds: Sequence[tuple[float, ...]]) -> float:
    ours = statistics.median(ours - alone for ours, _, alone in rounds)
    theirs = statistics.median(theirs - alone for _, theirs, alone in rounds)
    return ours / theirs if theirs > 0 else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ranks", default="1,2", help="of each model, one after the other")
    parser.add_argument("--rounds", type=int, default=25, help="samples of each way")
    parser.add_argument("--sample-s", type=float, default=0.15, help="seconds that a sample takes at least")
    parser.add_argument("--compile", action="store_true", help="compile the models, after they are wrapped")
    parser.add_argument("--json", type=Path, help="a file for all samples")
    parser.add_argument("--markdown", type=Path, help="a file or a folder for the table")
    given = parser.parse_args()
    machine = Machine.here()
    with tempfile.TemporaryDirectory(prefix="host-overhead-") as folder:
        parts = [
            part(model, ranks, Path(folder), given.rounds, given.sample_s, is_compiled=given.compile)
            for ranks in map(int, given.ranks.split(","))
            for model in given.models.split(",")
        ]
        limit_s = sum(each.deadline_s for each in parts)
        ended = run_parts(parts, limit_s, lambda line: print(line, flush=True))
        results = [each.result for each in parts if each.result and each.result.exists()]
        found = [json.loads(result.read_text()) for result in results]
    command = shlex.join(["python", "-m", "tests.gpu.host", *sys.argv[1:]])
    theme = "host-overhead-compiled" if given.compile else "host-overhead"
    report = make_report(machine, ended, found, command, theme)
    report.show()
    if given.json:
        report.write_json(given.json)
    if given.markdown:
        print(f"written: {report.write_markdown(given.markdown)}")
    return 0 if report.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
