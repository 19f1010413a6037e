"""What the ranks do while a pair of faults strikes: backward passes, on the core alone and through torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.fault.pairs import Array, Program
from tests.multiprocess.reducer_world import World

_MODEL = [(40_000, "float32")] * 3
_CAP_BYTES = 120_000  # several buckets, of which the ends lie within parameters


class Passes(Program):
    """Backward passes whose gradients are each rank's own memory."""

    assigns_chunks = False

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._world = World(group, _MODEL, _CAP_BYTES, self.assigns_chunks)
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        for param in range(len(_MODEL)):
            self._got[param] = self._world.mark(param, number, elsewhere=True)
        assert self._world.reducer.finish(1, False) == 0
        self._world.check(self._got, number)

    def gradients(self) -> Iterable[Array]:
        return self._got.values()


class AssignedPasses(Passes):
    """The same, where each rank has chunks of its own in every bucket."""

    assigns_chunks = True


class VoidPasses(Program):
    """Passes of which every second one is void: rank 0 leaves a parameter out."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._world = World(group, _MODEL, _CAP_BYTES)
        self._got: dict[int, Array] = {}

    def step(self, number: int) -> None:
        leaves_out = number % 2 == 1
        for param in range(2 if leaves_out and self.group.rank == 0 else 3):
            self._got[param] = self._world.mark(param, number, elsewhere=True)
        assert self._world.reducer.finish(1, False) == int(leaves_out)
        if not leaves_out:
            self._world.check(self._got, number)

    def gradients(self) -> Iterable[Array]:
        return self._got.values()


class WrappedInView(Program):
    """torch's wrapper, with gradients that live in the memory that the ranks share."""

    in_view = True

    def __init__(self, group: Any) -> None:
        import torch

        from paceline.torch import DistributedDataParallel

        super().__init__(group)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 50, bias=False))
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

    def gradients(self) -> Iterable[Array]:
        return [np.asarray(p.grad) for p in self._model.parameters() if p.grad is not None]


class WrappedByPointer(WrappedInView):
    """The same with gradients in torch's own memory, the default."""

    in_view = False
