"""Reduces buckets on devices over the process group of each host, and exchanges shards between the hosts.

A `paceline.reducer.process_group.Transport`. In the host, a reduce_scatter leaves this rank its shard of a
bucket. The shard goes through pinned memory to the peers on the other hosts (`device_shards` of
`paceline.reducer.between_hosts`). An all_gather within the host ends the backward. See docs/design/hosts.md.

Order of calls: the thread that launches the buckets starts the reduce_scatters in the order of the plan. The
thread that ends the backward starts the all_gathers in the same order. NCCL matches calls by their order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.reducer.between_hosts.device_shards import DeviceShards, Place, gaps_in_shard
from paceline.reducer.communicator import ReductionOptions
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.plan import Plan
from paceline.torch.communicator.calls import GroupCalls
from paceline.torch.communicator.flat_buckets import ProcessGroupTransport
from paceline.torch.communicator.local_group import LocalCalls
from paceline.torch.communicator.pinned_copies import DeviceCopies


class DeviceShardTransport(ProcessGroupTransport):
    """One rank's gradient buffer, the process group of its host, and its shards."""

    def __init__(
        self,
        gradient_buffer: GradientBuffer[torch.Tensor],
        calls: GroupCalls,
        options: ReductionOptions,
        local: LocalCalls,
        shards: DeviceShards,
        places: list[torch.Tensor],
        num_hosts: int,
        copies: DeviceCopies,
    ) -> None:
        super().__init__(gradient_buffer, calls, options)
        self.is_in_order = False
        self._shards = shards
        self._local, self._copies, self._num_hosts = local, copies, num_hosts
        self._places = places
        self._padded = [self._pad(flat, place) for flat, place in zip(self._buckets, places)]
        self._parts = [local.part_of(flat) for flat in self._padded]
        self._pinned = [copies.memory(part.numel(), part.dtype) for part in self._parts]
        self._gaps = _gaps(gradient_buffer.plan, places, local)
        self._brought: list[dist.Work] = []

    def launch(self, bucket: int, scale: float) -> ShardWork:
        if self._is_captured():
            raise ConfigError(
                "A backward that goes through other hosts cannot be recorded in a CUDA graph.",
                likely='reduce_through="hosts": shards of the gradients leave the device in each backward',
                hint='reduce_through="group", whose calls a graph can hold',
            )
        if bucket == 0:
            self._brought = []
        # The exchange returns the mean over the hosts, and a transport must return the sum.
        flat = self._prepare(bucket, scale * self._num_hosts)
        padded = self._padded[bucket]
        if padded is not flat:
            padded[: flat.numel()].copy_(flat)
        work = self._local.reduce_scatter(padded, bucket)

        def begin() -> Callable[[], bool]:
            with self._copies.stream():
                self._local.wait(work, bucket)
                return self._copies.begin(self._pinned[bucket], self._parts[bucket])

        # On a stream, the copy can be queued now: it waits for the reduce_scatter and nothing else.
        begun = begin() if self._local.is_on_streams else None

        def fetch() -> None:
            is_there = begin() if begun is None else begun
            # Polls, because a wait for an event has no deadline.
            self._local.waits.poll(is_there, bucket)
            self._places[bucket].copy_(self._pinned[bucket])

        self._shards.bring(bucket, fetch)
        return ShardWork(self, bucket)

    def may_have_overflowed(self, scale: float) -> bool:
        # Between hosts, only complete sums are divided. A backward that does not wait for the device cannot
        # report an overflow.
        return super().may_have_overflowed(scale) or (self._checks_finite and self._on_device.waits)

    def gathered(self, bucket: int) -> None:
        if not self._brought:
            self._gather_all()
        self._local.wait(self._brought[bucket], bucket, is_last=True)
        flat, padded = self._buckets[bucket], self._padded[bucket]
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])

    def _gather_all(self) -> None:
        self._shards.finish()
        reducer = self._shards.reducer
        if reducer.codes is not None and reducer.saw_nonfinite:
            # Compression codes spread a NaN into the gaps, where nothing would ever overwrite it.
            for gap in self._gaps:
                gap.zero_()
        with self._copies.stream():
            for bucket, (pinned, place) in enumerate(zip(self._pinned, self._places)):
                pinned.copy_(place)
                self._copies.begin(self._parts[bucket], pinned)
                self._brought.append(self._local.all_gather(self._padded[bucket], bucket))

    def _pad(self, flat: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The bucket, or longer memory for it that the ranks of the host can divide evenly."""
        count = place.numel() * self._local.size
        return flat if count == flat.numel() else flat.new_zeros(count)


class ShardWork:
    def __init__(self, transport: DeviceShardTransport, bucket: int) -> None:
        self._transport, self._bucket = transport, bucket

    def wait(self) -> None:
        self._transport.gathered(self._bucket)


def _gaps(plan: Plan, places: list[torch.Tensor], calls: LocalCalls) -> list[torch.Tensor]:
    return [
        memory[gap]
        for bucket, memory in enumerate(places)
        for gap in gaps_in_shard(plan, bucket, Place(calls.place, calls.size))
    ]
