"""Averages gradients over several hosts: sums in the memory of each host, then between hosts, then back.

The ranks with local rank l have the same *shard* of each bucket on every host. Such a rank sums the shard
over its host's ranks, exchanges the sum with its peers, and writes the mean into the gradient buffers of all
ranks of its host. So each byte crosses the network as rarely as possible, over the connections of all ranks
that have a shard: as many on each host as the smallest host has ranks.

Steps of a backward, for H hosts of L ranks
1. A parameter is marked ready. Buckets that became complete on this rank are posted. Those that all ranks of
   the host have posted are summed and sent, in the plan's order, as far as there is memory.
2. At the end, places of unmarked parameters are cleared and the remaining buckets posted and launched. Every
   rank launches the same buckets in every backward, whatever its own backward did.
3. This rank's report of its backward travels with its shard of the last bucket to each peer, which writes it
   where all ranks of its host can read it. So the outcome needs no further round. A rank without a shard
   writes its report into the memory of its host before it posts the last bucket, and another rank sends both.
   Only if some rank reports gradients that are not finite, a second exchange shows which.
Sums are undivided, and each message contains its host's weight: the mean is divided once, by the total.

Bits: sums of hosts are added in the order of the hosts' lowest ranks, and those of a host's ranks in rank
order, both as a binary tree. If both together form the tree of one host (for example aligned blocks of 2**k
ranks; `host_sum_order.has_bits_of_one_host`), the bits are those of one host. Otherwise they are the same on
every rank, in every run of this layout, for every bucket size. If they must be those of one host
nevertheless, hosts send the sums of several blocks of their ranks instead of one sum
(`host_sum_order.exact_blocks`).
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from paceline import _core
from paceline.errors import CollectiveError
from paceline.health.control_channel import ControlChannel
from paceline.health.liveness_check import Activity
from paceline.health.peer_errors import is_packed, pack_failure, unpack_failure
from paceline.health.peer_monitor import ChannelSource, PeerMonitor
from paceline.reducer.backward_errors import shorten
from paceline.reducer.backward_reports import REPORT_BYTES, pack_bits, unpack_bits
from paceline.reducer.between_hosts.compressed_sums import CodedSums, PlainSums, SumFormat
from paceline.reducer.between_hosts.exchange import HostExchange
from paceline.reducer.between_hosts.host_sum_order import exact_blocks, whole_hosts
from paceline.reducer.between_hosts.message_headers import HostsTransport
from paceline.reducer.between_hosts.messages import Terms
from paceline.reducer.between_hosts.peer_waits import PeerWaits, patience_with_its_host_s
from paceline.reducer.between_hosts.routes import num_shards, plan_route, spoken_for
from paceline.reducer.plan import ALIGNMENT_BYTES, SEGMENT_ELEMENTS, Plan, pieces_of
from paceline.reducer.reducer_interface import BackwardStatus
from paceline.reducer.reporting_reducer import ReportingReducer

_DTYPES = _core.DTYPES
_PAIR = struct.Struct("<II")


@dataclass(frozen=True)
class Hosts:
    """The layout of ranks on hosts, and what connects them."""

    rank: int
    world_size: int
    ranks: tuple[tuple[int, ...], ...]
    group: _core.HostGroup
    transport: HostsTransport | None
    control: ControlChannel
    gather: Callable[[bytes], list[bytes]] | None
    timeout_s: float
    model: int = 0
    known_as: str = ""

    @property
    def who(self) -> str:
        return self.known_as or f"rank {self.rank} of {self.world_size}"

    @property
    def own_ranks(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.ranks if self.rank in ranks)


class HierarchicalReducer(ReportingReducer):
    """A `Reducer` over several hosts. Making one is collective, over all their ranks.

    Attributes:
        codes: Encodes sums, and keeps the encoding errors; None: nothing is encoded.
        saw_nonfinite: Whether the last backward had a gradient or a mean that is not finite; all ranks agree.
    """

    def __init__(
        self,
        plan: Plan,
        hosts: Hosts,
        generation: int,
        encoding: int | None = None,
        before: CodedSums | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self._hosts = hosts
        count = len(plan.parameters)
        self._no_bits = pack_bits((), count)
        self._last = len(plan.buckets) - 1
        self._longest_wait_s = patience_with_its_host_s(hosts.timeout_s)
        dtypes = [_DTYPES[plan.sections[bucket.section].dtype] for bucket in plan.buckets]
        self._core = _core.HostSums(
            hosts.group,
            plan.buffer_bytes,
            [(b.begin_byte, b.end_byte, dtype) for b, dtype in zip(plan.buckets, dtypes)],
            hosts.world_size,
            REPORT_BYTES + len(self._no_bits),
        )
        begin = self._core.buffer_pointer
        super().__init__(plan, hosts.world_size, hosts.who, [begin + offset for offset in plan.offsets])
        self._found: set[tuple[int, int]] = set()  # (rank, parameter) not finite in this rank's shards
        self._not_finite: set[int] = set()  # parameters whose mean is not finite in this rank's shards
        self.codes: CodedSums | None = None
        self.saw_nonfinite = False
        self._own_ranks = hosts.own_ranks
        local_rank, shards = self._own_ranks.index(hosts.rank), num_shards(hosts.ranks)
        self._has_shard = local_rank < shards
        self._spoken_for = spoken_for(self._own_ranks, local_rank, shards)[1:]
        self._blocks = (exact_blocks if is_exact else whole_hosts)(hosts.ranks, _core.MAX_RANKS)
        self._lost: BaseException | None = (
            None  # a failure that was reported to this rank, which has no shard
        )
        self._exchange = self._make_exchange(local_rank, shards, generation, encoding, before)
        if self._exchange is None:
            hosts.control.at_failure(self._report_lost)
        else:
            weakref.finalize(self, self._exchange.stop)
        self._begin_backward()

    @property
    def buffer_pointer(self) -> int:
        """Address of this rank's gradient buffer, initially zeros; valid as long as `memory` lives."""
        return self._core.buffer_pointer

    @property
    def memory(self) -> object:
        return self._core

    def waiting_ranks(self) -> list[int]:
        """The ranks of this host that wait; it is unknown for ranks of other hosts."""
        return [self._own_ranks[local_rank] for local_rank in self._core.waiting_ranks()]

    def _squared_norm(self) -> float:
        """Computed on demand, segment by segment as on one host, so that it has the same bits."""
        total = 0.0
        with _core.DefaultFloats():
            for offset, spec in zip(self._plan.offsets, self._plan.parameters):
                for first in range(0, spec.numel, SEGMENT_ELEMENTS):
                    length = min(SEGMENT_ELEMENTS, spec.numel - first)
                    pointer = self.buffer_pointer + offset + first * spec.itemsize
                    # The maximum over one array, stored nowhere: the call computes the norm as well.
                    norm, _, _ = _core.reduce_arrays(
                        _DTYPES[spec.dtype], _core.REDUCE_OPS["max"], [pointer], [], length
                    )
                    total += norm
        return total

    def adopt_errors(self, unused: Collection[int] | None) -> None:
        """See `Reduction.adopt_errors`; does something only with `encoding`."""
        if self.codes is not None and unused is not None and not self.saw_nonfinite:
            parameters = self._plan.parameters
            self.codes.adopt((index, range(parameters[index].numel)) for index in unused)

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.join()
        self._core.close()

    # --- a backward ---

    def _begin_backward(self) -> None:
        super()._begin_backward()
        self._next = 0  # the first bucket that is not yet launched
        self._is_begun = False

    def _take_complete(self) -> bool:
        try:
            self._post_complete()
            if self._next < self._last:
                self._launch_complete()
        except BaseException as error:
            self._raise_reason(error)
        return self._next < self._last and self.marks.is_complete(self._next)

    def _post_complete(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._found.clear()
            self._not_finite.clear()
            self._core.begin_backward(self._weight, self._is_weight_in_gradients)
        for number in self.marks.take_complete():
            self._note_complete_bucket(number)
            # The last bucket of a rank without a shard is posted after its report, which another rank sends.
            if self._has_shard or number < self._last:
                self._core.post(number)

    def _launch_complete(self) -> None:
        """Launch buckets in order, except the last one, which carries the report of this backward."""
        marks, core = self.marks, self._core
        while self._next < self._last and marks.is_complete(self._next) and core.is_complete(self._next):
            if not self._launch(self._next, may_wait=False):
                return
            self._next += 1

    def _launch(
        self, bucket: int, make_report: Callable[[], bytes] | None = None, *, may_wait: bool = True
    ) -> bool:
        if self._exchange is None:  # it has no shard; other ranks of this host read its report from memory
            self._core.count_share()
            return True
        return self._exchange.launch(bucket, self._note_nonfinite, make_report, may_wait=may_wait)

    def _complete(self, status: BackwardStatus, allow_unused: bool) -> None:
        control = self._hosts.control
        before = control.activity
        control.activity = Activity(before.text, is_waiting=True)
        try:
            self._launch_rest(status, allow_unused)
            self._core.wait_published(self._longest_wait_s)
            self._read_reports()
            if self._exchange is not None:
                self._exchange.end_backward()
        except BaseException as error:
            self._raise_reason(error)
        control.activity = before  # not after an error: a rank that raised does not continue, and is not late

    def _clear(self, param: int) -> None:
        plan = self._plan
        ctypes.memset(self.buffer_pointer + plan.offsets[param], 0, plan.parameters[param].nbytes)

    def _launch_rest(self, status: BackwardStatus, allow_unused: bool) -> None:
        plan, unused = self._plan, self._leave_out_unmarked()
        if unused:
            self._post_complete()

        def make_report() -> bytes:
            report = self._report(status, unused, allow_unused, nonfinite=len(self._found))
            bits = pack_bits(unused, len(plan.parameters)) if unused else self._no_bits
            packed = report + bits
            self._core.write_slot(self._hosts.rank, packed)
            return b"".join([packed, *map(self._core.read_slot, self._spoken_for)])

        if not self._has_shard:
            make_report()
            self._core.post(self._last)
        for bucket in range(self._next, self._last + 1):
            self._core.wait_complete(bucket)
            self._launch(bucket, make_report if bucket == self._last else None)

    def _read_reports(self) -> None:
        slots, reports = self._core.read_slots(), self._reports
        reports.read(slots)
        if reports.counts_any or any(self._unused):
            pairs = zip(slots, reports.unused)
            self._unused = [unpack_bits(slot[REPORT_BYTES:]) if count else [] for slot, count in pairs]
        self._nonfinite, self._overflowed = [], []
        # All ranks see the same reports and the same means.
        self.saw_nonfinite = reports.counts_nonfinite or self._core.has_overflow
        if self.saw_nonfinite and self._hosts.gather is not None:
            self._gather_nonfinite(self._hosts.gather)
            if self.codes is not None:
                self._clear_gaps()

    def _clear_gaps(self) -> None:
        """Clear the bytes between parameters: codes may write a NaN there, which nothing would overwrite."""
        for offset, spec in zip(self._plan.offsets, self._plan.parameters):
            end = offset + spec.nbytes
            gap = min(-end % ALIGNMENT_BYTES, self._plan.buffer_bytes - end)
            ctypes.memset(self.buffer_pointer + end, 0, gap)

    def _gather_nonfinite(self, gather: Callable[[bytes], list[bytes]]) -> None:
        own = [len(self._found), len(self._not_finite)]
        pairs = sorted(self._found)
        payload = b"".join(_PAIR.pack(*pair) for pair in (own, *pairs))
        payload += b"".join(_PAIR.pack(index, 0) for index in sorted(self._not_finite))
        found: set[tuple[int, int]] = set()
        sums: set[int] = set()
        for row in gather(payload):
            (num_pairs, _), *rest = _PAIR.iter_unpack(row)
            found.update(rest[:num_pairs])
            sums.update(index for index, _ in rest[num_pairs:])
        self._nonfinite = sorted(found)
        self._overflowed = sorted(sums.difference(index for _, index in found))

    def _note_nonfinite(self, bucket: int, elements: range) -> None:
        for index, part in self._pieces(bucket, elements):
            for local_rank in self._core.find_nonfinite(bucket, part.start, len(part)):
                self._found.add((self._own_ranks[local_rank], index))

    def _note_values(
        self, bucket: int, elements: range, values: Sequence[int], weights: Sequence[float]
    ) -> None:
        """As `_note_nonfinite`, for received gradients of all hosts. Called by the waiting thread."""
        section = self._plan.sections[self._plan.buckets[bucket].section]
        for index, part in self._pieces(bucket, elements):
            offset = (part.start - elements.start) * section.itemsize
            places = [address + offset for address in values]
            # The mean is stored nowhere: the call finds values that are not finite, except those of weight 0.
            _, low, high = _core.reduce_arrays(
                _DTYPES[section.dtype], _core.REDUCE_OPS["mean"], places, [], len(part), list(weights)
            )
            whose = low | high << 64
            self._found.update(
                (rank, index) for host, (rank,) in enumerate(self._hosts.ranks) if whose >> host & 1
            )

    def _note_overflow(self, bucket: int, elements: range) -> None:
        """Called by the waiting thread."""
        found = {
            index
            for index, part in self._pieces(bucket, elements)
            if self._core.is_nonfinite(bucket, part.start, len(part))
        }
        if found:
            self._not_finite |= found
            self._core.note_overflow()

    def _pieces(self, bucket: int, elements: range) -> Iterator[tuple[int, range]]:
        span = self._plan.buckets[bucket]
        section = self._plan.sections[span.section]
        begin = (span.begin_byte - section.begin_byte) // section.itemsize
        for index, first, last in pieces_of(self._plan, bucket):
            part = range(max(first - begin, elements.start), min(last - begin, elements.stop))
            if part:
                yield index, part

    # --- failures ---

    def _make_exchange(
        self, local_rank: int, shards: int, generation: int, encoding: int | None, before: CodedSums | None
    ) -> HostExchange | None:
        """The exchange of this rank's shards; None: it has none, and other ranks of its host exchange all."""
        hosts, plan = self._hosts, self._plan
        spans = [(b.begin_byte, b.end_byte, plan.sections[b.section].itemsize) for b in plan.buckets]
        itemsizes = [max(4, itemsize) for _, _, itemsize in spans]  # of sums
        num_blocks = [0] * len(hosts.ranks)
        for block in self._blocks.blocks:
            num_blocks[block.host] += 1
        may_send_values = encoding is None and self._may_send_values()
        routes = [
            plan_route(
                (end - begin) // itemsize,
                max(4, itemsize),
                local_rank,
                shards,
                len(hosts.ranks),
                num_blocks=num_blocks,
                value_bytes=itemsize if may_send_values else None,
                is_followed=number < self._last,
            )
            for number, (begin, end, itemsize) in enumerate(spans)
            if self._has_shard
        ]
        sums: SumFormat = PlainSums(itemsizes)
        if encoding is not None:
            host = hosts.ranks.index(self._own_ranks)
            host_sizes = [len(ranks) for ranks in hosts.ranks]
            sums = self.codes = CodedSums(encoding, plan, routes, itemsizes, host, host_sizes)
            if before is not None:
                self.codes.take_over(before, hosts.group)
        if hosts.transport is None:
            return None
        me = weakref.ref(self)

        def note_overflow(bucket: int, elements: range) -> None:
            reducer = me()
            if reducer is not None:
                reducer._note_overflow(bucket, elements)

        def note_values(
            bucket: int, elements: range, values: Sequence[int], weights: Sequence[float]
        ) -> None:
            reducer = me()
            if reducer is not None:
                reducer._note_values(bucket, elements, values, weights)

        peer_monitor = PeerMonitor(ChannelSource(hosts.control))
        waits = PeerWaits(hosts.transport, peer_monitor, hosts.who, bucket_in_words(plan), hosts.timeout_s)
        terms = Terms(
            core=self._core,
            transport=hosts.transport,
            waits=waits,
            spans=spans,
            routes=routes,
            sums=sums,
            blocks=self._blocks,
            reporting=[spoken_for(ranks, local_rank, shards) for ranks in hosts.ranks],
            report_bytes=REPORT_BYTES + len(self._no_bits),
            generation=generation,
            on_overflow=note_overflow,
            on_nonfinite=note_values,
        )
        return HostExchange(terms, hosts.group, hosts.control, hosts.timeout_s)

    def _may_send_values(self) -> bool:
        """Whether messages may carry gradients: each host has one rank, and the core adds all at once."""
        hosts = self._hosts
        is_of_one_each = all(len(ranks) == 1 for ranks in hosts.ranks) and not self._blocks.steps
        has_bare_messages = hosts.transport is not None and not hosts.transport.needs_headers
        return is_of_one_each and has_bare_messages and len(hosts.ranks) <= _core.MAX_RANKS

    def _raise_reason(self, error: BaseException) -> NoReturn:
        """Fail and raise. A failure of this rank's waiting thread or of another rank precedes `error`."""
        if not isinstance(error, CollectiveError):  # of a signal handler: it is unknown what was done by then
            self._fail(error)
            raise error
        found = self._lost if self._exchange is None else self._exchange.failure
        reason = found or unpack_failure(error)
        self._fail(reason)
        if reason is error:
            raise error
        raise reason from (None if is_packed(error) else error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            super()._fail(error)
            if self._exchange is None:
                self._report_lost(error)
            else:
                self._exchange.give_up(error)
            self._core.keep_buffer()

    def _report_lost(self, error: BaseException) -> None:
        """Report a failure to all ranks that may not know it; called on a rank without a shard."""
        if self._lost is None:
            self._lost = error
            self._hosts.group.abort(pack_failure(error, self._hosts.rank))
            self._hosts.control.report_failure(error)


def bucket_in_words(plan: Plan) -> Callable[[int], str]:
    def where(number: int) -> str:
        bucket = plan.buckets[number]
        names = shorten([plan.parameters[index].name for index in bucket.parameters])
        dtype = plan.sections[bucket.section].dtype
        return f"bucket {number} ({bucket.nbytes / 2**20:.1f} MiB, {dtype}: {names})"

    return where
