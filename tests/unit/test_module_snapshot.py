"""The earlier contents of a module, against the present ones."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from paceline._core import ModuleSnapshot


class Tensor:
    """The attributes of a tensor that a snapshot reads."""

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad


def test_every_change_is_seen() -> None:
    weight, bias, frozen = Tensor(True), Tensor(True), Tensor(False)
    parameters, children = {"weight": weight, "bias": bias, "none": None}, {"child": SimpleNamespace()}
    snapshot = ModuleSnapshot([parameters, {}, children], "requires_grad", [weight, bias], [frozen])
    assert snapshot.is_unchanged()
    for dictionary, name, other in (
        (parameters, "weight", Tensor(True)),
        (parameters, "none", bias),
        (parameters, "more", None),
        (children, "child", None),
    ):
        before = dict(dictionary)
        dictionary[name] = other
        assert not snapshot.is_unchanged()
        dictionary.clear()
        assert not snapshot.is_unchanged()
        dictionary.update(before)
        assert snapshot.is_unchanged()
    for tensor in (weight, bias, frozen):
        tensor.requires_grad = not tensor.requires_grad
        assert not snapshot.is_unchanged()
        tensor.requires_grad = not tensor.requires_grad
    assert snapshot.is_unchanged()


def test_nothing_new_passes_for_what_was_dropped() -> None:
    children = {"child": SimpleNamespace()}
    snapshot = ModuleSnapshot([children], "requires_grad", [], [])
    for _ in range(50):  # otherwise the freed tensor's memory would be used again at once
        children["child"] = None
        children["child"] = SimpleNamespace()
        assert not snapshot.is_unchanged()


def test_what_it_holds_goes_with_it() -> None:
    child = Tensor(True)
    children, alive = {"child": child}, weakref.ref(child)
    snapshot = ModuleSnapshot([children], "requires_grad", [], [])
    del child, children["child"]
    assert alive() is not None and not snapshot.is_unchanged()
    del snapshot
    assert alive() is None


def test_an_error_of_a_tensor_is_passed_on() -> None:
    with pytest.raises(AttributeError, match="requires_grad"):
        ModuleSnapshot([], "requires_grad", [object()], []).is_unchanged()


def test_a_circle_through_it_is_collected() -> None:
    parameters = {"weight": Tensor(True)}
    parameters["weight"].snapshot = ModuleSnapshot(
        [parameters], "requires_grad", list(parameters.values()), []
    )
    alive = weakref.ref(parameters["weight"])
    del parameters
    gc.collect()
    assert alive() is None
