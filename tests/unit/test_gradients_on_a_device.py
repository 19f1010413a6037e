"""Gradients on a simulated device: each operation's waits; a usual backward does not wait for it.

Tensors are those of torch's device "meta", which have no values: asking for one, as `.item()` or a copy to
the host does, raises. Streams, and calls of the process group, are stand-ins that record their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from paceline.reducer.communicator import ReductionOptions  # noqa: E402
from paceline.reducer.plan import ParameterSpec, plan_buckets  # noqa: E402
from paceline.reducer.process_group import ProcessGroupReducer  # noqa: E402
from paceline.reducer.reducer_interface import BackwardStatus  # noqa: E402
from paceline.torch.communicator import calls as calls_module  # noqa: E402
from paceline.torch.communicator.calls import GroupCalls  # noqa: E402
from paceline.torch.communicator.device_nonfinite import FiniteChecks  # noqa: E402
from paceline.torch.communicator.flat_buckets import ProcessGroupTransport  # noqa: E402
from paceline.torch.communicator.streams import Streams  # noqa: E402
from paceline.torch.ops import OPS  # noqa: E402

DEVICE = torch.device("meta")
COUNT = 4


class Stream:
    """Records the streams that it waits for."""

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
    """A call that runs on a stream: the host need not query it, and must not."""

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
    """Each rank reports the same as this one."""

    def __init__(self) -> None:
        self.calls = 0

    def begin(self, payload: bytes) -> tuple[OnHost, Callable[[], list[bytes]]]:
        self.calls += 1
        return OnHost(), lambda: [payload, payload]


@pytest.fixture
def make(monkeypatch):
    """Makes one of two ranks over NCCL: its reducer, its device, and the places of its gradients."""
    device = Device()
    monkeypatch.setattr(Streams, "of", classmethod(lambda cls, kind: device.streams))

    def allreduce(tensors, options):
        assert getattr(options, "asyncOp", True) and [flat.device for flat in tensors] == [DEVICE]
        device.log.append(f"sum on {device.now.name}")
        return OnStream(device.log, "a sum")

    monkeypatch.setattr(calls_module.dist, "get_backend", lambda group: "nccl")
    backend = SimpleNamespace(name=lambda: "nccl", allreduce=allreduce)
    members = {"_device_types": [DEVICE], "_get_backend": lambda self, device: backend}
    group = type("Group", (), members)()
    ranks = SimpleNamespace(rank=0, world_size=2, timeout_s=30.0, warn_after_s=30.0)
    specs = [ParameterSpec(f"p{n}", 6, "float32", 4, "meta") for n in range(COUNT)]
    plan = plan_buckets(specs, bucket_cap_bytes=128, first_bucket_bytes=128)
    assert len(plan.buckets) == 2

    def world(**options):
        parameters = [torch.empty(2, 3, device=DEVICE) for _ in specs]
        gradient_buffer, reports = OPS.allocate(plan, parameters), Reports()
        calls = GroupCalls(group, ranks)
        calls.reports = lambda: reports
        options = {"checks_finite": True, "waits_for_finite": False, **options}
        asked = ReductionOptions(gradients_in_buffer=False, skip_unused=False, **options)
        made = ProcessGroupTransport(gradient_buffer, calls, asked)
        return SimpleNamespace(
            reducer=ProcessGroupReducer(plan, made),
            gradient_buffer=gradient_buffer,
            device=device,
            transport=made,
            reports=reports,
        )

    return world


def hand_over(world: SimpleNamespace, index: int) -> None:
    world.gradient_buffer.places[index].copy_(torch.ones(2, 3, device=DEVICE))
    world.reducer.mark_copied(index, (index + 1) << 12, 24)  # an address of the device


def finish(world: SimpleNamespace) -> None:
    status = BackwardStatus()
    status.forwards = 1
    world.reducer.finish(status, False)


def run_backward(world: SimpleNamespace) -> None:
    for index in reversed(range(COUNT)):
        hand_over(world, index)
    finish(world)


class Later:
    """Numbers of a device, which arrive when the test says so."""

    def __init__(self, number: torch.Tensor) -> None:
        assert number.numel() == 1
        self._device = number.device
        self.begun, self.is_there, self.was_read = 0, False, False
        self._number = 0.0

    def begin(self, number: torch.Tensor) -> None:
        assert number.device == self._device and number.numel() == 1
        self.begun += 1
        self.is_there = self.was_read = False
        if self._device != DEVICE:
            self._number = number.item()

    def is_done(self) -> bool:
        return self.is_there

    def read(self) -> float:
        self.was_read = True
        return self._number


def test_asking_for_the_values_of_a_meta_tensor_raises():
    value = torch.ones(3, device=DEVICE)
    for ask in (
        lambda: value.sum().item(),
        value.tolist,
        value.cpu,
        lambda: bool(torch.isfinite(value).all()),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()


def past_the_first_backward(world: SimpleNamespace) -> list[Later]:
    """The transport's checks for infinities, from its second backward on, and the transfers under way."""
    copies: list[Later] = []

    def copy(number: torch.Tensor) -> Later:
        assert number.device == DEVICE
        copies.append(Later(number))
        return copies[-1]

    made = world.transport
    checks = FiniteChecks(list(zip(made._buckets, made._pieces)), waits=False, copy=copy)
    assert checks.take() == []
    world.transport._on_device = checks
    return copies


