"""Gradients on a device without a device: what waits for what, and that a usual pass does not wait for it.

Tensors are those of torch's device "meta", which have no values: asking for one, as `.item()` or a copy to
the host does, raises. Streams, and calls of the process group, are stand-ins that write down what is done.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.reducer.engine import EngineReducer  # noqa: E402
from paceline.reducer.plan import ParameterSpec, plan_buckets  # noqa: E402
from paceline.reducer.protocol import PassStatus  # noqa: E402
from paceline.torch.link import transport as transport_module  # noqa: E402
from paceline.torch.link.arena import Arena  # noqa: E402
from paceline.torch.link.finite import FiniteChecks  # noqa: E402
from paceline.torch.link.streams import Streams  # noqa: E402
from paceline.torch.link.transport import ProcessGroupTransport  # noqa: E402

DEVICE = torch.device("meta")
COUNT = 4


class Stream:
    """Writes down for whom it waits."""

    def __init__(self, name: str, log: list[str], device: torch.device = DEVICE) -> None:
        self.name, self.device = name, device
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Device:
    """Its streams, and the current one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.elsewhere = Stream("elsewhere", self.log, torch.device("cpu"))
        self.now = self.main
        self.streams = Streams(lambda device: self.now)


class OnStream:
    """A call that runs on a stream: the host need not ask for it, and must not."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def is_completed(self) -> bool:
        raise AssertionError("the host waits for a bucket on a device")

    def wait(self) -> None:
        self._log.append(f"the stream waits for {self._name}")


class OnHost:
    """A call of the host that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        """It is over."""


class Reports:
    """Gloo beside NCCL: each rank reports what this one does."""

    def __init__(self) -> None:
        self.calls = 0

    def allgather(self, outputs: Any, inputs: Any) -> OnHost:
        self.calls += 1
        assert inputs[0].is_cpu
        for row in outputs[0]:
            row.copy_(inputs[0])
        return OnHost()


