"""A kill while a checkpoint is written does not damage the checkpoint before it."""

from __future__ import annotations

from pathlib import Path

from tests.harness.command import run_module

KILLS = 20


def test_the_newest_checkpoint_is_whole_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    status, output = run_module(
        "tests.multiprocess.killed_checkpoints", str(tmp_path), str(KILLS), "0", deadline_s=600.0
    )
    assert status == 0, output
