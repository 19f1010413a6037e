"""The end of a backward with parameters that no hook has handed over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.reducer.backward.remaining_gradients import RemainingGradients
from paceline.reducer.backward.state import BackwardState
from paceline.reducer.backward.static_graph import GraphVariety, StaticGraph
from paceline.reducer.backward_reports import digest_of

NAMES = ["a", "b", "c", "d"]


class Model:
    """Four parameters, of which some have gradients.

    Args:
        handed: Parameters that hooks have handed over.
        gradients: Parameters that have one.
        frozen: Frozen parameters.
        delayed: Parameters that wait for another one's gradient.
        frozen_later: Parameters that were frozen after the forward.
    """

    def __init__(
        self,
        handed: set[int],
        gradients: set[int],
        frozen: set[int] = frozenset(),
        delayed: Any = (),
        frozen_later: set[int] = frozenset(),
    ) -> None:
        self.events: list[tuple[str, Any]] = []
        self.state = BackwardState(0, 2)
        for index in sorted(handed):
            self.state.handed[index] = object()
        self.state.graphs = SimpleNamespace(frozen=lambda: frozenset(frozen))
        self.variety = GraphVariety(len(NAMES) - len(delayed))
        self.front_end = SimpleNamespace(
            tensors=SimpleNamespace(names=NAMES, delayed=delayed),
            gradients=SimpleNamespace(
                exists=lambda index: index in gradients,
                hand_over_rest=self._hand_over_rest,
                clear=lambda index: self.events.append(("clear", index)),
                leave_out=lambda indices: self.events.append(("leave out", sorted(indices))),
                leave_buffer=lambda indices: self.events.append(
                    ("leave the gradient buffer", sorted(indices))
                ),
                count_unused=lambda indices: self.events.append(("count", sorted(indices))),
                check=lambda: self.events.append(("check", None)),
            ),
            autograd=SimpleNamespace(
                frozen_among=(frozen | frozen_later).intersection, complete=None, find_swapped=list
            ),
            micro_batches=SimpleNamespace(is_used=False),
        )
        self.reducer = SimpleNamespace(mark_ready=lambda index, _: self.events.append(("zeros", index)))

    def _hand_over_rest(self, index: int) -> None:
        self.state.handed[index] = object()
        self.events.append(("hand over", index))

    def unused_parameters(
        self, *, allow_unused: bool = False, static_graph: StaticGraph | None = None
    ) -> RemainingGradients:
        return RemainingGradients(
            self.front_end, self.state, self.variety, static_graph, allow_unused=allow_unused
        )

    def end(self, **options: Any) -> list[tuple[str, Any]]:
        self.unused_parameters(**options).hand_over(self.reducer)
        return self.events


def test_where_hooks_have_handed_over_all_nothing_is_left():
    assert Model({0, 1, 2, 3}, {0, 1, 2, 3}).end() == [("check", None)]


def test_what_has_waited_for_the_end_comes_first():
    model = Model({0, 1, 2}, {0, 1, 2, 3})
    model.front_end.autograd.complete = lambda: model._hand_over_rest(3)
    assert model.end() == [("hand over", 3), ("check", None)]


def test_gradients_of_no_sync_count():
    model = Model({0, 1, 2}, {3})
    model.state.accumulated.add(3)
    assert model.end() == [("hand over", 3), ("check", None)]


def test_a_gradient_from_an_earlier_step_counts_where_parameters_may_be_unused():
    expected = [("hand over", 2), ("leave out", [3]), ("check", None)]
    assert Model({0, 1}, {0, 1, 2}).end(allow_unused=True) == expected
    assert Model({0, 1}, {0, 1, 2}).end() == [("leave out", [2, 3]), ("check", None)]


def test_frozen_parameters_keep_what_they_have_and_are_reported():
    model = Model({0, 1}, {0, 1, 2}, frozen={2, 3})
    assert model.end() == [("leave out", [2, 3]), ("leave the gradient buffer", [2, 3]), ("check", None)]
    assert model.state.status.frozen == digest_of([2, 3])
    later = Model({0, 1}, {0, 1, 2}, frozen_later={2, 3})
    assert later.end() == model.events
    assert later.state.status.frozen == digest_of([2, 3])


@pytest.mark.parametrize("when", ["frozen", "frozen_later"])
def test_what_is_left_of_frozen_parameters_counts_unused_where_that_is_allowed(when):
    model = Model({0, 1}, {0, 1, 2}, **{when: {2, 3}})
    assert model.end(allow_unused=True) == [
        ("leave out", [2, 3]),
        ("leave the gradient buffer", [2, 3]),
        ("count", [2, 3]),
        ("check", None),
    ]
    assert model.state.status.frozen is None


def test_what_no_sync_has_left_of_a_frozen_parameter_is_handed_over():
    model = Model({0, 1}, {0, 1, 2}, frozen={2, 3})
    model.state.accumulated.add(2)
    assert model.end(allow_unused=True)[:2] == [("hand over", 2), ("leave out", [3])]


def test_a_delayed_parameter_without_a_gradient_has_zeros():
    expected = [("leave out", [3]), ("clear", 3), ("zeros", 3), ("leave out", [2]), ("check", None)]
    assert Model({0, 1}, {0, 1}, delayed={3}).end() == expected


@pytest.mark.parametrize("allow_unused", [False, True])
def test_without_data_nothing_is_unused_because_of_this_rank(allow_unused):
    model = Model(set(), set())
    model.unused_parameters(allow_unused=allow_unused).hand_over_nothing(model.reducer)
    marked = [index for what, index in model.events if what == "zeros"]
    assert marked == ([] if allow_unused else [0, 1, 2, 3])


def test_a_promise_that_is_broken_is_reported_in_the_status():
    promised = StaticGraph(NAMES, lambda payload: [payload])
    first = Model({0, 1}, {0, 1})
    first.end(static_graph=promised)
    promised.end_good()
    same, other = Model({0, 1}, {0, 1}), Model({0, 2}, {0, 2})
    same.end(static_graph=promised)
    other.end(static_graph=promised)
    assert [each.state.status.graph_changed for each in (first, same, other)] == [False, False, True]


def test_a_graph_that_varies_is_noticed_without_a_promise():
    model = Model({0, 1}, {0, 1})
    model.end()
    assert model.variety.is_static(1) and not model.variety.is_static(2)
