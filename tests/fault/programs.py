"""The programs of ranks while a fault strikes: a program is one step, repeated until something ends it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline import _core
from tests.multiprocess.reducer_world import World

Step = Callable[[int], None]
_LARGE = 150_000  # float64s: several chunks


def small(group: Any) -> Step:
    """One synchronisation per call."""
    return lambda step: group.all_reduce(np.ones(10))


def heavy(group: Any) -> Step:
    """Like `small`, but rank 1 has half a gigabyte, which the kernel must tear down when it dies."""
    ballast = np.ones(1 << 26 if group.rank == 1 else 10)
    return lambda step: group.all_reduce(ballast[:10])


def in_region(group: Any) -> Step:
    """Reduced in place, between two synchronisations."""
    array = group.allocate(_LARGE)
    return lambda step: group.all_reduce(array)


def in_pieces(group: Any) -> Step:
    """Copied through the region."""
    array = np.ones(_LARGE)
    return lambda step: group.all_reduce(array)


def movements(group: Any) -> Step:
    """Each of the calls that only copy, from any array and from the region."""
    world = group.world_size
    array, blocks, out = np.ones(_LARGE), np.ones((world, _LARGE)), np.ones(_LARGE)
    shared = group.allocate(_LARGE)

    def step(_: int) -> None:
        group.broadcast(array)
        group.broadcast(shared, root=1)
        group.all_gather(array)
        group.gather(shared, root=1)
        group.scatter(blocks, out, root=2)
        group.all_to_all(blocks)
        group.reduce_scatter(blocks)

    return step


def messages(group: Any) -> Step:
    """Messages around the ring, longer than a channel holds."""
    out, into = np.ones(_LARGE), np.ones(_LARGE)

    def step(_: int) -> None:
        sent = group.send(out, (group.rank + 1) % group.world_size, async_op=True)
        group.recv(into, (group.rank - 1) % group.world_size)
        sent.wait()

    return step


def allocations(group: Any) -> Step:
    """A new array in each step."""
    return lambda step: group.allocate(5000).fill(step)


def steps(group: Any) -> Step:
    """Steps of an optimizer on memory that all ranks share; each rank has a shard in two blocks."""
    world, rank = group.world_size, group.rank
    array = group.allocate(1024)
    if rank == 0:
        array[:] = 0
    group.barrier(timeout_s=60)
    offset = array.__array_interface__["data"][0] - group._core.pointer(0, rank)
    at = group._core.pointer(offset, 0)  # that of rank 0, for all
    step_table = _core.StepTable(at, world, rank)
    shared = np.frombuffer((ctypes.c_double * 1024).from_address(at), np.float64)[512:]
    kept = np.zeros(2)

    def step(_: int) -> None:
        group.barrier()
        assert step_table.decide(True)
        for block in range(2):
            own = shared[2 * rank + block :]
            step_table.open_block(rank, block, [(own.ctypes.data, kept[block:].ctypes.data, 8)])
            own[0] += 1
            step_table.close_block(rank, block)
        step_table.finish(rank)
        group.barrier()
        assert step_table.is_whole

    return step


def backwards(group: Any) -> Step:
    """Backwards in which every gradient is used."""
    world = World(group, [(40_000, "float32")] * 3, cap_bytes=60_000)

    def step(number: int) -> None:
        for param in range(3):
            world.mark(param, number, elsewhere=param == 1)
        assert world.reducer.finish(1, False).outcome == 0

    return step


def void_backwards(group: Any) -> Step:
    """Backwards in which nothing is reduced: rank 0 leaves a parameter out."""
    world = World(group, [(40_000, "float32")] * 3, cap_bytes=60_000)

    def step(number: int) -> None:
        for param in range(3 if group.rank else 2):
            world.mark(param, number)
        assert world.reducer.finish(1, False).outcome == 1

    return step
