"""Kills a process that saves checkpoints all the time, and its writer: the newest checkpoint stays whole.

The files have numpy's format, so that a writer starts at once: the test is about the order in which files
appear under their names, and not about their format. For more kills, or torch's format:

    python -m tests.multiprocess.killed_checkpoints FOLDER KILLS SEED [torch|paddle]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.checkpoint.folder import list_checkpoints, why_damaged
from paceline.checkpoint.writer_process import WriterProcess

COUNT = 300_000


class Array:
    """The part of a tensor's interface that a checkpoint needs."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def element_size(self) -> int:
        return self.values.itemsize

    def data_ptr(self) -> int:
        return self.values.ctypes.data


class ArrayOps:
    tensor = Array

    def from_array(self, array: np.ndarray) -> Array:
        return Array(array)

    def copy(self, source: Array, target: Array) -> None:
        np.copyto(target.values, source.values)


class NumpyCheckpointOps(CheckpointOps):
    framework = "numpy"
    suffix = ".npy"
    containers = (dict, list, tuple)
    ops: ClassVar[Any] = ArrayOps()

    def why_not_saved(self, tensor: Any) -> str:
        return ""

    def random_states(self, parameters: Iterable[Any]) -> dict[str, bytes]:
        return {}

    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[Any]) -> None: ...

    def seed(self, number: int) -> None: ...

    def strides(self, tensor: Any) -> None:
        return None

    def over(
        self, memory: Any, at: int, nbytes: int, dtype: str, shape: Sequence[int], strides: object
    ) -> Array:
        return Array(np.frombuffer(memory, dtype, int(np.prod(shape)), at).reshape(shape))

    def version(self) -> str:
        return np.__version__

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, state["values"].values)

    def load(self, path: Path) -> Any:
        with path.open("rb") as file:
            return {"values": np.load(file)}


CHECKPOINT_OPS = NumpyCheckpointOps()


def _ops_of(framework: str) -> CheckpointOps:
    # Imported by this module's name, and not as __main__: the writer imports the class's module by its name.
    module = __spec__.name if framework == "numpy" else f"paceline.{framework}.checkpoint"
    ops: CheckpointOps = import_module(module).CHECKPOINT_OPS
    return ops


def train(folder: Path, framework: str) -> None:
    """Save states that hold their step number, until this process is killed."""
    ops = _ops_of(framework)
    steps = max(list_checkpoints(folder).whole, default=0)
    writer = WriterProcess(ops, folder, 2)
    while True:
        steps += 1
        values = ops.ops.from_array(np.full(COUNT, float(steps)))
        writer.begin({"world_size": 1, "values": values}, steps, ())
        writer.wait(600.0)
        assert writer.written == steps, writer.failures
        if steps % 5 == 1:
            print(steps, flush=True)


def check(folder: Path, framework: str) -> int:
    """Check that the newest checkpoint matches its manifest and holds its own step; returns that step."""
    ops = _ops_of(framework)
    listing = list_checkpoints(folder)
    newest = max(listing.whole)
    assert why_damaged(folder, listing.whole[newest]) == ""
    values = np.asarray(ops.load(folder / listing.whole[newest].file)["values"])
    assert values.shape == (COUNT,) and (values == newest).all()
    assert len(listing.whole) <= 3
    return newest


def kill(folder: Path, kills: int, seed: int, framework: str = "numpy") -> None:
    """Start a process that saves, kill it and its writer, and check the folder: `kills` times."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    newest = 0
    for number in range(kills):
        pid, output = _start_training(folder, framework)
        try:
            assert os.read(output, 100), "it has ended by itself"  # from here on it is saving
            moment = time.monotonic() + draw.uniform(0.0, 0.1)
            writers = _children(pid)
            while time.monotonic() < moment:
                pass
            for each in draw.sample([pid, *writers], 1 + len(writers)):
                os.kill(each, signal.SIGKILL)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(output)
        for each in writers:
            _until_gone(each)
        found = check(folder, framework)
        assert found > newest or number == 0
        newest = found


def _start_training(folder: Path, framework: str) -> tuple[int, int]:
    """Fork a process that trains, since this one has the imports. Returns its pid and its stdout."""
    output, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(printed, 1)
            train(folder, framework)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(printed)
    return pid, output


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        if ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.001)


if __name__ == "__main__":
    where, how_often, *rest = sys.argv[1:]
    kill(Path(where), int(how_often), *map(int, rest[:1]), *rest[1:])
