"""The programs of the ranks while a pair of faults strikes.

Backwards, on the core alone and through torch; sums for other hosts; collectives, messages, and groups that
form and end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from paceline import _core
from paceline.collectives.ops import DTYPE_NUMBERS
from paceline.errors import PacelineError
from tests.fault import programs
from tests.fault.faults import ARRIVAL, BACKWARD, OPTIMIZER_STEP, REDUCTION, Point
from tests.fault.pairs import WORLD_SIZE, Array, Program
from tests.multiprocess.reducer_world import World, offsets_of

_MODEL = [(17_000, "float32")] * 3
_CAP_BYTES = 51_000  # several buckets, whose ends lie within parameters
_SEVERAL_PIECES = 70_000  # float64s
_ONE_PIECE = 5_000


def _value(number: int, rank: int) -> float:
    return (rank + 1) * (number % 7 + 1)


def _total(number: int) -> float:
    return sum(_value(number, rank) for rank in range(WORLD_SIZE))


def _reduce_and_check(group: Any, array: Array, number: int) -> None:
    array[:] = _value(number, group.rank)
    group.all_reduce(array)
    np.testing.assert_array_equal(array, _total(number))


# --- backwards ---


class Backwards(Program):
    """Backwards whose gradients are each rank's own memory."""

    points = BACKWARD
    assigns_chunks: ClassVar[bool] = False

    def __init__(self, group: Any) -> None:
        self._world = World(group, _MODEL, _CAP_BYTES, self.assigns_chunks)
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        for param in range(len(_MODEL)):
            self._got[param] = self._world.mark(param, number, elsewhere=True)
        assert self._world.reducer.finish(1, False).outcome == 0
        self._world.check(self._got, number)

    def memory(self) -> Iterable[Array]:
        return self._got.values()


class AssignedBackwards(Backwards):
    """The same, with chunks assigned to each rank in every bucket."""

    assigns_chunks = True


class BackwardsInBuffer(Program):
    """Backwards whose gradients lie in the memory that the ranks share."""

    points = BACKWARD

    def __init__(self, group: Any) -> None:
        self._world = World(group, _MODEL, _CAP_BYTES)

    def step(self, number: int) -> None:
        got = {param: self._world.mark(param, number) for param in range(len(_MODEL))}
        assert self._world.reducer.finish(1, False).outcome == 0
        self._world.check(got, number)

    def memory(self) -> Iterable[Array]:
        return self._world.views


class ScatteringBackwards(Program):
    """Backwards in which each rank gets a shard of the means: parameters are cut within a segment."""

    points = BACKWARD
    _own: ClassVar[tuple[tuple[int, int, int, int], ...]] = (  # parameter, first and last element, rank
        (0, 0, 12_800, 0),
        (0, 12_800, 17_000, 1),
        (1, 0, 17_000, 1),
        (2, 0, 640, 0),
        (2, 640, 17_000, 2),
    )

    def __init__(self, group: Any) -> None:
        self._rank = group.rank
        offsets = offsets_of(_MODEL)
        owned = [
            (offsets[param] + 4 * begin, offsets[param] + 4 * end, rank)
            for param, begin, end, rank in self._own
        ]
        self._world = World(group, _MODEL, _CAP_BYTES, assigns_chunks=True, owned=owned)

    def step(self, number: int) -> None:
        got = {param: self._world.mark(param, number) for param in range(len(_MODEL))}
        assert self._world.reducer.finish(1, False).outcome == 0
        for param, begin, end, rank in self._own:
            if rank == self._rank:
                mean = self._world.mean(param, number)
                np.testing.assert_allclose(got[param][begin:end], mean[begin:end], rtol=1e-6, atol=1e-6)

    def memory(self) -> Iterable[Array]:
        """Empty: after a backward that has failed its results are not used."""
        return ()


class VoidBackwards(Program):
    """Backwards of which every second one is void: rank 0 leaves a parameter out."""

    points = BACKWARD

    def __init__(self, group: Any) -> None:
        self._rank = group.rank
        self._world = World(group, _MODEL, _CAP_BYTES)
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        leaves_out = number % 2 == 1
        for param in range(2 if leaves_out and self._rank == 0 else 3):
            self._got[param] = self._world.mark(param, number, elsewhere=True)
        assert self._world.reducer.finish(1, False).outcome == int(leaves_out)
        if not leaves_out:
            self._world.check(self._got, number)

    def memory(self) -> Iterable[Array]:
        return self._got.values()


class NewReducers(Program):
    """A new reducer for each step, with its own memory, as if a model is wrapped anew each time."""

    points = (*ARRIVAL, Point.ALLOCATE, *BACKWARD)

    def __init__(self, group: Any) -> None:
        self._group = group
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        world = World(self._group, _MODEL[:1], _CAP_BYTES)
        self._got = {0: world.mark(0, number, elsewhere=True)}
        assert world.reducer.finish(1, False).outcome == 0
        world.check(self._got, number)

    def memory(self) -> Iterable[Array]:
        return self._got.values()


