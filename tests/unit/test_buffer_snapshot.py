"""Changes that a snapshot of a module's buffers notices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import _core


class Held:
    """Two dictionaries of buffers, and a snapshot of them."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {"a": torch.zeros(3), "b": torch.zeros(1000), "none": None}
        self.second: dict[str, Any] = {"a": torch.zeros((), dtype=torch.int64)}
        dicts: list[dict[str, Any]] = [self.first, {}, self.second]
        self.snapshot = _core.BufferSnapshot(dicts, [{}, {}, {}], "_version", torch.zeros(1))


WRITES: dict[str, tuple[Callable[[Held], Any], list[tuple[int, str]]]] = {
    "nothing": (lambda held: None, []),
    "in place": (lambda held: held.first["a"].fill_(1), [(0, "a")]),
    "through .data": (lambda held: held.second["a"].data.fill_(1), [(2, "a")]),
    "by numpy, at the end": (lambda held: held.first["b"].numpy().__setitem__(-1, 1.0), [(0, "b")]),
    "by numpy, between": (lambda held: held.first["b"].numpy().__setitem__(300, 1.0), [(0, "b")]),
    "through .data, between": (lambda held: held.first["b"].data[300:310].fill_(1), [(0, "b")]),
    "anew": (lambda held: held.first.update(a=torch.zeros(3)), [(0, "a")]),
    "instead of none": (lambda held: held.first.update(none=torch.zeros(1)), [(0, "none")]),
    "added": (lambda held: held.second.update(c=torch.zeros(1)), [(2, "c")]),
    "removed": (lambda held: held.first.pop("a"), [(0, "a")]),
}


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="a torch before 2.10")
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_noticed_until_it_is_noted(write: str) -> None:
    held = Held()
    change, expected = WRITES[write]
    change(held)
    assert sorted(held.snapshot.changed()) == expected
    assert sorted(held.snapshot.changed()) == expected
    held.snapshot.note()
    assert held.snapshot.changed() == []


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="a torch before 2.10")
def test_all_bytes_are_compared_behind_a_note_of_all() -> None:
    held = Held()
    large = held.first["b"].numpy()
    held.snapshot.note()
    large[300] = 1.0
    assert held.snapshot.changed() == []
    held.snapshot.note(whole=True)
    assert held.snapshot.changed() == []
    large[300] = 2.0
    assert held.snapshot.changed() == [(0, "b")]


def test_without_bytes_versions_show_a_write() -> None:
    dicts = [{"a": torch.zeros(3)}]
    snapshot = _core.BufferSnapshot(dicts, [{}], "_version", None)
    dicts[0]["a"].add_(1)
    assert snapshot.changed() == [(0, "a")]


def test_running_statistics_in_training_are_looked_at_without_their_bytes() -> None:
    norm = torch.nn.BatchNorm1d(3)
    dicts = [norm._buffers]
    snapshot = _core.BufferSnapshot(dicts, [{"running_mean": norm}], "_version", torch.zeros(1))
    mean = norm.running_mean
    assert mean is not None
    mean.data.fill_(1)
    assert snapshot.changed() == []
    norm.eval()
    snapshot.note()
    mean.data.fill_(2)
    assert snapshot.changed() == [(0, "running_mean")]


def test_tensors_of_other_kinds_are_looked_at_as_far_as_possible() -> None:
    held = {"sparse": torch.eye(3).to_sparse(), "meta": torch.empty(3, device="meta"), "no tensor": 3}
    with torch.inference_mode():
        held["without a version"] = torch.zeros(2)
    snapshot = _core.BufferSnapshot([held], [{}], "_version", torch.zeros(1))
    assert snapshot.changed() == []


def test_a_cycle_through_a_snapshot_is_collected() -> None:
    class Buffer:
        _version = 0
        snapshot: Any

    buffer = Buffer()
    buffer.snapshot = _core.BufferSnapshot([{"a": buffer}], [{}], "_version", None)
    alive = weakref.ref(buffer)
    del buffer
    gc.collect()
    assert alive() is None
