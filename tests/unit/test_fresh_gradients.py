"""Detects whether gradients are still those of the last backward, without reading them all."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.reducer.backward.statistics import FreshGradients


class Held:
    """Gradients as a framework holds them: objects with versions, and their memory."""

    def __init__(self) -> None:
        self.versions = [(1, 0), (2, 0)]
        self.arrays = [np.ones(64, np.float32), np.ones(8, np.float32)]
        self.can_be_read = True

    def fingerprint(self) -> list[tuple[int, int]]:
        return list(self.versions)

    def memory(self) -> tuple[list[int], list[int]] | None:
        if not self.can_be_read:
            return None
        return [array.ctypes.data for array in self.arrays], [array.nbytes for array in self.arrays]


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def fresh(held):
    return FreshGradients(held.fingerprint, held.memory)


def test_nothing_is_known_before_a_backward_is_noted(fresh):
    assert not fresh.is_used
    assert not fresh.are_unchanged()
    assert fresh.is_used


def test_untouched_gradients_are_unchanged(fresh):
    fresh.note()
    assert fresh.are_unchanged()
    assert fresh.are_unchanged()


def replace_one(held):
    held.versions[1] = (3, 0)


def write_in_the_framework(held):
    held.versions[0] = (1, 1)


def scale_past_the_framework(held):
    held.arrays[0] *= 0.5


def move_to_another_device(held):
    held.can_be_read = False


@pytest.mark.parametrize(
    "change", [replace_one, write_in_the_framework, scale_past_the_framework, move_to_another_device]
)
def test_a_change_is_seen(held, fresh, change):
    fresh.note()
    change(held)
    assert not fresh.are_unchanged()


def test_what_cannot_be_read_is_never_known(held, fresh):
    held.can_be_read = False
    fresh.note()
    assert not fresh.are_unchanged()


def test_a_backward_that_was_void_leaves_nothing_known(fresh):
    fresh.note()
    fresh.forget()
    assert not fresh.are_unchanged()
