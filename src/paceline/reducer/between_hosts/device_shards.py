"""Averages shards of buckets on devices between hosts, for a transport over a host's process group.

The process group of a host leaves each of its ranks a shard of each bucket. From then on each rank acts as a
host of its own: a `HierarchicalReducer` over hosts of one rank each, whose plan has one parameter for each
shard, exchanges the shard with the peers, and returns the mean over the hosts.

Steps of a backward, on each rank
1. `bring`: a bucket has been launched. The function that fetches its shard (it waits for the process group
   and for the device) goes to a thread, so that no hook waits. The thread takes the shards in the order of
   the plan, and makes no call on any group.
2. The thread fetches the shard into memory of the host and marks it ready, and the exchange sends it while
   the backward goes on.
3. `finish`: all shards have been marked; the exchange is finished, and they hold means. The last shard is
   sent only now, so nothing that needs means can begin earlier.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.errors import CollectiveError, DeadlineError
from paceline.health.peer_errors import timeout_hint, unpack_failure
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.backward_errors import shorten
from paceline.reducer.between_hosts.compressed_sums import CodedSums
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer
from paceline.reducer.between_hosts.peer_waits import patience_with_its_host_s
from paceline.reducer.error_feedback import Floats
from paceline.reducer.plan import ParameterSpec, Plan, pieces_of, plan_whole_buckets
from paceline.reducer.reducer_interface import BackwardStatus
from paceline.rendezvous.resource_limits import start_thread

_LOOK_S = 0.05  # how often a wait checks for signals, and for a failure of which it was not notified


def shard_elements(plan: Plan, bucket: int, num_ranks: int) -> int:
    span = plan.buckets[bucket]
    return -(-span.nbytes // plan.sections[span.section].itemsize // num_ranks)


def plan_of_shards(plan: Plan, num_ranks: int) -> Plan:
    """A plan with one parameter, and one bucket, for one rank's shard of each bucket; the same for all local
    ranks.
    """
    specs = []
    for number, bucket in enumerate(plan.buckets):
        section = plan.sections[bucket.section]
        name = f"a shard of {shorten([plan.parameters[index].name for index in bucket.parameters])}"
        count = shard_elements(plan, number, num_ranks)
        specs.append(ParameterSpec(name, count, section.dtype, section.itemsize, "cpu"))
    return plan_whole_buckets(specs, caps_bytes=(1,), order=range(len(specs)))


@dataclass(frozen=True)
class Place:
    number: int
    num_ranks: int


def pieces_in_shard(plan: Plan, bucket: int, place: Place) -> list[tuple[int, slice, slice]]:
    """(parameter, its elements, where they are in the shard) of one rank's shard of a bucket, in order."""
    count = shard_elements(plan, bucket, place.num_ranks)
    span = plan.buckets[bucket]
    section = plan.sections[span.section]
    begin = (span.begin_byte - section.begin_byte) // section.itemsize + place.number * count
    found = []
    for index, first, last in sorted(pieces_of(plan, bucket), key=lambda piece: piece[1]):
        start, stop = max(first, begin), min(last, begin + count)
        if start < stop:
            own = (plan.offsets[index] - section.begin_byte) // section.itemsize
            found.append((index, slice(start - own, stop - own), slice(start - begin, stop - begin)))
    return found


def gaps_in_shard(plan: Plan, bucket: int, place: Place) -> list[slice]:
    at, gaps = 0, []
    for _, _, elements in pieces_in_shard(plan, bucket, place):
        if elements.start > at:
            gaps.append(slice(at, elements.start))
        at = elements.stop
    count = shard_elements(plan, bucket, place.num_ranks)
    return gaps if at == count else [*gaps, slice(at, count)]


