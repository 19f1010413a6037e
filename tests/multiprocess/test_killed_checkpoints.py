"""A checkpoint that is being written when everything is killed takes nothing away from the one before."""

from __future__ import annotations

from pathlib import Path

from tests.harness.command import run_module

KILLS = 20


def test_the_newest_checkpoint_is_whole_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    status, said = run_module(
        "tests.multiprocess.killed_checkpoints", str(tmp_path), str(KILLS), "0", deadline_s=600.0
    )
    assert status == 0, said