@pytest.mark.parametrize("checks_finite", [False, True])
def test_a_usual_backward_waits_for_the_host_of_no_rank_longer_than_for_its_report(make, checks_finite):
    world = make(checks_finite=checks_finite)
    copies = past_the_first_backward(world) if checks_finite else []
    before = world.reports.calls
    for _ in range(3):
        run_backward(world)
    # one for each backward: the details are fetched if there are any
    assert world.reports.calls == before + 3
    assert sum(copy.begun for copy in copies) == (3 if checks_finite else 0)
    assert not any(copy.was_read for copy in copies)
    assert world.device.log.count("sum on main") == 6
    assert world.device.log.count("the stream waits for a sum") == 3  # for the last of each backward


def test_who_wants_to_know_at_once_waits_for_the_device(make):
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_backward(make(waits_for_finite=True))


def test_a_rank_with_another_weight_does_not_wait_for_the_device_either(make):
    world = make()
    past_the_first_backward(world)
    world.reducer.set_weight(3.0)
    run_backward(world)
    assert not world.transport.may_have_overflowed(3.0)
    assert make(waits_for_finite=True).transport.may_have_overflowed(3.0)


def test_the_norm_and_only_the_norm_is_asked_for_when_a_user_asks(make):
    world = make(checks_finite=False)
    run_backward(world)
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
    run_backward(world)  # the streams of a backward that is over count no more
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


def checks_of(
    *tensors: torch.Tensor, waits: bool = False, buckets: int = 1, gap: int = 0
) -> tuple[FiniteChecks, list[list[torch.Tensor]], list[Later]]:
    """Checks of parameters 0, 1, ... in so many equal buckets; their places there; copies that are made."""
    made, places, copies = [], [], []
    for number in range(buckets):
        flat = torch.zeros(sum(each.numel() + gap for each in tensors), dtype=tensors[0].dtype)
        held, begin = [], 0
        for tensor in tensors:
            held.append(flat[begin : begin + tensor.numel()].copy_(tensor))
            begin += tensor.numel() + gap
        first = number * len(tensors)
        made.append((flat, [(first + n, each) for n, each in enumerate(held) if each.numel()]))
        places.append(held)

    def copy(number: torch.Tensor) -> Later:
        copies.append(Later(number))
        return copies[-1]

    return FiniteChecks(made, waits=waits, copy=copy), places, copies


def test_infinities_are_reported_when_the_device_has_answered():
    checks, ((good, bad, _),), copies = checks_of(torch.ones(3), torch.ones(2), torch.ones(0))
    bad[1] = float("nan")
    checks.look(0)
    assert checks.take() == [1]  # the first backward waits
    assert checks.is_late
    for _ in range(2):
        checks.look(0)
        assert checks.take() == []
        bad[1] = 1.0
    good[0] = float("inf")
    copies[0].is_there = True
    checks.look(0)
    assert checks.take() == [1]  # of the backward after the first one
    for copy in copies:
        copy.is_there = True
    assert checks.take() == [0]
    good[0] = 1.0
    for _ in range(3):  # earlier reports are forgotten
        checks.look(0)
        assert checks.take() == []
        for copy in copies:
            copy.is_there = True
    assert checks.take() == []


def test_a_host_that_is_far_ahead_waits_for_the_oldest_answer():
    checks, ((place,),), copies = checks_of(torch.ones(1))
    found = []
    for value in [1.0, float("nan"), 1.0, 1.0, 1.0, 1.0, float("inf"), 1.0]:
        place[0] = value
        checks.look(0)
        found.append(checks.take())
    assert found == [[]] * 5 + [[0]] + [[]] * 2
    # Used again, unless something was found.
    assert len(copies) == 6 and sum(copy.begun for copy in copies) == 7


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_each_value_that_is_not_finite_is_found(bad, dtype):
    largest = torch.full((4,), torch.finfo(dtype).max).to(dtype)
    checks, ((_, values),), _ = checks_of(largest, torch.ones(5, dtype=dtype), waits=True)
    values[3] = bad
    checks.look(0)
    assert checks.take() == [1] and checks.take() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("gap", [0, 7])
def test_the_parameters_to_blame_are_found_wherever_they_lie(gap, dtype):
    """Of one element and of many, at the ends of chunks and across them, one at a time and all together."""
    sizes = [1, 511, 512, 513, 3, 5000, 1, 1024, 2, 700]
    checks, buckets, _ = checks_of(
        *(torch.ones(size, dtype=dtype) for size in sizes), waits=True, buckets=2, gap=gap
    )
    places = [place for bucket in buckets for place in bucket]
    for index, place in enumerate(places):
        for element in {0, place.numel() // 2, place.numel() - 1}:
            place[element] = float("nan")
            checks.look(0)
            checks.look(1)
            assert checks.take() == [index]
            place[element] = 1.0
    for place in places[1::2]:
        place[-1] = float("inf")
    checks.look(1)
    assert checks.take() == [n for n in range(len(places)) if n % 2 and n >= len(sizes)]
    checks.look(0)
    assert checks.take() == [n for n in range(len(sizes)) if n % 2]


def test_buckets_of_several_dtypes_are_looked_at_together():
    values = [torch.ones(600), torch.ones(600, dtype=torch.float16), torch.ones(0)]
    buckets = [(value, [(n, value)] if value.numel() else []) for n, value in enumerate(values)]
    checks = FiniteChecks(buckets, waits=True)
    for bad in ([0], [1], [0, 1], []):
        for index in bad:
            values[index][599] = float("inf")
        for bucket in range(3):
            checks.look(bucket)
        assert checks.take() == bad
        for value in values[:2]:
            value.fill_(1.0)
