"""Every test that needs a GPU, and a bench of steps against torch's DDP: `make gpu-check`.

python -m tests.gpu
python -m tests.gpu --output .             to another folder than benchmarks/results
python -m tests.gpu --device cpu --small   a trial of all programs, on a CPU
python -m tests.gpu --device later --small   the same on the test device
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.machine import Accelerator, missing
from tests.gpu.parts import ROOT, Part, run_parts

LIMIT_S = 340.0
"""The limit of all parts together: with the build of the core it stays below six minutes."""
DEADLINES_S = {
    "first": 50.0,
    "torch": 90.0,
    "paddle": 60.0,
    "gpt": 50.0,
    "cnn": 50.0,
    "toy": 30.0,
    "several": 50.0,
}
"""The limits of single parts. If each takes all of its own, LIMIT_S cuts the last ones."""
TRIAL_PATIENCE = 10.0
"""Times these in a trial without a GPU, on a machine that may be busy."""
GPU_TESTS = {
    "torch": ("multiprocess/test_ddp_gpu*.py",),
    "paddle": ("multiprocess/test_paddle_gpu*.py", "device/test_paddle_*.py"),
}
"""Files under tests, by framework."""


def plan(
    device: str,
    count: int,
    results: Path,
    *,
    small: bool = False,
    models: Sequence[str] = ("gpt", "cnn", "toy"),
    tests: bool = True,
) -> list[Part]:
    """The parts of a check, the most informative ones first: the last ones may find no time.

    Args:
        device: Of `tests.gpu.device.KINDS`.
        count: Number of GPUs.
        results: The folder for the benches' results.
        small: Whether the models are in their small forms, and rounds few.
        models: Those of the bench.
        tests: Whether to run the tests.
    """
    on_gpu = device == "cuda"
    single = "gloo" if device == "cpu" else "nccl"
    bench = functools.partial(_bench, device=device, results=results, small=small)
    first = ("-m", "tests.gpu.first", "--device", device)
    parts = [Part("start-up, one rank, one backward", first, DEADLINES_S["first"], ranks=1)]
    parts += [_tests(framework) for framework in GPU_TESTS] if tests else []
    parts += [bench(model, single, 1) for model in models]
    parts.append(bench("toy", "gloo", 2))
    few = "" if count > 1 or not on_gpu else f"{count} GPU here, and NCCL wants one for each rank"
    parts.append(bench("cnn" if "cnn" in models else "toy", single, max(2, count), absent=few))
    if on_gpu:
        return parts
    return [dataclasses.replace(part, deadline_s=TRIAL_PATIENCE * part.deadline_s) for part in parts]


def _tests(framework: str) -> Part:
    found = (path for pattern in GPU_TESTS[framework] for path in (ROOT / "tests").glob(pattern))
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    # Warnings of other versions of torch and NCCL about themselves are no failures of ours.
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-n", "0")
    has_it = importlib.util.find_spec(framework) is not None
    absent = "" if has_it else f"{framework} is not installed"
    return Part(f"tests, {framework}", (*options, *files), DEADLINES_S[framework], absent=absent)


def _bench(
    model: str,
    backend: str,
    ranks: int,
    *,
    device: str,
    results: Path,
    small: bool,
    absent: str = "",
) -> Part:
    result = results / f"{model}-{backend}-{ranks}.json"
    command = ["-m", "tests.gpu.steps", "--model", model, "--backend", backend, "--device", device]
    command += ["--result", str(result)]
    if small:
        command += ["--form", "small", "--rounds", "2", "--sample-s", "0.001", "--losses", "4"]
    words = "1 rank" if ranks == 1 else f"{ranks} ranks"
    name = f"bench, {model}, {words} over {backend}"
    deadline_s = DEADLINES_S["several" if ranks > 1 else model]
    return Part(name, tuple(command), deadline_s, ranks, absent, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "later", "cpu"))
    parser.add_argument("--models", default="gpt,cnn,toy")
    parser.add_argument("--small", action="store_true", help="small forms of the models, and few rounds")
    parser.add_argument("--no-tests", action="store_true", help="only the bench")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="most seconds of all parts together")
    parser.add_argument("--json", type=Path, help="the file for all samples (default: beside the table)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="a folder")
    given = parser.parse_args()
    why = missing(given.device)
    if why:
        print(f"gpu-check: {why}", file=sys.stderr)
        return 1
    # A core dump of torch takes longer to write than a part may run.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # These import Paceline, which may be absent when only the reason is printed.
    from benchmarks.report import Machine
    from tests.gpu.report import make_report

    gpu, machine = Accelerator.here(given.device), Machine.here()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        parts = plan(
            given.device,
            gpu.count,
            Path(folder),
            small=given.small,
            models=given.models.split(","),
            tests=not given.no_tests,
        )
        ended = run_parts(parts, given.limit_s, lambda line: print(line, flush=True))
        found = [
            json.loads(part.result.read_text()) for part in parts if part.result and part.result.exists()
        ]
    report = make_report(gpu, machine, ended, found, "make gpu-check")
    given.output.mkdir(parents=True, exist_ok=True)
    name = f"gpu_{gpu.slug}"
    report.write_markdown(given.output / f"{name}.md")
    report.write_json(given.json or given.output / f"{name}.json")
    # The output of failed parts has been shown.
    dataclasses.replace(report, notes=[note.partition("\n")[0] for note in report.notes]).show()
    print(f"written: {given.output / name}.md")
    return 0 if report.is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
