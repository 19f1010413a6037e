"""The status of a rank while it waits for others over a process group."""

from __future__ import annotations

import pytest

from paceline.reducer.process_group_waits import ProcessGroupWaits


def test_a_late_rank_is_a_warning_at_the_line_of_the_program() -> None:
    waits = ProcessGroupWaits(0, 2, words="Gloo", timeout_s=60.0, warn_after_s=0.01)
    with pytest.warns(RuntimeWarning, match="rank 0 of 2 has waited 0 s for some rank") as caught:
        waits.poll(lambda: bool(len(caught)), "a sum of values")
    assert caught[0].filename == __file__
