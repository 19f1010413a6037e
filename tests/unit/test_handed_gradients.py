"""The mapping of gradients that were handed over, against a dict."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline.collectives.failures  # noqa: F401  # it turns the core's failures into exceptions
from paceline._core import HandedGradients, HookOrder


class Gradient:
    """An object whose deletion can be observed."""


INDEX = st.integers(0, 70)
CHANGES = st.lists(st.one_of(INDEX, st.just("clear")))


@given(CHANGES)
def test_it_does_what_a_dict_does(changes):
    handed, expected = HandedGradients(), {}
    for change in changes:
        if change == "clear":
            handed.clear()
            expected.clear()
        else:
            handed[change] = expected[change] = Gradient()
        assert len(handed) == len(expected)
        assert list(handed) == list(expected)
        assert all(handed[index] is gradient for index, gradient in expected.items())
    assert [index in handed for index in range(80)] == [index in expected for index in range(80)]


def test_gradients_live_as_long_as_they_are_in_it():
    handed, gradient = HandedGradients(), Gradient()
    alive = weakref.ref(gradient)
    handed[3] = gradient
    del gradient
    gc.collect()
    assert alive() is handed[3]
    handed.clear()
    assert alive() is None
    handed[3] = gradient = Gradient()
    alive = weakref.ref(gradient)
    handed[3] = None  # replaced, in the same place
    del gradient
    assert alive() is None
    assert list(handed) == [3]


def test_what_ends_with_a_gradient_may_look_into_it():
    handed, seen = HandedGradients(), []
    gradients = [Gradient() for _ in range(3)]
    for index, gradient in enumerate(gradients):
        handed[index] = gradient
        weakref.finalize(gradient, lambda index: seen.append((index in handed, len(handed))), index)
    finalizer = Gradient()
    handed[5] = finalizer
    weakref.finalize(finalizer, handed.__setitem__, 7, "late")
    del gradient, gradients, finalizer
    handed.clear()
    assert seen == [(False, 0)] * 3
    assert list(handed) == [7]
    assert handed[7] == "late"


def test_a_circle_through_it_is_collected():
    handed, gradient = HandedGradients(), Gradient()
    alive = weakref.ref(gradient)
    gradient.handed = handed
    handed[0] = gradient
    del handed, gradient
    gc.collect()
    assert alive() is None


def test_wrong_keys_raise():
    handed = HandedGradients()
    with pytest.raises(KeyError, match="2"):
        handed[2]
    for key, error in ((-1, OverflowError), ("a", TypeError), (2**70, OverflowError), (2**62, MemoryError)):
        with pytest.raises(error):
            handed[key] = "gradient"
    with pytest.raises(TypeError, match="stays"):
        del handed[0]
    with pytest.raises(TypeError):
        "a" in handed  # noqa: B015
    assert not list(handed)


class Parameter:
    """A framework parameter's view of its gradient."""

    def __init__(self) -> None:
        self.grad = Gradient()
        self.grad.version = 0


def test_it_finds_gradients_that_are_not_those_handed_over():
    parameters = [Parameter() for _ in range(4)]
    handed = HandedGradients()
    handed[0] = parameters[1].grad
    assert handed.look()[0] == []  # its places are unknown
    handed.clear()
    handed.watch([*parameters[:3], None], "grad", "version")
    for index in (3, 1, 2):
        handed[index] = parameters[index].grad
    parameters[3].grad.version += 1  # not looked at
    assert handed.look()[0] == []
    parameters[2].grad.version += 1
    assert handed.look()[0] == [2]
    parameters[1].grad = None
    assert handed.look()[0] == [1, 2]
    handed.clear()
    handed[2] = parameters[2].grad
    assert handed.look()[0] == []


def test_our_hooks_are_the_last_ones():
    parameters, hooks = [Parameter() for _ in range(3)], [object() for _ in range(3)]
    for parameter, hook in zip(parameters, hooks, strict=True):
        parameter.hooks = OrderedDict({1: hook})
    order = HookOrder(parameters, hooks, "hooks")
    assert order.not_last() == []
    parameters[1].hooks[2] = "another"
    parameters[2].hooks = None
    assert order.not_last() == [1, 2]
    del parameters[1].hooks[2]
    assert order.not_last() == [2]
    with pytest.raises(ValueError, match="one hook"):
        HookOrder(parameters, hooks[1:], "hooks")
    with pytest.raises(AttributeError):
        HookOrder(parameters, hooks, "elsewhere").not_last()
