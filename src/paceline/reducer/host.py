"""The reducer over memory that the ranks of one host share, made from a plan. Imports the core."""

from __future__ import annotations

from paceline import _core
from paceline.reducer.plan import Plan

# kernels.h: enum class DType.
CORE_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
"""Gradients that the core averages."""


def make_host_reducer(group: _core.HostGroup, plan: Plan, *, gradients_in_arena: bool) -> _core.Reducer:
    """An arena in the memory of `group`, filled with zeros, and what averages it. Collective.

    Args:
        group: All ranks that train the model.
        plan: The same on all ranks.
        gradients_in_arena: Gradients will live in the arena; else they are handed over by pointer.

    Example:
        Both ranks write 1 and 3 at `plan.offsets[0]` after `reducer.arena_pointer`, call
        `reducer.mark_ready(0, 0)` and `reducer.finish(1, False)`, and find 2 there.
    """
    return _core.Reducer(
        group,
        plan.arena_bytes,
        list(plan.offsets),
        [spec.numel for spec in plan.parameters],
        [CORE_DTYPES[spec.dtype] for spec in plan.parameters],
        [(bucket.begin_byte, bucket.end_byte) for bucket in plan.buckets],
        assigns_chunks=not gradients_in_arena,
    )
