"""The progress of each rank with a step, as the ranks of one host see it."""

from __future__ import annotations

import numpy as np

from paceline import _core


def step_tables(world: int) -> list[_core.StepTable]:
    """One for each rank, on the same memory."""
    alignment = _core.ALIGNMENT_BYTES
    memory = np.zeros(_core.StepTable.nbytes(world) + alignment, np.uint8)
    at = -(-memory.ctypes.data // alignment) * alignment
    made = [_core.StepTable(at, world, rank) for rank in range(world)]
    _KEPT.append(memory)
    return made


_KEPT: list[object] = []


def test_a_step_is_whole_when_every_part_is_written() -> None:
    both = step_tables(2)
    assert both[0].is_whole
    assert both[0].decide(True) and both[1].decide(True)
    assert not both[1].is_whole
    for rank, step_table in enumerate(both):
        step_table.finish(rank)
    assert both[0].is_whole and both[1].is_whole
    assert [step_table.step for step_table in both] == [1, 1]


def test_who_speaks_first_decides() -> None:
    both = step_tables(2)
    assert not both[1].decide(False)
    assert not both[0].decide(True)
    assert both[0].is_whole


def test_a_rank_at_the_next_step_changes_nothing_for_one_at_this_step() -> None:
    """Ranks 0 and 2 complete the step of rank 1. Rank 0 is done first, and cannot begin another step."""
    first, lost, last = step_tables(3)
    assert all(step_table.decide(True) for step_table in (first, lost, last))
    first.finish(0)
    last.finish(2)
    assert first.claim(1) == 0 and last.claim(1) == 0
    first.open_block(1, 0, [])
    assert last.progress(1) == (0, True)
    first.close_block(1, 0)
    first.finish(1)
    assert not first.decide(False)
    assert last.is_finished(1) and last.progress(1) == (1, False)
    assert last.claim(1) == 0, "it would make the part of rank 1 once more"
