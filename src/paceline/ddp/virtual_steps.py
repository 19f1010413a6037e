"""Steps of a fixed number of virtual ranks: the same training, bit for bit, on any number of processes.

Each process plays some of the virtual ranks, one micro-batch after the other. Each micro-batch begins in the
same state wherever it runs: without gradients, with the buffers of the last step, and with random numbers
that are derived from (seed, step, virtual rank). Its gradients are removed from the parameters and added to
the sums of this process, which form this process's subtree of the tree over all virtual ranks. The reducer
sums the rest of the tree, and divides.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np

from paceline.arguments import Arguments
from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.errors import ConfigError
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.backward.front_end_interface import Tensors
from paceline.reducer.buffer_policy import policy_of
from paceline.reducer.framework_ops import FrameworkOps
from paceline.reducer.model_agreement import ModelDescription, check_agreement, reporting_to_peers
from paceline.reducer.peers import Ranks
from paceline.reducer.sum_order import OrderedSum

Batch = TypeVar("Batch")
_Named = dict[str, Any]
_Gradients = dict[int, Any]

_log = logging.getLogger("paceline")
_END: Any = object()


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual ranks of one model, and the objects with which this process plays its own.

    Attributes:
        owner: The class of the wrapper.
        count: Number of virtual ranks.
        played: The virtual ranks of this process, in the order in which it plays them.
        allows_unused: Whether a micro-batch may leave parameters without a gradient.
        buffers: The policy of buffers, by name pattern.
        local: A context in which no backward is averaged.
        step: Returns how many steps there were in the whole run.
    """

    owner: str
    count: int
    played: range
    allows_unused: bool
    buffers: Mapping[str, str]
    ops: FrameworkOps[Any]
    checkpoint_ops: CheckpointOps
    tensors: Tensors
    peers: Ranks
    backward_sync: BackwardSync[Any]
    local: Callable[[], contextlib.AbstractContextManager[None]]
    step: Callable[[], int]

    def steps(self, batches: Iterable[Batch], seed: int, threads: int) -> Iterator[Step[Batch]]:
        """See `WrappedModel.steps`."""
        before = self.ops.use_threads(threads)
        try:
            self._seed(seed, "loader")  # because its iterator may draw a seed for its workers
            iterator = iter(batches)
            while True:
                self._seed(seed, "data", self.played[0])
                first = next(iterator, _END)
                if first is _END:
                    break
                step = Step(self, iterator, first, seed)
                yield step
                step.check_done()
            self._seed(seed, "between")
        finally:
            self.ops.use_threads(before)

    def _seed(self, seed: int, *parts: object) -> None:
        seed_generators(self.checkpoint_ops, seed, self.step(), *parts)

    def check_loader(self, batches: Iterable[Any], seed: int, threads: int) -> None:
        """Raise on every rank if the ranks would not make the same steps. Collective."""
        doing = "begin steps"
        with reporting_to_peers(lambda: (self.peers.exchange, self.peers.timeout_s), doing):
            steps = self._steps_of(batches)
        if self.peers.world_size > 1:
            described = {"seed": str(seed), "threads": str(threads), "steps of the loader": str(steps)}
            description = ModelDescription((), (), described, doing=doing)
            check_agreement(description, self.peers.exchange, self.peers.timeout_s)

    def _steps_of(self, batches: Iterable[Any]) -> int | None:
        """The number of steps of a loader; None if it has no length."""
        call, number = f"{self.owner}.steps", len(self.played)
        sampler = getattr(batches, "batch_sampler", batches)
        dealt_to = getattr(sampler, "virtual_ranks", self.count)
        if dealt_to != self.count:
            raise ConfigError(
                f"{call}: the sampler has other virtual ranks than the wrapped model.",
                expected=f"DistributedBatchSampler(..., global_batch_size=..., virtual_ranks={self.count})",
                got=f"virtual_ranks={dealt_to}",
            )
        try:
            length = len(batches)  # type: ignore[arg-type]
        except TypeError:
            return None
        if length % number:
            raise ConfigError(
                f"{call}: the loader has no whole number of steps.",
                where=f"rank {self.peers.rank} of {self.peers.world_size}",
                seen=f"{length} batches; this process plays {number} virtual ranks, each with one in a step",
                hint="paceline.data.DistributedBatchSampler(..., global_batch_size=..., "
                f"virtual_ranks={self.count})",
            )
        return length // number


