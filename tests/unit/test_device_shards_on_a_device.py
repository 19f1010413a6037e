"""Shards of buckets on a simulated device: the stream of each operation; the host waits for none.

Tensors of a device are those of torch's "meta", which have no values: asking for one raises. See
test_gradients_on_a_device.py, whose stand-ins record their calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.errors import ConfigError  # noqa: E402
from paceline.reducer.between_hosts.device_shards import DeviceShards, plan_of_shards  # noqa: E402
from paceline.reducer.communicator import ReductionOptions  # noqa: E402
from paceline.reducer.plan import ParameterSpec, plan_buckets  # noqa: E402
from paceline.reducer.process_group import ProcessGroupReducer  # noqa: E402
from paceline.reducer.reducer_interface import BackwardStatus  # noqa: E402
from paceline.torch.communicator import calls as calls_module  # noqa: E402
from paceline.torch.communicator.calls import GroupCalls  # noqa: E402
from paceline.torch.communicator.device_shard_transport import DeviceShardTransport  # noqa: E402
from paceline.torch.communicator.streams import Streams  # noqa: E402
from paceline.torch.ops import OPS  # noqa: E402
from tests.unit.test_gradients_on_a_device import DEVICE, Device, OnStream, Reports  # noqa: E402

COUNT = 4
WAIT_S = 20.0


class Copies:
    """On a separate stream. Copies to the host complete when the test says so."""

    def __init__(self, device: Device) -> None:
        self._device, self.are_there = device, threading.Event()

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        before, self._device.now = self._device.now, self._device.side
        self._device.side.wait_stream(before)
        yield
        self._device.now = before

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        assert {target.device, source.device} == {DEVICE, torch.device("cpu")}
        way = "out" if target.is_cpu else "in"
        self._device.log.append(f"copy {way} on {self._device.now.name}")
        return self.are_there.is_set


class Calls:
    """One of two ranks of a host, over NCCL."""

    place, size, is_on_streams = 1, 2, True

    def __init__(self, device: Device) -> None:
        self._device = device
        self.waits = SimpleNamespace(poll=self._poll)

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[flat.numel() // 2 :]

    def reduce_scatter(self, flat: torch.Tensor, bucket: int) -> OnStream:
        return self._call("reduce_scatter", flat, bucket)

    def all_gather(self, flat: torch.Tensor, bucket: int) -> OnStream:
        return self._call("all_gather", flat, bucket)

    def _call(self, name: str, flat: torch.Tensor, bucket: int) -> OnStream:
        assert flat.device == DEVICE
        self._device.log.append(f"{name} {bucket} on {self._device.now.name}")
        return OnStream(self._device.log, f"{name} {bucket}")

    def wait(self, work: OnStream, bucket: int, *, is_last: bool = False) -> None:
        self._device.log.append(f"{self._device.now.name}:")
        work.wait()

    def _poll(self, is_there: Callable[[], bool], bucket: int) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the backward waits for the device"
        for _ in range(int(WAIT_S * 1000)):
            if is_there():
                return
            threading.Event().wait(0.001)
        raise AssertionError("nothing came")

    def abort(self) -> None:
        """Nothing is under way."""


class Exchange:
    """Replaces the reducer of the shards."""

    codes, saw_nonfinite = None, False

    def __init__(self) -> None:
        self.ready: list[int] = []

    def mark_ready(self, bucket: int) -> None:
        self.ready.append(bucket)

    def finish(self, status: object, allow_unused: bool) -> int:
        return 0

    def give_up(self, error: BaseException) -> None:
        """No other rank is notified."""

    def close(self) -> None:
        self.ready.append(-1)


@pytest.fixture
def world(monkeypatch):
    device = Device()
    monkeypatch.setattr(Streams, "of", classmethod(lambda cls, kind: device.streams))
    monkeypatch.setattr(calls_module.dist, "get_backend", lambda group: "nccl")
    backend = SimpleNamespace(name=lambda: "nccl")
    members = {"_device_types": [DEVICE], "_get_backend": lambda self, device: backend}
    group: Any = type("Group", (), members)()
    ranks: Any = SimpleNamespace(rank=1, world_size=2, timeout_s=30.0, warn_after_s=30.0)
    of_all = GroupCalls(group, ranks)
    of_all.reports = Reports
    specs = [ParameterSpec(f"p{n}", 6, "float32", 4, "meta") for n in range(COUNT)]
    plan = plan_buckets(specs, bucket_cap_bytes=128, first_bucket_bytes=128)
    assert len(plan.buckets) == 2
    gradient_buffer = OPS.allocate(plan, [torch.empty(2, 3, device=DEVICE) for _ in specs])
    calls, copies, exchange = Calls(device), Copies(device), Exchange()
    peer_monitor: Any = SimpleNamespace(publish_waiting=lambda: None, publish_done=lambda: None)
    shards = DeviceShards(exchange, len(plan.buckets), "rank 1 of 2", WAIT_S, calls.abort, peer_monitor)
    places = [torch.zeros(bucket.nbytes // 4) for bucket in plan_of_shards(plan, 2).buckets]
    transport = DeviceShardTransport(
        gradient_buffer,
        of_all,
        ReductionOptions(
            gradients_in_buffer=False, skip_unused=False, checks_finite=True, waits_for_finite=False
        ),
        calls,
        shards,
        places,
        2,
        copies,
    )
    transport._on_device.take = list  # which asks the device, in the first backward
    yield SimpleNamespace(
        reducer=ProcessGroupReducer(plan, transport, beside=shards),
        gradient_buffer=gradient_buffer,
        device=device,
        copies=copies,
        exchange=exchange,
        transport=transport,
    )
    shards.stop()


def hand_over_all(world: SimpleNamespace) -> None:
    for index in reversed(range(COUNT)):
        world.gradient_buffer.places[index].copy_(torch.ones(2, 3, device=DEVICE))
        world.reducer.mark_copied(index, (index + 1) << 12, 24)  # an address of the device


def test_nothing_waits_but_streams_and_the_thread_that_takes_the_shards(world):
    hand_over_all(world)
    out = [
        line
        for bucket in range(2)
        for line in (
            f"reduce_scatter {bucket} on main",
            "side waits for main",
            "side:",
            f"the stream waits for reduce_scatter {bucket}",
            "copy out on side",
        )
    ]
    assert world.device.log == out
    assert world.exchange.ready == []  # no copy is complete yet, and the backward is over
    world.device.log.clear()
    world.copies.are_there.set()
    status = BackwardStatus()
    status.forwards = 1
    world.reducer.finish(status, False)
    assert world.exchange.ready == [0, 1]
    back = [line for bucket in range(2) for line in ("copy in on side", f"all_gather {bucket} on side")]
    ends = [line for n in range(2) for line in ("main:", f"the stream waits for all_gather {n}")]
    assert world.device.log == ["side waits for main", *back, *ends]


def test_the_memory_of_shards_goes_with_the_reducer_that_uses_it(world):
    world.copies.are_there.set()
    hand_over_all(world)
    world.reducer.close()
    assert world.exchange.ready == [0, 1, -1]  # transfers under way complete first


def test_a_graph_that_is_recorded_cannot_hold_it(world, monkeypatch):
    monkeypatch.setattr(world.transport, "_is_captured", lambda: True)
    with pytest.raises(ConfigError, match="CUDA graph"):
        hand_over_all(world)