def take_over(
    before: CodedSums, plan_before: Plan, codes: CodedSums, plan: Plan, place: Place, host: _core.HostGroup
) -> None:
    """Begin with the encoding errors of another plan of the same parameters. Collective over the host.

    The values that each rank of the host sends have changed, as in `CodedSums.take_over`.
    """
    kept = before.kept()
    errors: list[Floats] = [
        np.zeros(shard_elements(plan, bucket, place.num_ranks), np.float32)
        for bucket in range(len(plan.buckets))
    ]
    wholes: list[Floats] = [np.zeros(spec.numel, np.float32) for spec in plan.parameters]
    for bucket, error in enumerate(kept):
        for index, elements, of_shard in pieces_in_shard(plan_before, bucket, place):
            wholes[index][elements] = error[of_shard]
    for spec, whole in zip(plan.parameters, wholes):
        if spec.itemsize <= 4 and spec.numel:  # float64 is not encoded
            host.all_reduce(whole.ctypes.data, spec.numel, _core.DTYPES["float32"], ReduceOp.SUM)
    for bucket, error in enumerate(errors):
        for index, elements, of_shard in pieces_in_shard(plan, bucket, place):
            error[of_shard] = wholes[index][elements]
    codes.keep(errors)


class DeviceShards:
    """Exchanges one rank's shards with its peers, one backward after the other."""

    def __init__(
        self,
        reducer: HierarchicalReducer,
        num_shards: int,
        who: str,
        timeout_s: float,
        abort: Callable[[], None],
        peer_monitor: PeerMonitor,
        host: _core.HostGroup | None = None,
    ) -> None:
        self.reducer, self._host, self._saw_nonfinite = reducer, host, False
        self._num_shards, self._num_ready = num_shards, 0
        self._who, self._timeout_s = who, timeout_s
        self._abort, self._peer_monitor = abort, peer_monitor
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._coming: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-shards", daemon=True)
        start_thread(self._thread)

    def bring(self, bucket: int, fetch: Callable[[], None]) -> None:
        """Take over a bucket that was just launched; called in the plan's order. Does not block."""
        self.check()
        self._coming.put((bucket, fetch))

    def finish(self) -> None:
        """Wait until the gradient buffer of `reducer` holds the means over the hosts."""
        ends_s = time.monotonic() + patience_with_its_host_s(self._timeout_s)
        num_ready = 0
        with self._changed:
            while self._num_ready < self._num_shards:
                self.check()
                if self._num_ready > num_ready:  # each shard has a deadline of its own
                    num_ready = self._num_ready
                    ends_s = time.monotonic() + patience_with_its_host_s(self._timeout_s)
                if time.monotonic() > ends_s:
                    raise self._late()
                self._changed.wait(_LOOK_S)
            self._num_ready = 0
        self._peer_monitor.publish_waiting()  # for another host; ranks of this host have not caused this wait
        self.reducer.finish(BackwardStatus(1), False)
        if self._host is not None:
            saw = np.array([self.reducer.saw_nonfinite], np.float32)
            self._host.all_reduce(saw.ctypes.data, 1, _core.DTYPES["float32"], ReduceOp.MAX)
            self._saw_nonfinite = bool(saw[0])
        self._peer_monitor.publish_done()

    def adopt_errors(self, plan: Plan, place: Place, unused: Collection[int] | None) -> None:
        codes = self.reducer.codes
        if codes is None or unused is None or self._saw_nonfinite:
            return
        left_out = frozenset(unused)
        codes.adopt(
            (bucket, range(elements.start, elements.stop))
            for bucket in (range(len(plan.buckets)) if left_out else ())
            for index, _, elements in pieces_in_shard(plan, bucket, place)
            if index in left_out
        )

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def give_up(self, error: BaseException) -> None:
        """Report this rank's failure to all others, and end what is under way. Does not block."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        self.reducer.give_up(self._failure)
        self._abort()
        self.stop()

    def stop(self) -> None:
        """End the thread when it has nothing more to do. Does not block."""
        self._coming.put(None)

    def close(self) -> None:
        self.stop()
        self._thread.join(self._timeout_s)
        self.reducer.close()

    def _run(self) -> None:
        try:
            while (shard := self._coming.get()) is not None:
                bucket, fetch = shard
                fetch()
                self.reducer.mark_ready(bucket)
                del shard, fetch  # they keep the transport alive, which may be dropped
                with self._changed:
                    self._num_ready += 1
                    self._changed.notify_all()
        except CollectiveError as error:
            self.give_up(unpack_failure(error))
        except BaseException as error:
            self.give_up(error)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting for its shards of the gradients.",
            seen=f"{self._num_ready} of {self._num_shards} have come",
            likely="a device of this host is stuck",
            hint=f"look at the other ranks' output; {timeout_hint('them')}",
        )
