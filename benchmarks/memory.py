"""Peak memory of gradients and their buckets in a training step, or memory of a whole training with Adam."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.job import CaseFailed, Job, Launch
from benchmarks.report import Report
from benchmarks.runner import Benchmark, Case, Settings, no_torch, rows_of
from paceline.units import format_size

STEPS_PER_ROUND = 4
SAMPLE_EVERY_S = 0.002
# Freed memory is returned at once, so that the measurement shows memory in use and not what malloc keeps.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _case(worker: str, key: str, label: str, **options: Any) -> Case:
    target = f"benchmarks.workers.{worker}"
    return Case(key, label, target, options, no_torch, lambda ranks: Launch(environment=_MALLOC))


def _gradients(key: str, label: str, **options: Any) -> Case:
    return _case("torch_step:Memory", key, label, **options)


def _training(key: str, label: str, **options: Any) -> Case:
    return _case("torch_training:TrainingMemory", key, label, **options)


_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_SHARED: dict[str, Any] = {"share_parameters": True}
_ZERO: dict[str, Any] = {"wrapper": "torch", "optimizer": "zero"}
_OURS: dict[str, Any] = {"wrapper": "paceline", "optimizer": "paceline"}
CASES = {
    "gradients": (
        _gradients("alone", "alone, no synchronisation", variant="alone"),
        _gradients("torch", "torch DDP on Gloo", variant="torch"),
        _gradients("torch_view", "torch DDP on Gloo, bucket view", variant="torch", **_VIEW),
        _gradients("paceline", "Paceline DDP", variant="paceline"),
        _gradients("paceline_view", "Paceline DDP, bucket view", variant="paceline", **_VIEW),
    ),
    "training": (
        _training("torch_view", "torch DDP, bucket view", wrapper="torch", options=_VIEW),
        _training("zero", "ZeroRedundancyOptimizer", **_ZERO),
        _training(
            "zero_view",
            "ZeroRedundancyOptimizer, bucket views",
            **_ZERO,
            options=_VIEW,
            optimizer_options={"parameters_as_bucket_view": True},
        ),
        _training("paceline_view", "Paceline, bucket view", wrapper="paceline", options=_VIEW),
        _training("paceline_sharded", "ShardedOptimizer, bucket view", **_OURS, options=_VIEW),
        _training("paceline_shared", "one model, ShardedOptimizer", **_OURS, options=_SHARED),
        _training(
            "paceline_shared_view",
            "one model, ShardedOptimizer, bucket view",
            **_OURS,
            options=_SHARED | _VIEW,
        ),
        _training(
            "paceline_scatter",
            "one model, ShardedOptimizer, scatter",
            **_OURS,
            options=_SHARED | {"reduce": "scatter"},
        ),
    ),
}
_REFERENCES = ("torch_view", "zero", "zero_view")


def run(settings: Settings, given: argparse.Namespace) -> Report:
    """Train with each case, one after the other, and report."""
    measured = _Measured(settings)
    return (_report_training if given.of == "training" else _report_gradients)(settings, measured)


def _report_gradients(settings: Settings, measured: _Measured) -> Report:
    ranks = settings.ranks

    def of_one_rank(sizes: _Sizes) -> dict[str, Any]:
        return {
            "gradient_bytes": sizes.build_bytes,
            "peak_bytes": sizes.peak_bytes // ranks,
            "after_bytes": sizes.after_bytes // ranks,
            "samples": sizes.samples,
        }

    def cells(sizes: _Sizes) -> list[str]:
        each = of_one_rank(sizes)
        shown = [format_size(each[name]) for name in ("gradient_bytes", "peak_bytes", "after_bytes")]
        return [*shown, f"{each['peak_bytes'] / each['gradient_bytes']:.2f}"]

    return settings.report(
        "memory",
        f"memory of a training step, {ranks} ranks on one host",
        ["case", "gradients", "peak above the bare model", "after a step", "peak / gradients"],
        measured.rows(cells, 4),
        notes=[
            "Sum of PSS over ranks, without files, divided by their number: every page is counted once. "
            f"Sampled every {SAMPLE_EVERY_S * 1000:.0f} ms over {settings.rounds * STEPS_PER_ROUND} steps.",
            "The bare model: its weights, before wrapping, with torch loaded and the group formed.",
            *measured.notes,
        ],
        data={"rows": measured.as_data(of_one_rank)},
        is_complete=measured.is_complete,
    )


def _report_training(settings: Settings, measured: _Measured) -> Report:
    ranks = settings.ranks
    parameter_bytes = next((sizes.build_bytes for sizes in measured.sizes.values()), 0)

    def cells(sizes: _Sizes) -> list[str]:
        others = [measured.sizes.get(key) for key in _REFERENCES]
        return [
            format_size(sizes.after_bytes),
            f"{sizes.after_bytes / sizes.build_bytes:.2f}",
            *(f"{sizes.after_bytes / other.after_bytes:.2f}" if other else "-" for other in others),
            format_size(sizes.peak_bytes),
        ]

    return settings.report(
        f"memory-of-training-{ranks}-ranks",
        f"memory of a training with Adam, {ranks} ranks on one host",
        [
            "case",
            "after a step",
            "/ parameters",
            "of torch DDP's",
            "of ZeRO's",
            "of ZeRO's, views",
            "peak",
        ],
        measured.rows(cells, 6),
        notes=[
            "Sum of PSS over all ranks, without files (every page counts once), minus that before the model "
            "was created: its parameters, gradients and Adam's state. / parameters: divided by the "
            f"{format_size(parameter_bytes)} of one copy of the parameters (four layers of 16 MiB, float32).",
            "of torch DDP's, ZeRO's, ZeRO's with views: relative to the first three cases. bucket view: "
            ".grad is where it is averaged (gradient_as_bucket_view); bucket views: also ZeRO's "
            "parameters_as_bucket_view.",
            f"peak: sampled every {SAMPLE_EVERY_S * 1000:.0f} ms over "
            f"{settings.rounds * STEPS_PER_ROUND} steps; includes temporary memory of the optimizer and the "
            "backward.",
            *measured.notes,
        ],
        data={"parameter_bytes": parameter_bytes, "rows": measured.as_data(asdict)},
        is_complete=measured.is_complete,
    )


@dataclass(frozen=True)
class _Sizes:
    """The memory of a job, less that of its ranks before.

    Attributes:
        build_bytes: The result of `build` on one rank.
        peak_bytes: The maximum of all ranks together.
        after_bytes: The memory of all ranks after a step.
        samples: How many times memory was read.
    """

    build_bytes: int
    peak_bytes: int
    after_bytes: int
    samples: int


class _Measured:
    """Measures the memory of each case, one case after the other: `build` on each rank, then `train`.

    Attributes:
        sizes: The sizes of the cases without a failure, by key.
        failures: Why the others failed, by key.
        notes: Which case is absent, and which failed and why.
    """

    def __init__(self, settings: Settings) -> None:
        self._cases, absent = settings.able()
        self.sizes: dict[str, _Sizes] = {}
        self.failures: dict[str, str] = {}
        for case in self._cases:
            settings.show(case.label)
            try:
                self.sizes[case.key] = _measure(case, settings)
            except CaseFailed as error:
                self.failures[case.key] = str(error)
        labels = {case.key: case.label for case in self._cases}
        self.notes = [*absent, *(f"{labels[key]} failed: {why}" for key, why in self.failures.items())]

    @property
    def is_complete(self) -> bool:
        """Whether no case of Paceline failed."""
        return not any(case.is_ours and case.key in self.failures for case in self._cases)

    def rows(self, cells: Callable[[_Sizes], list[str]], width: int) -> list[list[str]]:
        """Return a row for each case."""
        return rows_of(self._cases, self.sizes, width, lambda key: cells(self.sizes[key]))

    def as_data(self, of: Callable[[_Sizes], dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return plain values for JSON, by key."""
        failed = {key: {"failure": why} for key, why in self.failures.items()}
        return {**{key: of(sizes) for key, sizes in self.sizes.items()}, **failed}


