"""A process that saves all the time, killed with its writer at random moments: what is newest stays whole.

The files have a format of numpy's, so that a writer starts at once: what is tested is the order of their
names, and not what is in them. For more kills, or torch's format:

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
    """As much of a tensor as a checkpoint needs."""

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
    # By this module's name, and not as __main__: a writer imports it by the name of the class's module.
    module = __spec__.name if framework == "numpy" else f"paceline.{framework}.checkpoint"
    ops: CheckpointOps = import_module(module).CHECKPOINT_OPS
    return ops


def train(folder: Path, framework: str) -> None:
    """Save states that tell their step, until this process is killed."""
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
    """The newest has the contents that its manifest tells, of its own step; its steps."""
    ops = _ops_of(framework)
    listing = list_checkpoints(folder)
    newest = max(listing.whole)
    assert why_damaged(folder, listing.whole[newest]) == ""
    values = np.asarray(ops.load(folder / listing.whole[newest].file)["values"])
    assert values.shape == (COUNT,) and (values == newest).all()
    assert len(listing.whole) <= 3
    return newest


def kill(folder: Path, kills: int, seed: int, framework: str = "numpy") -> None:
    """Start such a process again and again, and kill all of it."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    newest = 0
    for number in range(kills):
        pid, told = _start_training(folder, framework)
        try:
            assert os.read(told, 100), "it has ended by itself"  # it writes, from here on
            moment = time.monotonic() + draw.uniform(0.0, 0.1)
            writers = _children(pid)
            while time.monotonic() < moment:
                pass
            for each in draw.sample([pid, *writers], 1 + len(writers)):
                os.kill(each, signal.SIGKILL)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(told)
        for each in writers:
            _until_gone(each)
        found = check(folder, framework)
        assert found > newest or number == 0
        newest = found


def _start_training(folder: Path, framework: str) -> tuple[int, int]:
    """Fork a process that trains, since this one has imported what it needs; its pid, and where it prints."""
    told, printed = os.pipe()
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
    return pid, told


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