class Step(Generic[Batch]):
    """One optimizer step. Iterating over it yields the micro-batches of the virtual ranks that this process
    plays.

    When the loop over it has ended, `.grad` is the mean over all virtual ranks, on every process.
    """

    def __init__(self, virtual: VirtualRanks, batches: Iterator[Batch], first: Batch, seed: int) -> None:
        self._virtual, self._batches, self._first, self._seed = virtual, batches, first, seed
        self._is_begun = self._is_done = False
        self._is_known = False  # whether the other ranks learn if this one completes the step

    def __iter__(self) -> Iterator[Batch]:
        if self._is_begun:
            raise ConfigError(
                f"{self._virtual.owner}.steps: a step was iterated over twice.",
                hint="for step in ddp.steps(loader): for batch in step: ...",
            )
        self._is_begun = True
        return self._micro_batches()

    def check_done(self) -> None:
        if not self._is_done:
            self._fail("a step was left before its last micro-batch.", "run the inner loop to its end")

    def _micro_batches(self) -> Iterator[Batch]:
        virtual, batch, parts = self._virtual, self._first, (self._seed, self._virtual.step())
        virtual.backward_sync.settle_last()
        leaves = _Leaves(virtual)
        try:
            for number, rank in enumerate(virtual.played):
                if number:
                    seed_generators(virtual.checkpoint_ops, *parts, "data", rank)
                    batch = next(self._batches, _END)
                    if batch is _END:
                        self._fail(
                            f"the loader has ended within a step, after {number} of {len(virtual.played)} "
                            "micro-batches.",
                            "as many micro-batches in each step as virtual ranks are played here",
                        )
                leaves.begin()
                seed_generators(virtual.checkpoint_ops, *parts, "micro-batch", rank)
                with virtual.local():
                    yield batch
                if not leaves.take():
                    self._fail(
                        "a micro-batch had no backward.", "one backward in each pass of the inner loop"
                    )
            self._is_known = True
            leaves.average()
            self._is_done = True
        finally:
            if not self._is_done:
                leaves.begin()
                if not self._is_known:
                    virtual.backward_sync.break_off()
        seed_generators(virtual.checkpoint_ops, *parts, "between")

    def _fail(self, seen: str, hint: str) -> NoReturn:
        """Raise, after reporting the error to the ranks that wait in this step."""
        self._is_known = True
        peers = self._virtual.peers
        where = f"rank {peers.rank} of {peers.world_size}, step {self._virtual.step()}"
        error = ConfigError(f"{self._virtual.owner}.steps: {seen}", where=where, hint=hint)
        self._virtual.backward_sync.fail_step(error)