class HostBackwards(Program):
    """The work of one host of two for a mean: sums of its ranks, and means for them.

    The other host is simulated: it would send the sum of its ranks, which is known.
    """

    points = tuple(point for point in BACKWARD if point is not Point.MARK_READY)
    _buckets: ClassVar[tuple[int, ...]] = (20_000, 12_000)  # elements, float32

    def __init__(self, group: Any) -> None:
        self._group = group
        ends = np.cumsum(self._buckets) * 4
        places = [(int(end) - 4 * count, int(end)) for end, count in zip(ends, self._buckets, strict=True)]
        dtype = DTYPE_NUMBERS["float32"]
        self._sums = _core.HostSums(group._core, int(ends[-1]), [(*place, dtype) for place in places], 1, 8)
        memory = (ctypes.c_byte * int(ends[-1])).from_address(self._sums.buffer_pointer)
        gradient_buffer = np.frombuffer(memory, np.float32)
        self._gradients = [gradient_buffer[begin // 4 : end // 4] for begin, end in places]

    def step(self, number: int) -> None:
        try:
            self._backward(number)
        except PacelineError:
            # As HierarchicalReducer does: this notifies the other ranks, and no other rank writes here any
            # more.
            self._group._core.abort("gave up")
            self._sums.keep_buffer()
            raise

    def _backward(self, number: int) -> None:
        rank = self._group.rank
        self._sums.begin_backward(1.0)
        for bucket, gradient in enumerate(self._gradients):
            gradient[:] = _value(number + bucket, rank)
            self._sums.post(bucket)
        for bucket, count in enumerate(self._buckets):
            first = count * rank // WORLD_SIZE
            share = count * (rank + 1) // WORLD_SIZE - first
            ours, theirs = np.zeros(share, np.float32), np.full(share, 7, np.float32)
            self._sums.wait_complete(bucket)
            self._sums.sum(bucket, first, share, (0, WORLD_SIZE), ours.ctypes.data)
            sums = [ours.ctypes.data, theirs.ctypes.data]
            self._sums.publish(bucket, first, share, sums, 2.0 * WORLD_SIZE)
            self._sums.count_share()
        self._sums.wait_published()
        for bucket, gradient in enumerate(self._gradients):
            mean = (_total(number + bucket) + 7) / (2 * WORLD_SIZE)
            np.testing.assert_allclose(gradient, mean, rtol=1e-6)

    def memory(self) -> Iterable[Array]:
        return self._gradients


# --- collectives, messages and groups ---


class SmallCalls(Program):
    """Arrays that are exchanged at the only barrier of a call."""

    points = (*ARRIVAL, *REDUCTION)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._array = np.zeros(10)

    def step(self, number: int) -> None:
        _reduce_and_check(self._group, self._array, number)

    def memory(self) -> Iterable[Array]:
        return [self._array]


class RegionCalls(Program):
    """An array in the region, reduced in place. It stays shared, so `memory` is a copy of it."""

    points = (*ARRIVAL, *REDUCTION)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._array = group.allocate(_SEVERAL_PIECES)
        self._copy = np.zeros(_SEVERAL_PIECES)

    def step(self, number: int) -> None:
        _reduce_and_check(self._group, self._array, number)
        self._copy[:] = self._array

    def memory(self) -> Iterable[Array]:
        return [self._copy]


class PieceCalls(Program):
    """An array of several chunks, copied through the region."""

    points = (*ARRIVAL, *REDUCTION, Point.COPY_OUT)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._array = np.zeros(_SEVERAL_PIECES)

    def step(self, number: int) -> None:
        _reduce_and_check(self._group, self._array, number)

    def memory(self) -> Iterable[Array]:
        return [self._array]


class Movements(Program):
    """The calls that copy."""

    points = (*ARRIVAL, *REDUCTION, Point.COPY_OUT)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._array = np.zeros(_ONE_PIECE)
        self._blocks = np.zeros((WORLD_SIZE, _ONE_PIECE))
        self._got = np.zeros(_ONE_PIECE)

    def step(self, number: int) -> None:
        group, rank = self._group, self._group.rank
        values = np.array([_value(number, each) for each in range(WORLD_SIZE)])
        self._array[:] = values[rank]
        group.broadcast(self._array, root=1)
        np.testing.assert_array_equal(self._array, values[1])
        self._array[:] = values[rank]
        np.testing.assert_array_equal(group.all_gather(self._array)[:, 0], values)
        self._blocks[:] = values[:, None] + rank
        group.scatter(self._blocks, self._got, root=2)
        np.testing.assert_array_equal(self._got, values[rank] + 2)
        np.testing.assert_array_equal(
            group.all_to_all(self._blocks)[:, 0], values[rank] + np.arange(WORLD_SIZE)
        )
        total = group.reduce_scatter(self._blocks)
        np.testing.assert_array_equal(total, WORLD_SIZE * values[rank] + sum(range(WORLD_SIZE)))

    def memory(self) -> Iterable[Array]:
        return [self._array, self._blocks, self._got]


class Messages(Program):
    """Messages around the ring, longer than a channel holds."""

    points = (Point.SEND, Point.RECEIVE)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._out, self._into = np.zeros(8 * _ONE_PIECE), np.zeros(8 * _ONE_PIECE)

    def step(self, number: int) -> None:
        rank = self._group.rank
        self._out[:] = _value(number, rank)
        sent = self._group.send(self._out, (rank + 1) % WORLD_SIZE, async_op=True)
        before = (rank - 1) % WORLD_SIZE
        self._group.recv(self._into, before)
        sent.wait()
        np.testing.assert_array_equal(self._into, _value(number, before))

    def memory(self) -> Iterable[Array]:
        return [self._out, self._into]


class Subgroups(Program):
    """A group that forms, makes a call and ends, in each step."""

    points = (*ARRIVAL, *REDUCTION, Point.SEND, Point.RECEIVE)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._group = group
        self._array = np.zeros(10)

    def step(self, number: int) -> None:
        with self._group.subgroup([2, 0, 1]) as inner:
            self._array[:] = _value(number, self._group.rank)
            inner.all_reduce(self._array)
        np.testing.assert_array_equal(self._array, _total(number))

    def memory(self) -> Iterable[Array]:
        return [self._array]


# --- an optimizer's steps ---


class Steps(Program):
    """Steps of an optimizer on memory that all ranks share: each writes its shard."""

    points = (*ARRIVAL, *OPTIMIZER_STEP)
    most_apart = 1

    def __init__(self, group: Any) -> None:
        self._step = programs.steps(group)

    def step(self, number: int) -> None:
        self._step(number)

    def memory(self) -> Iterable[Array]:
        return []  # all of it belongs to all ranks


# --- all of it ---


class Training(Program):
    """A backward and a script's other operations around it: a step passes every labelled point."""

    points = tuple(Point)

    def __init__(self, group: Any) -> None:
        self._group = group
        self._world = World(group, _MODEL[:2], _CAP_BYTES)
        self._buffers = np.zeros(_ONE_PIECE)
        self._messages = Messages(group)
        self._steps = Steps(group)
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        self._buffers[:] = _value(number, self._group.rank)
        self._group.broadcast(self._buffers)
        np.testing.assert_array_equal(self._buffers, _value(number, 0))
        _reduce_and_check(self._group, self._group.allocate(_ONE_PIECE), number)
        self._messages.step(number)
        self._steps.step(number)
        for param in range(2):
            self._got[param] = self._world.mark(param, number, elsewhere=True)
        assert self._world.reducer.finish(1, False).outcome == 0
        self._world.check(self._got, number)

    def memory(self) -> Iterable[Array]:
        return [self._buffers, *self._messages.memory(), *self._got.values()]


# --- through torch ---


class WrappedInView(Program):
    """torch's wrapper, with gradients that live in the memory that the ranks share."""

    points = BACKWARD
    in_view: ClassVar[bool] = True

    def __init__(self, group: Any) -> None:
        import torch

        from paceline.torch import DistributedDataParallel

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 50, bias=False))
        # Linear in the batch: the mean of the gradients is the gradient of the mean, which is that of 2.0.
        self._model(torch.full((2, 100), 2.0)).sum().backward()
        self._means = [each.copy() for each in self.memory()]
        self._model.zero_grad()
        self._wrapped = DistributedDataParallel(
            self._model,
            process_group=group,
            bucket_cap_mb=0.02,
            gradient_as_bucket_view=self.in_view,
            nonfinite="raise",
        )
        self._batch = torch.full((2, 100), 1.0 + group.rank)

    def step(self, number: int) -> None:
        self._wrapped.zero_grad(set_to_none=number % 2 == 0)
        self._wrapped(self._batch).sum().backward()
        for gradient, mean in zip(self.memory(), self._means, strict=True):
            np.testing.assert_allclose(gradient, mean, rtol=1e-4, atol=1e-4)

    def memory(self) -> list[Array]:
        return [p.grad.numpy() for p in self._model.parameters() if p.grad is not None]


