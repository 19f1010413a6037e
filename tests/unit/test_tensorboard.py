"""Logged values reach torch's writer for TensorBoard; without TensorBoard, an error explains that."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

import paceline
from paceline.errors import ConfigError
from paceline.torch import log_to_tensorboard
from paceline.trace import logged

NAME = "torch.utils.tensorboard"


@pytest.fixture(autouse=True)
def _no_listeners(monkeypatch):
    monkeypatch.setattr(logged, "listeners", [])


@pytest.fixture
def written(monkeypatch) -> list[tuple[object, ...]]:
    """The calls of a writer that replaces torch's."""
    calls: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            calls.append(("folder", Path(log_dir).name))

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            calls.append((tag, scalar_value, global_step))

        def close(self) -> None:
            calls.append(("closed",))

    fake = types.ModuleType(NAME)
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, NAME, fake)
    return calls


def test_each_value_becomes_a_scalar_at_the_step_of_its_name(written, tmp_path: Path):
    log_to_tensorboard(tmp_path / "runs")
    for value in (0.5, 0.25):
        paceline.log("loss", value)
    paceline.log("accuracy", 1)
    assert written == [("folder", "runs"), ("loss", 0.5, 0), ("loss", 0.25, 1), ("accuracy", 1.0, 0)]


def test_a_folder_that_cannot_be_made_is_reported(written, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written to"):
        log_to_tensorboard(tmp_path / "file" / "runs")
    assert not written and not logged.listeners


def test_without_tensorboard_words_say_so(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, NAME, None)
    with pytest.raises(ConfigError, match="TensorBoard is not installed"):
        log_to_tensorboard(tmp_path / "runs")
    assert not list(tmp_path.iterdir()) and not logged.listeners


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_reads_what_was_logged(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_to_tensorboard(tmp_path)
    paceline.log("loss", 0.5)
    (writer,) = (cell.cell_contents for cell in logged.listeners[0].__closure__[1:])
    writer.flush()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 0.5)]
