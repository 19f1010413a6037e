"""Deferred gradients are handed over at the trigger, in whichever memory gradients are averaged."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from paceline.reducer.backward.state import RUNNING, BackwardState  # noqa: E402
from paceline.torch.backward.deferred_gradients import DeferredGradients  # noqa: E402

TRIGGER, DELAYED, UNUSED = 0, 1, 2


def test_what_is_delayed_is_handed_over_at_the_trigger() -> None:
    state, gradient = BackwardState(0, 1), torch.zeros(1)
    state.phase = RUNNING
    handed: list[int] = []
    parted: list[int] = []
    delayed = {DELAYED, UNUSED}
    late = DeferredGradients(state, handed.append, delayed, is_learning=False, part=parted.extend)
    trigger = late.with_trigger(lambda _: handed.append(TRIGGER))
    for _ in range(2):
        for _ in range(2):  # the gradient comes in two contributions
            late.hook(DELAYED)(gradient)
        assert handed == []
        trigger(gradient)
        late.end_backward()
        assert handed == [TRIGGER, DELAYED]
        handed.clear()
    assert parted == [DELAYED, DELAYED]  # once in each backward, after the first contribution
