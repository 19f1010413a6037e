"""In-place all-reduces of float32 sums: Paceline, torch.distributed, and Open MPI through mpi4py.

Each class imports the library that it measures, so that classes without torch run without it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


def pattern(count: int, scale: int) -> Array:
    """Return 1, 2, ..., 7, 1, 2, ... times `scale`: sums are exact in float32 and reveal a shifted chunk."""
    return ((np.arange(count) % 7 + 1) * scale).astype(np.float32)


def check_sum(got: Array, world_size: int, who: str) -> None:
    """Raise unless `got` is the sum over ranks of `pattern(count, rank + 1)`, exactly."""
    expected = pattern(got.size, world_size * (world_size + 1) // 2)
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        at = int(wrong[0])
        raise ArithmeticError(
            f"{who}: wrong answer at {wrong.size} of {got.size} elements; "
            f"first at {at}: expected {expected[at]}, got {got[at]}"
        )


def time_calls(call: Callable[[], Any], iterations: int) -> float:
    """Return the seconds of `iterations` calls, after one untimed call that synchronizes the ranks."""
    call()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return time.perf_counter() - start


class _OnNumpy:
    """Checks one all-reduce of a float32 array, then times all-reduces of zeros."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._call: Callable[[], Any] = lambda: None

    def prepare(self, nbytes: int) -> None:
        """Allocate the array and check one all-reduce."""
        array = self._allocate(nbytes // 4)
        self._call = self._bind(array)
        array[:] = pattern(array.size, self._rank + 1)
        self._call()
        check_sum(array, self._world_size, type(self).__name__)
        array[:] = 0  # repeated sums would soon be infinite

    def time(self, iterations: int) -> float:
        """Seconds for `iterations` all-reduces."""
        return time_calls(self._call, iterations)

    def _allocate(self, count: int) -> Array:
        return np.empty(count, np.float32)

    def _bind(self, array: Array) -> Callable[[], Any]:
        raise NotImplementedError


class PacelineAnyArray(_OnNumpy):
    """Paceline on an ordinary array: copied through the region."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        import paceline

        self._group = paceline.init(timeout_s=60.0)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _bind(self, array: Array) -> Callable[[], Any]:
        return functools.partial(self._group.all_reduce, array)


class PacelineInRegion(PacelineAnyArray):
    """Paceline on an array in the region: no copy."""

    def _allocate(self, count: int) -> Array:
        array: Array = self._group.allocate((count,), np.float32)
        return array


class OpenMpi(_OnNumpy):
    """MPI_Allreduce in place, with the MPI library that mpi4py uses."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() != world_size:
            raise RuntimeError(f"mpirun made a world of {MPI.COMM_WORLD.Get_size()} instead of {world_size}")
        self._mpi = MPI

    def close(self) -> None:
        """Finalize MPI, without which mpirun reports an error."""
        self._mpi.Finalize()

    def _bind(self, array: Array) -> Callable[[], Any]:
        return functools.partial(self._mpi.COMM_WORLD.Allreduce, self._mpi.IN_PLACE, array)


class Gloo:
    """torch.distributed on its Gloo backend."""

    backend = "gloo"

    def __init__(self, rank: int, world_size: int) -> None:
        import torch

        from benchmarks.workers.torch_models import form_group

        form_group(self.backend, rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._tensor = torch.zeros(1)
        self._all_reduce: Callable[[torch.Tensor], Any] = torch.distributed.all_reduce

    def prepare(self, nbytes: int) -> None:
        """Create the tensor and check one all-reduce."""
        import torch

        self._tensor = torch.from_numpy(pattern(nbytes // 4, self._rank + 1))
        self._all_reduce(self._tensor)
        check_sum(self._tensor.numpy(), self._world_size, type(self).__name__)
        self._tensor.zero_()

    def time(self, iterations: int) -> float:
        """Seconds for `iterations` all-reduces."""
        return time_calls(lambda: self._all_reduce(self._tensor), iterations)

    def close(self) -> None:
        """Leave the group."""
        from torch.distributed import destroy_process_group

        destroy_process_group()


class PacelineBackend(Gloo):
    """torch.distributed on the backend that `import paceline.torch` registers."""

    backend = "paceline"


class DeepSpeed(Gloo):
    """DeepSpeed's all-reduce in shared memory, for tensors on the CPU; compiled when it is first used."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        # Part of the name of its shared memory: the same on all ranks, and different in other jobs.
        os.environ |= {"LOCAL_SIZE": str(world_size), "MASTER_PORT": str(os.getppid())}
        import deepspeed.comm as comm
        import torch

        comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # Without it, DeepSpeed silently makes this call over torch's process group.
        if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
            raise RuntimeError("DeepSpeed could not load deepspeed_shm_comm")
        self._all_reduce = comm.inference_all_reduce

    def close(self) -> None:
        """Leave the group, and remove the shared memory of this rank, which DeepSpeed leaves behind."""
        super().close()
        name = f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{self._rank}"
        for file in Path("/dev/shm").glob(name):
            file.unlink()
