"""The wrappers of a real rank: Paceline in each of its modes, or Paddle's own DataParallel over Gloo."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

import paceline
from paceline.paddle import DataParallel, MixedPrecision
from tests.device import paddle as device
from tests.differential import paddle_mutations
from tests.differential.paddle_machine import Machine
from tests.differential.pool import Run
from tests.differential.programs import Program
from tests.differential.records import Record
from tests.several_hosts import on_host

TIMEOUT_S = 12.0

_TINY = {"bucket_cap_mb": 1e-6}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "tiny": _TINY,
    "view": {"gradient_as_bucket_view": True},
    "tiny view": {**_TINY, "gradient_as_bucket_view": True},
    "unused": {**_TINY, "find_unused_parameters": True},
    "unused one bucket": {"find_unused_parameters": True},
    "unused view": {**_TINY, "find_unused_parameters": True, "gradient_as_bucket_view": True},
    "group": {"reduce_through": "group"},
    "group tiny view": {"reduce_through": "group", **_TINY, "gradient_as_bucket_view": True},
    "group unused": {"reduce_through": "group", **_TINY, "find_unused_parameters": True},
    "static": {**_TINY, "static_graph": True},
    "group static": {"reduce_through": "group", **_TINY, "static_graph": True},
    "bfloat16 sums": {"mixed_precision": MixedPrecision(reduce_dtype="bfloat16")},
    "group float64 sums": {
        "reduce_through": "group",
        "mixed_precision": MixedPrecision(reduce_dtype="float64"),
    },
    "hosts": {"hosts": True},
    "hosts tiny view": {"hosts": True, **_TINY, "gradient_as_bucket_view": True},
    "hosts unused": {"hosts": True, **_TINY, "find_unused_parameters": True},
    "hosts static": {"hosts": True, **_TINY, "static_graph": True},
    "device": _TINY,
    "device view": {**_TINY, "gradient_as_bucket_view": True},
    "device float64 sums": {**_TINY, "mixed_precision": MixedPrecision(reduce_dtype="float64")},
    "device unused": {**_TINY, "find_unused_parameters": True},
    "device static": {"static_graph": True},
}
"""The arguments of the wrapper.

"group": over Gloo, through paddle.distributed. "hosts": in the memory of each host, and between several.
"device": over the streams of a device (`tests.device.paddle`).
"""

PADDLE = "paddle"
PADDLES: dict[str, dict[str, Any]] = {PADDLE: {"find_unused_parameters": True}}
"""The same for Paddle's own wrapper, with unused parameters allowed, as it does not notice them."""


class Groups:
    """The groups of one rank, each formed when the first program asks for it."""

    def __init__(self, rank: int, world_size: int, job: str, folder: Path) -> None:
        self._rank, self._world_size, self._job, self._folder = rank, world_size, job, folder
        self._group: paceline.Group | None = None

    def paceline(self) -> paceline.Group:
        if self._group is None:
            self._group = paceline.init(
                rank=self._rank, world_size=self._world_size, job_id=self._job, timeout_s=TIMEOUT_S
            )
        return self._group

    def paddle(self) -> None:
        """Initialise paddle.distributed, with the variables that Paddle's launcher would set.

        Over the current device; the programs of a rank are all on the same.
        """
        if dist.is_initialized():
            return
        is_on_device = paddle.get_device() != "cpu"
        port = self._agree_on_port()
        os.environ |= {
            "PADDLE_TRAINER_ID": str(self._rank),
            "PADDLE_TRAINERS_NUM": str(self._world_size),
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{port + self._rank}",
            "PADDLE_MASTER": f"127.0.0.1:{port}",
            "PADDLE_DISTRI_BACKEND": device.BACKEND if is_on_device else "gloo",
            f"FLAGS_selected_{device.NAME}s": str(self._rank),
        }
        if self._rank:  # a rank that comes before the store exists tries again after 3 s
            _until(lambda: _listens(port))
        dist.init_parallel_env()

    @contextlib.contextmanager
    def on_hosts(self) -> Iterator[None]:
        """A context in which a rank declares its host: two hosts of two ranks, or some of one."""
        hosts = 2 if self._world_size == 4 else self._world_size
        number = self._rank * hosts // self._world_size
        with on_host(number):
            yield

    def _agree_on_port(self) -> int:
        file = self._folder / "port"
        if self._rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            whole = file.with_suffix(".new")
            whole.write_text(str(port))
            whole.rename(file)
        _until(file.exists)
        return int(file.read_text())


class Ours:
    """Paceline."""

    simulates = False

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def wrap(self, net: nn.Layer, options: dict[str, Any]) -> Any:
        options = dict(options)
        if options.pop("hosts", False):
            self._groups.paddle()
            with self._groups.on_hosts():
                wrapper = DataParallel(net, timeout_s=TIMEOUT_S, **options)
            if wrapper.gradient_path != "hosts":
                raise AssertionError(f"ranks of several hosts average in {wrapper.gradient_path}")
            return wrapper
        if options.get("reduce_through") == "group" or paddle.get_device() != "cpu":
            self._groups.paddle()
            return DataParallel(net, timeout_s=TIMEOUT_S, **options)
        return DataParallel(net, group=self._groups.paceline(), **options)

    def no_sync(self, wrapper: Any) -> contextlib.AbstractContextManager[None]:
        return wrapper.no_sync()  # type: ignore[no-any-return]

    def weight(self, wrapper: Any, value: float) -> None:
        wrapper.weight(value)

    def finished(self, wrapper: Any, step: Any) -> None:
        wrapper.finish(step)

    def backwards(self, wrapper: Any) -> int:
        """The number of good backwards of this wrapper; a framework's own wrapper has no such count."""
        return getattr(wrapper, "num_good_passes", 0)

    def join(self, wrapper: Any) -> contextlib.AbstractContextManager[Any]:
        return wrapper.join()  # type: ignore[no-any-return]

    def iterate(self, wrapper: Any, batches: Sequence[int], step: Any) -> Iterator[int]:
        return wrapper.iterate(batches, step)  # type: ignore[no-any-return]


class Paddles(Ours):
    """Paddle's own wrapper, with its equivalents of Paceline's options."""

    def wrap(self, net: nn.Layer, options: dict[str, Any]) -> Any:
        self._groups.paddle()
        known = ("find_unused_parameters",)
        return paddle.DataParallel(net, **{key: value for key, value in options.items() if key in known})


def make_rank(rank: int, world_size: int, job: str, folder: Path) -> Run:
    """Prepare this process to run programs."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="(?s)Buffer .* was written between two steps")
    os.environ.update(TMPDIR=str(folder))
    groups = Groups(rank, world_size, job, folder)

    def run(program: Program, options: dict[str, Any]) -> Record:
        mode = options["mode"]
        subject = Paddles(groups) if mode in PADDLES else Ours(groups)
        if mutation := options.get("mutation"):
            paddle_mutations.put_in(mutation, rank)
        place = f"{device.NAME}:{rank}" if "device" in mode else "cpu"
        machine = Machine(program, rank, subject, {**MODES, **PADDLES}.get(mode, {}), device=place)
        try:
            for _ in machine.run():
                pass
        except BaseException as error:
            machine.note_end(error)
        return machine.record

    return run


def _until(is_so: Any) -> None:
    until = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError("rank 0 did not open Paddle's store")
        time.sleep(0.005)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