@pytest.fixture
def make(monkeypatch):
    """Makes one of two ranks over NCCL: its reducer, its device, and where its gradients lie."""
    device = Device()
    monkeypatch.setattr(Streams, "of", classmethod(lambda cls, kind: device.streams))

    def all_reduce(flat, *, group, async_op):
        assert async_op and flat.device == DEVICE
        device.log.append(f"sum on {device.now.name}")
        return OnStream(device.log, "a sum")

    monkeypatch.setattr(transport_module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(transport_module.dist, "get_backend", lambda group: "nccl")
    backend = SimpleNamespace(name=lambda: "nccl")
    members = {"_device_types": [DEVICE], "_get_backend": lambda self, device: backend}
    peers = SimpleNamespace(
        process_group=type("Group", (), members)(), rank=0, world_size=2, timeout_s=30.0, warn_after_s=30.0
    )
    specs = [ParameterSpec(f"p{n}", 6, "float32", 4, "meta") for n in range(COUNT)]
    plan = plan_buckets(specs, bucket_cap_bytes=128, first_bucket_bytes=128)
    assert len(plan.buckets) == 2

    def world(**options):
        parameters = [torch.empty(2, 3, device=DEVICE) for _ in specs]
        arena, reports = Arena.allocate(plan, parameters), Reports()
        options = {"checks_finite": True, "waits_for_finite": False, **options}
        made = ProcessGroupTransport(arena, peers, reports=reports, **options)
        return SimpleNamespace(
            reducer=EngineReducer(plan, made), arena=arena, device=device, transport=made, reports=reports
        )

    return world


def hand_over(world: SimpleNamespace, index: int) -> None:
    world.arena.views[index].copy_(torch.ones(2, 3, device=DEVICE))
    world.reducer.mark_copied(index, (index + 1) << 12, 24)  # an address of the device


def finish(world: SimpleNamespace) -> None:
    status = PassStatus()
    status.forwards = 1
    world.reducer.finish(status, False)


def run_pass(world: SimpleNamespace) -> None:
    for index in reversed(range(COUNT)):
        hand_over(world, index)
    finish(world)


class Later:
    """Answers of a device, which come when the test says so."""

    def __init__(self, flags: torch.Tensor | list[bool], *, is_there: bool = False) -> None:
        self.flags, self.is_there, self.was_read = flags, is_there, False

    def is_done(self) -> bool:
        return self.is_there

    def read(self) -> list[bool]:
        self.was_read = True
        assert isinstance(self.flags, list)
        return self.flags


def test_a_tensor_without_values_tells_whoever_asks():
    value = torch.ones(3, device=DEVICE)
    for ask in (
        lambda: value.sum().item(),
        value.tolist,
        value.cpu,
        lambda: bool(torch.isfinite(value).all()),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()


def past_the_first_pass(world: SimpleNamespace) -> list[Later]:
    """The transport's looks at infinities, from its second pass on; what they have under way."""
    copies: list[Later] = []

    def copy(flags: torch.Tensor) -> Later:
        assert flags.device == DEVICE and flags.dtype is torch.bool and flags.numel() == COUNT
        copies.append(Later(flags))
        return copies[-1]

    checks = FiniteChecks(waits=False, copy=copy)
    assert checks.take() == []
    world.transport._on_device = checks
    return copies


@pytest.mark.parametrize("checks_finite", [False, True])
def test_a_usual_pass_waits_for_the_host_of_no_rank_longer_than_for_its_report(make, checks_finite):
    world = make(checks_finite=checks_finite)
    copies = past_the_first_pass(world) if checks_finite else []
    before = world.reports.calls
    for _ in range(3):
        run_pass(world)
    assert world.reports.calls == before + 3  # one for each pass: the details are asked for if there are any
    assert len(copies) == (3 if checks_finite else 0) and not any(copy.was_read for copy in copies)
    assert world.device.log.count("the stream waits for a sum") == 6


def test_who_wants_to_know_at_once_waits_for_the_device(make):
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_pass(make(waits_for_finite=True))


def test_a_rank_with_another_weight_does_not_wait_for_the_device_either(make):
    world = make()
    past_the_first_pass(world)
    world.reducer.set_weight(3.0)
    run_pass(world)
    assert not world.transport.may_have_overflowed(3.0)
    assert make(waits_for_finite=True).transport.may_have_overflowed(3.0)


def test_the_norm_and_only_the_norm_is_asked_for_when_a_user_asks(make):
    world = make(checks_finite=False)
    run_pass(world)
    with pytest.raises((RuntimeError, NotImplementedError)):
        world.reducer.squared_norm()


def test_a_sum_waits_for_every_stream_that_has_brought_a_gradient(make):
    world = make(checks_finite=False)
    device = world.device
    first, second = [list(bucket.parameters) for bucket in world.reducer._plan.buckets]
    device.now = device.side
    hand_over(world, first[0])
    device.now = device.main
    for index in first[1:]:
        hand_over(world, index)
    assert device.log == ["main waits for side", "sum on main"]
    device.log.clear()
    device.now = device.side
    for index in second:
        hand_over(world, index)
    assert device.log == ["side waits for main", "sum on side"]
    device.now = device.main
    finish(world)
    device.log.clear()
    run_pass(world)  # the streams of a pass that is over count no more
    assert not [line for line in device.log if "waits for side" in line]


def test_gradients_that_wait_to_be_copied_keep_their_memory_for_the_stream_that_reads_them():
    device = Device()
    kept: list[tuple[int, str]] = []
    waiting = [SimpleNamespace(record_stream=lambda stream: kept.append((0, stream.name)))]
    for stream in (device.main, device.elsewhere):
        device.now = stream
        device.streams.note()
    device.now = device.main
    device.streams.join(DEVICE, waiting)
    assert not device.log and not kept  # a stream of another device has brought nothing to this one
    device.now = device.side
    device.streams.note()
    device.streams.join(DEVICE, waiting)
    assert device.log == ["side waits for main"] and kept == [(0, "side")]


def test_infinities_are_told_when_the_device_has_answered():
    answers = [Later([True, False]), Later([True, True]), Later([False, True])]
    queue = iter(answers)
    checks = FiniteChecks(waits=False, copy=lambda flags: next(queue))
    values = [(7, torch.ones(3)), (9, torch.tensor([1.0, float("nan")])), (5, torch.ones(0))]
    checks.look(values)
    assert checks.take() == [9]  # the first pass waits
    assert checks.is_late
    for told in ([], []):
        checks.look(values)
        assert checks.take() == told
    answers[0].is_there = True
    checks.look(values)
    assert checks.take() == [9]
    answers[1].is_there = answers[2].is_there = True
    assert checks.take() == [7]


def test_a_host_that_is_far_ahead_waits_for_the_oldest_answer():
    copies: list[Later] = []

    def copy(flags: torch.Tensor) -> Later:
        copies.append(Later([False]))
        return copies[-1]

    checks = FiniteChecks(waits=False, copy=copy)
    found = []
    for _ in range(8):
        checks.look([(0, torch.ones(1))])
        found.append(checks.take())
    assert [each.was_read for each in copies] == [True] * 3 + [False] * 4
    assert found == [[]] * 5 + [[0]] * 3


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_each_value_that_is_not_finite_is_found(bad, dtype):
    checks = FiniteChecks(waits=True)
    values = torch.ones(5, dtype=dtype)
    values[3] = bad
    checks.look([(0, torch.full((4,), torch.finfo(dtype).max).to(dtype)), (1, values)])
    assert checks.take() == [1] and checks.take() == []