class WrappedByPointer(WrappedInView):
    """The same with gradients in torch's own memory, the default."""

    in_view = False


class WrappedSparse(Program):
    """torch's wrapper around an embedding with sparse gradients, and a dense layer."""

    points = (*ARRIVAL, Point.COPY_OUT, *BACKWARD)

    def __init__(self, group: Any) -> None:
        import torch

        from paceline.torch import DistributedDataParallel

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Embedding(20, 8, sparse=True), torch.nn.Linear(8, 4))
        words = [torch.tensor([rank, rank + 1, 5]) for rank in range(WORLD_SIZE)]
        for each in words:
            (self._model(each).sum() / WORLD_SIZE).backward()
        self._means = [each.copy() for each in self.memory()]
        self._model.zero_grad()
        self._wrapped = DistributedDataParallel(self._model, process_group=group)
        self._words = words[group.rank]

    def step(self, number: int) -> None:
        self._wrapped.zero_grad()
        self._wrapped(self._words).sum().backward()
        for gradient, mean in zip(self.memory(), self._means, strict=True):
            np.testing.assert_allclose(gradient, mean, rtol=1e-5, atol=1e-6)

    def memory(self) -> list[Array]:
        return [p.grad.to_dense().numpy() for p in self._model.parameters() if p.grad is not None]
