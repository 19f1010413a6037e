"""The pool of forked ranks, with programs that need no framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.differential import pool
from tests.differential.pool import World
from tests.differential.records import Record


def _make_rank(rank: int, world_size: int, job: str, folder: Path) -> pool.Run:
    def run(program: dict[str, Any], options: dict[str, Any]) -> Record:
        time.sleep(program["slow_s"] if rank == 1 else 0)
        return Record()

    return run


def test_a_rank_that_was_asked_to_leave_gets_no_further_program(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_S", 0.05)
    world = World(_make_rank, 2, deadline_s=30)
    try:
        for slow_s in (0.5, 0, 0):  # the first program's other rank is asked to leave, and both reach the end
            records = world.run({"slow_s": slow_s}, {})
            assert all(isinstance(record, Record) for record in records), records
    finally:
        world.close()