class _Leaves:
    """The sums over the micro-batches of one process in one step."""

    def __init__(self, virtual: VirtualRanks) -> None:
        self._virtual, self._ops = virtual, virtual.ops
        self._gradients = OrderedSum[_Gradients](self._join)
        self._weights = OrderedSum[float](float.__add__)
        self._averages = OrderedSum[_Named](self._join)
        self._packed: list[Any] = []  # sparse gradients, which are added at the end
        self._used: list[set[int]] = []
        self._begun_with, self._has_begun = self._copies(), False
        self._first_buffers: _Named = {}

    def begin(self) -> None:
        """Remove the gradients and buffer changes of earlier micro-batches."""
        self._virtual.backward_sync.gradients.restore({})
        if self._has_begun:
            self._write(self._begun_with)
        self._has_begun = True

    def take(self) -> bool:
        """Add up the gradients of a micro-batch and remove them; False: it had no backward."""
        backward_sync, ops = self._virtual.backward_sync, self._ops
        had_backward, weight = backward_sync.take_local()
        if not had_backward:
            return False
        sparse, in_plan = backward_sync.sparse, range(len(self._virtual.tensors.names))
        if sparse.indices:
            self._packed.append(sparse.pack(weight))
        kept = {
            index: gradient
            for index, (gradient, _) in backward_sync.gradients.keep().items()
            if gradient is not None
        }
        backward_sync.gradients.restore({})
        self._used.append(set(kept).intersection(in_plan))
        for index in sparse.indices:
            kept.pop(index, None)
        gradients = list(kept.values()) if weight else []
        sums = ops.sums_of(gradients)
        del gradients
        if sums and weight != 1.0:
            ops.scale(sums, weight)
        self._gradients.add(dict(zip(kept, sums)))
        self._weights.add(weight)
        averaged = self._averaged()
        if averaged:
            self._averages.add(dict(zip(averaged, ops.sums_of([ops.copied(b) for b in averaged.values()]))))
        if len(self._used) == 1 < len(self._virtual.played):
            self._first_buffers = self._copies()
        return True

    def average(self) -> None:
        """Set `.grad` and the buffers to those of the whole step. Collective."""
        virtual, ops, backward_sync = self._virtual, self._ops, self._virtual.backward_sync
        used = set.union(*self._used)
        if not virtual.allows_unused:
            used.intersection_update(*self._used)  # the end of a backward reports missing gradients
        sums = self._gradients.take()
        self._write(self._first_buffers)
        backward_sync.average_sums(
            {index: sums.pop(index, None) for index in sorted(used)}, self._weights.take(), self._packed
        )
        if self._averaged():
            totals = self._averages.take()
            for total in totals.values():
                backward_sync.communicator.sum(total)
                ops.divide(total, virtual.count)
            self._write(totals)

    def _copies(self) -> _Named:
        return {name: self._ops.copied(each) for name, each in self._now().items()}

    def _now(self) -> _Named:
        return self._virtual.tensors.current_buffers()

    def _averaged(self) -> _Named:
        patterns = self._virtual.buffers
        return {
            name: buffer
            for name, buffer in self._now().items()
            if patterns and policy_of(name, patterns) == "average" and buffer.is_floating_point()
        }

    def _write(self, values: _Named) -> None:
        if not values:
            return
        now = self._now()
        for name, value in values.items():
            if name in now:
                self._ops.copy(value, now[name])
        self._virtual.backward_sync.buffers.note_own_writes()

    def _join(self, one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
        """The sum, in the memory of the first. A value that only one of them has is added to zero."""
        both = [name for name in one if name in other]
        self._ops.add([one[name] for name in both], [other[name] for name in both])
        for name in one.keys() ^ other.keys():
            one[name] = one[name] if name in one else other[name]
            self._ops.add([one[name]], 0.0)
        return one


def seed_generators(ops: CheckpointOps, *parts: object) -> None:
    """Seed all generators of this process with a hash of these parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    ops.seed(number)


def note_idle_cores(owner: str, threads: int, world_size: int) -> None:
    """Log that some cores stay idle. Called on rank 0."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads * world_size < cores:
        _log.info(
            "paceline: %s.steps: %d processes of %d threads leave cores idle, of which this one may use %d; "
            "more processes make the same result sooner, another number of threads makes another one",
            owner, world_size, threads, cores,
        )  # fmt: skip


def checked_steps(owner: str, seed: Any, threads: Any) -> tuple[int, int]:
    check = Arguments(f"{owner}.steps")
    return (
        check.whole("seed", seed, hint="any whole number, the same on all ranks"),
        check.whole("threads", threads, least=1, hint="as many for each process, whatever their number"),
    )


def check_model(owner: str, model: Any, ops: FrameworkOps[Any]) -> None:
    """Refuse models whose results depend on the number of processes."""
    modules = model.modules() if hasattr(model, "modules") else model.sublayers(include_self=True)
    if any("SyncBatchNorm" in base.__name__ for each in modules for base in type(each).__mro__):
        raise ConfigError(
            f"{owner}: SyncBatchNorm exchanges values in forward, which virtual ranks make in turn.",
            hint='BatchNorm, with buffers={"*running*": "average"} for its statistics; or no virtual_ranks',
            argument="virtual_ranks",
        )
    if rescaled := [seen for seen, _ in ops.rescaled(model)]:
        raise ConfigError(
            f"{owner}: an embedding with max_norm rescales its weight in each forward, so the result would "
            "depend on the number of processes.",
            seen="; ".join(rescaled),
            hint="no max_norm, but rescale the weight after optimizer.step(); or no virtual_ranks",
            argument="virtual_ranks",
        )
