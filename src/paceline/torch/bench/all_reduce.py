"""torch.distributed's all_reduce on a float32 tensor: Gloo, and Paceline as torch's backend."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.bench.on_numpy import check_sum, pattern, time_calls

LIMIT = timedelta(seconds=60)


def form_group(backend: str, rank: int, world_size: int) -> None:
    """Form torch's default group of this bench job, with `gloo` or `paceline`.

    `paceline.torch`, which registers the latter, has been imported: this module is within it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file and not a port: nobody else can take it between choosing and binding.
    store = Path(os.environ["PACELINE_BENCH_DIRECTORY"], "store")
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=LIMIT
    )


class Gloo:
    """torch.distributed on its Gloo backend."""

    backend = "gloo"

    def __init__(self, rank: int, world_size: int) -> None:
        form_group(self.backend, rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._tensor = torch.zeros(1)

    def prepare(self, nbytes: int) -> None:
        """Make the tensor and check one all-reduce."""
        self._tensor = torch.from_numpy(pattern(nbytes // 4, self._rank + 1))
        dist.all_reduce(self._tensor)
        check_sum(self._tensor.numpy(), self._world_size, type(self).__name__)
        self._tensor.zero_()

    def time(self, iterations: int) -> float:
        """Seconds for `iterations` all-reduces."""
        return time_calls(lambda: dist.all_reduce(self._tensor), iterations)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class PacelineBackend(Gloo):
    """torch.distributed on the backend that `import paceline.torch` registers."""

    backend = "paceline"