def _measure(case: Case, settings: Settings) -> _Sizes:
    with Job(case.label, case.target, settings.ranks, case.launch(settings.ranks), case.options) as job:
        job.start()
        build_bytes: int = job.call("build")[0]
        before = pss_bytes(job.pids)
        with _Peak(job.pids) as peak:
            job.call("train", limit_s=300.0, steps=settings.rounds * STEPS_PER_ROUND)
            after = pss_bytes(job.pids)
    return _Sizes(build_bytes, peak.bytes - before, after - before, peak.samples)


def pss_bytes(pids: Sequence[int]) -> int:
    """Return the sum of the processes' proportional set sizes, which divide a page among its users."""
    return sum(parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids)


def parse_pss(rollup: str) -> int:
    """Return the bytes in a smaps_rollup file that do not map a file.

    Pages of libraries are left out: other programs on the machine share them, so a process's part of them
    changes when another program starts. Linux before 5.4 does not distinguish them.
    """
    sizes = {name: value for name, _, value in (line.partition(":") for line in rollup.splitlines())}
    names = ("Pss_Anon", "Pss_Shmem") if "Pss_Shmem" in sizes else ("Pss",)
    return sum(int(sizes[name].split()[0]) for name in names) * 1024


class _Peak:
    """Samples the sum of PSS in a thread while the `with` block runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self.samples = 0
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            try:
                self.bytes = max(self.bytes, pss_bytes(self._pids))
            except (OSError, KeyError):  # a rank has died; the job's own call raises why
                return
            self.samples += 1


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--of",
        choices=tuple(CASES),
        default="gradients",
        help="gradients above the bare model (default), or parameters, gradients and Adam's state",
    )


BENCHMARK = Benchmark(
    "memory of gradients and their buckets, or of a whole training with Adam",
    5,
    run,
    lambda given: CASES[given.of],
    _add_arguments,
    has_starts=False,
)
