"""The copy of gradients between hosts, as Python calls it; tests/cpp/backward_marks_test.cc has the rest."""

from __future__ import annotations

import numpy as np

from paceline import _core


def test_means_of_a_backward_that_ended_well_go_back_although_another_thread_has_closed_it() -> None:
    gradient_buffer, gradient = np.zeros(2, np.float32), np.array([1, 2], np.float32)
    completed: list[int] = []
    marks = _core.BackwardMarks(
        gradient_buffer.ctypes.data, [(0, 8, [0])], lambda: completed.append(0) is not None
    )
    marks.mark_ready(0, gradient.ctypes.data)
    assert completed == [0] and marks.is_complete(0) and gradient_buffer.tolist() == [1, 2]
    gradient_buffer += 10
    assert marks.end_backward(keeps_means=False) == []
    marks.close()
    marks.copy_back()
    assert gradient.tolist() == [11, 12]
