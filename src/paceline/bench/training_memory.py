"""`paceline bench memory --of training`: what parameters, gradients and Adam's state take, of all ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.bench.conductor import Launch
from paceline.bench.contest import Entry, Plan, no_torch
from paceline.bench.machine import Machine
from paceline.bench.memory import MALLOC, STEPS_PER_ROUND, Measured
from paceline.bench.pss import SAMPLE_EVERY_S
from paceline.bench.report import Report
from paceline.bench.units import format_size


def _entry(key: str, label: str, **options: Any) -> Entry:
    target = "paceline.torch.bench.memory:TrainingMemory"
    return Entry(key, label, target, options, no_torch, lambda ranks: Launch(environment=MALLOC))


_VIEW = {"gradient_as_bucket_view": True}
_SHARED = {"share_parameters": True}
_ZERO: dict[str, Any] = {"wrapper": "torch", "optimizer": "zero"}
_OURS: dict[str, Any] = {"wrapper": "paceline", "optimizer": "paceline"}

ENTRIES = (
    _entry("torch_view", "torch DDP, bucket view", wrapper="torch", options=_VIEW),
    _entry("zero", "ZeroRedundancyOptimizer", **_ZERO),
    _entry(
        "zero_view",
        "ZeroRedundancyOptimizer, bucket views",
        **_ZERO,
        options=_VIEW,
        optimizer_options={"parameters_as_bucket_view": True},
    ),
    _entry("paceline_view", "Paceline, bucket view", wrapper="paceline", options=_VIEW),
    _entry("paceline_sharded", "ShardedOptimizer, bucket view", **_OURS, options=_VIEW),
    _entry("paceline_shared", "one model, ShardedOptimizer", **_OURS, options=_SHARED),
    _entry(
        "paceline_shared_view", "one model, ShardedOptimizer, bucket view", **_OURS, options=_SHARED | _VIEW
    ),
    _entry(
        "paceline_scatter",
        "one model, ShardedOptimizer, scatter",
        **_OURS,
        options=_SHARED | {"reduce": "scatter"},
    ),
)
_REFERENCES = ("torch_view", "zero", "zero_view")


def run(plan: Plan) -> Report:
    """Train with each contender, one after the other, and report what all ranks have in memory."""
    machine = Machine.here()
    measured = Measured(plan, ENTRIES)
    parameter_bytes = next((sizes.build_bytes for sizes in measured.sizes.values()), 0)
    return Report(
        theme=f"memory-of-training-{plan.ranks}-ranks",
        title=f"memory of a training with Adam, {plan.ranks} ranks on one host",
        command=plan.command,
        machine=machine,
        columns=[
            "way",
            "after a step",
            "/ parameters",
            "of torch DDP's",
            "of ZeRO's",
            "of ZeRO's, views",
            "peak",
        ],
        rows=[_row(entry, measured) for entry in measured.entries],
        notes=[
            "Sum of PSS over all ranks, without files (every page counts once), less that before the model "
            "was made: its parameters, gradients and Adam's state. / parameters: divided by the "
            f"{format_size(parameter_bytes)} of one copy of the parameters (four layers of 16 MiB, float32).",
            "of torch DDP's, ZeRO's, ZeRO's with views: the first three ways. bucket view: .grad lies where "
            "it is averaged (gradient_as_bucket_view); bucket views: ZeRO's parameters_as_bucket_view, too.",
            f"peak: sampled every {SAMPLE_EVERY_S * 1000:.0f} ms over {plan.rounds * STEPS_PER_ROUND} steps; "
            "with what the optimizer and the backward need for a moment.",
            *measured.notes,
        ],
        data={"ranks": plan.ranks, "parameter_bytes": parameter_bytes, "rows": measured.as_data(asdict)},
        is_complete=not measured.ours_failed,
    )


def _row(entry: Entry, measured: Measured) -> list[str]:
    sizes = measured.sizes.get(entry.key)
    if sizes is None:
        return [entry.label, "failed", *["-"] * 5]
    others = [measured.sizes.get(key) for key in _REFERENCES]
    return [
        entry.label,
        format_size(sizes.after_bytes),
        f"{sizes.after_bytes / sizes.build_bytes:.2f}",
        *(_part(sizes.after_bytes, other.after_bytes) if other else "-" for other in others),
        format_size(sizes.peak_bytes),
    ]


def _part(size: int, of: int) -> str:
    return f"{size / of:.2f}"
