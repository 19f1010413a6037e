"""Averages gradients over a framework's asynchronous all-reduce: Gloo, NCCL, MPI.

Words: a *transport* moves bytes and knows the framework's tensors; the *status* is what a rank reports of its
own backward, a few bytes that all ranks gather at its end.

Steps of a backward:
1. A parameter is marked ready. The buckets that became complete are launched, strictly in the plan's order,
   because a process group pairs calls of different ranks by their order. For the same reason they are
   launched only after all backward passes of other models over the same process group that began earlier are
   over (`call_order.py`).
2. At the end, places of unmarked parameters are cleared and the remaining buckets are launched. So every rank
   launches the same buckets in every backward, whatever its own backward did, and ranks cannot get out of
   step.
3. The status is gathered: whose model it is, number of forwards, weight, how many parameters were unused or
   not finite. It travels together with the last buckets, so a backward needs no further round. Only if some
   rank reports any such parameters, or a sum may have overflowed, a second gather shows which. A hook makes
   calls of its own, so with a hook the status waits for the buckets, and also counts the sums that are not
   finite.
The mean is the sum of gradients scaled beforehand by weight / (the ranks' total weight in the previous
backward), which keeps 16-bit sums in range. It is corrected afterwards if the total has changed.
"""

from __future__ import annotations

import math
import os
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from paceline import _core
from paceline.errors import MismatchError, format_ranks
from paceline.health.store_check import Work
from paceline.reducer.backward_reports import pack_bits, unpack_bits
from paceline.reducer.call_order import CallOrder, call_order_of
from paceline.reducer.comm_hooks import HookedBuckets
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.plan import Plan, pieces_in
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_waits import STATUS
from paceline.reducer.reducer_interface import BackwardStatus
from paceline.reducer.reporting_reducer import ReportingReducer

_Tensor = TypeVar("_Tensor")
ROUNDING = 1e-9  # the largest rounding error of weights divided by their sum


class Pending(Protocol):
    def wait(self) -> None: ...


class Transport(ABC, Generic[_Tensor]):
    """Sums the buckets of a gradient buffer over a process group. Making one is collective.

    The gradient buffer is ordinary tensors on the parameters' own devices, and a bucket is one asynchronous
    all-reduce of a flat range of it.

    Attributes:
        hook: Averages the buckets in place of the process group's all-reduce; None: there is no hook.
        is_serial: Whether nothing may begin before a bucket is done, because a hook makes calls of its own.
        is_in_order: Whether a bucket is done only after all buckets that were launched before it.
        order: The order of the calls of all models over the process group; they share it.
        pointers: The address of each parameter's place, for gradients that the reducer itself copies there,
            and whose means it copies back; empty: they are copied there before they are marked.
        note_stream: Called whenever a gradient has been written to its place, by the code that wrote it, so
            that a bucket waits for the device streams that have written its gradients; None: no call is
            needed.
        waiting: See `paceline.reducer.communicator.Reduction`.
    """

    is_in_order = False
    pointers: Sequence[int] = ()
    note_stream: Callable[[], None] | None = None
    waiting: dict[int, _Tensor] | None = None

    def __init__(
        self,
        gradient_buffer: GradientBuffer[_Tensor],
        calls: ProcessGroupCalls[_Tensor],
        *,
        checks_finite: bool,
        hook: HookedBuckets[_Tensor] | None,
    ) -> None:
        plan, sections = gradient_buffer.plan, gradient_buffer.sections
        self.rank, self.world_size = calls.rank, calls.world_size
        self.is_serial = hook is not None
        self.order = call_order_of(calls.group)
        self.hook = hook
        self._gradient_buffer = gradient_buffer
        self._calls = calls.but(plan=plan)
        self._reports = calls.reports()
        self._checks_finite = checks_finite
        numbers = range(len(plan.buckets))
        self._buckets = [gradient_buffer.bucket(number) for number in numbers]
        self._pieces = [pieces_in(plan, sections, number) for number in numbers]

    # --- what a framework implements ---

    @abstractmethod
    def _start(self, bucket: int, flat: Any) -> Work: ...

    @abstractmethod
    def _multiply(self, flat: Any, factor: float) -> None: ...

    @abstractmethod
    def _note_nonfinite(self, bucket: int, flat: Any) -> None: ...

    @abstractmethod
    def _is_finite(self, flat: Any) -> bool: ...

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the whole gradient buffer. Called within `_core.DefaultFloats()` of this thread.

        So equal gradient buffers stay equal, whatever rounding mode each rank's processor was set to.
        """

    @abstractmethod
    def take_nonfinite(self) -> list[int]:
        """Parameters whose own gradient was not finite at the launch of its buckets, since the last call."""

    @abstractmethod
    def squared_norm(self) -> float: ...

    def _complete(self, bucket: int) -> Any:
        return self._buckets[bucket]

    def _wait(self, call: Work, bucket: int) -> None:
        self._calls.wait(call, bucket)

    # --- what the reducer calls ---

    def launch(self, bucket: int, scale: float) -> Pending:
        """Scale this rank's bucket and begin to sum it over ranks, in place.

        A scale of 0 replaces its values by zeros, even if they were not finite, and counts them as finite.
        """
        if self.hook is None:
            flat = self._prepare(bucket, scale)
            return _Sum(self, self._calls.begin(lambda: self._start(bucket, flat), bucket), bucket)
        self.hook.wait()
        weight = scale * self.world_size  # a hook divides by the world size, so this is the factor left
        if math.isclose(weight, 1.0, rel_tol=1e-12):  # 1 / 49 * 49 is not 1
            weight = 1.0
        return self.hook.launch(bucket, self._prepare(bucket, weight), weight)

    def _prepare(self, bucket: int, scale: float) -> Any:
        flat = self._complete(bucket)
        if self._checks_finite and scale:
            self._note_nonfinite(bucket, flat)
        if scale == 0.0:
            flat.zero_()  # 0 * NaN would be NaN
        elif scale != 1.0:
            self._multiply(flat, scale)
        return flat

    def clear(self, param: int) -> None:
        place: Any = self._gradient_buffer.places[param]
        place.zero_()

    def may_have_overflowed(self, scale: float) -> bool:
        """Whether a sum of finite gradients may not be finite; False if the model does not check.

        Ranks that pass the same `scale`, the largest of all ranks, get the same answer. If the scale is at
        most one over the number of ranks, a sum is at most the largest gradient, unless a hook makes the sum.
        """
        # A hook may sum in a type of smaller range.
        return self._checks_finite and (self.is_serial or scale * self.world_size > 1 + ROUNDING)

    def find_overflowed(self) -> list[int]:
        is_finite = self._is_finite
        found: set[int] = set()
        for flat, pieces in zip(self._buckets, self._pieces):
            if not is_finite(flat):
                found.update(param for param, piece in pieces if not is_finite(piece))
        return sorted(found)

    def begin_all_gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        """Begin to gather the payloads of all ranks, which have equal lengths.

        Returns a function that waits for them, up to the deadline, and returns them by rank.
        """
        call, rows = self._calls.begin(lambda: self._reports.begin(payload), STATUS)

        def finish() -> list[bytes]:
            # The end of a backward needs the reports at once, and nothing has been computed from the means
            # yet. So wait here, where a lost rank can be reported, even if the reports are on a device.
            self._calls.wait(call, STATUS)
            return rows()

        return finish


class _Sum:
    def __init__(self, transport: Transport[Any], call: Work, bucket: int) -> None:
        self._transport, self._call, self._bucket = transport, call, bucket

    def wait(self) -> None:
        self._transport._wait(self._call, self._bucket)


class Beside(Protocol):
    def give_up(self, error: BaseException) -> None:
        """Report this rank's failure to all others, and end what is under way. Does not block."""
        ...

    def stop(self) -> None:
        """End when there is nothing more to do. Does not block."""
        ...

    def close(self) -> None: ...


class ProcessGroupReducer(ReportingReducer):
    """A `Reducer` over a process group. Making one is collective."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport[Any],
        *,
        skip_unused: bool = False,
        beside: Beside | None = None,
    ) -> None:
        who = f"rank {transport.rank} of {transport.world_size}"
        super().__init__(plan, transport.world_size, who, transport.pointers)
        self._skip_unused = skip_unused
        self._idle: list[int] = []  # buckets that no rank used in the last backward
        self._sequence: Sequence[int] = range(len(plan.buckets))  # the others
        self._transport = transport
        self.note_stream = transport.note_stream
        self._expected_weight = float(transport.world_size)
        # A number that all ranks of this reducer have in common, and no other reducer has.
        self._identity = zlib.crc32(b"".join(self._begin_all_gather(os.urandom(8))()))
        self._called = 0  # a hash of this rank's calls as of the end of the last backward
        self._unknown_peers: list[int] = []
        self._all_used: list[list[int]] = [[] for _ in range(transport.world_size)]
        self._num_launched = len(plan.buckets)
        self._beside = beside
        if beside is not None:
            weakref.finalize(self, beside.stop)
        self._begin_backward()

    @property
    def order(self) -> CallOrder:
        return self._transport.order

    @property
    def num_launched(self) -> int:
        """Buckets that the last backward averaged, without skipped ones. Before the first backward: all."""
        return self._num_launched

    def waiting_ranks(self) -> list[int]:
        return []  # a process group does not know

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()

    def mark_ready(self, param: int, grad_pointer: int = 0) -> None:
        if self.note_stream is not None:
            self.note_stream()
        super().mark_ready(param, grad_pointer)

    def mark_copied(self, param: int, grad_pointer: int, nbytes: int, is_shared: bool = False) -> None:
        if self.note_stream is not None:
            self.note_stream()
        super().mark_copied(param, grad_pointer, nbytes, is_shared)

    def mark_unused(self, param: int) -> None:
        if self.note_stream is not None:
            self.note_stream()
        super().mark_unused(param)

    def _clear(self, param: int) -> None:
        self._transport.clear(param)

    def _take_complete(self) -> bool:
        try:
            return self._launch_complete()
        except BaseException as error:
            if self._beside is not None:  # other ranks wait for it
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            super()._fail(error)
            if self._beside is not None:
                self._beside.give_up(error)

    def _squared_norm(self) -> float:
        return self._transport.squared_norm()

    def _launch_idle(self) -> None:
        """Reduce the buckets that were expected to be idle and are not, and note which are idle now. All
        ranks do the same.
        """
        globally_unused = set(self._reports.result(self._unused, len(self._plan.parameters)).globally_unused)
        idle = [
            n for n, bucket in enumerate(self._plan.buckets) if globally_unused.issuperset(bucket.parameters)
        ]
        woken = [number for number in self._idle if number not in idle]
        scale = self._weight / self._expected_weight
        for pending in [self._launch(number, scale) for number in woken]:
            pending.wait()
        self._idle = idle
        self._sequence = [n for n in range(len(self._plan.buckets)) if n not in idle]
        self._num_launched += len(woken)
        if woken:
            nonfinite, overflowed = self._gather_bits(
                self._transport.take_nonfinite(), self._find_overflowed(self._reports.largest_weight)
            )
            pairs = {(rank, index) for rank, row in enumerate(nonfinite) for index in row}
            self._note_nonfinite(pairs.union(self._nonfinite), overflowed)

    def _complete(self, status: BackwardStatus, allow_unused: bool) -> None:
        unused = self._leave_out_unmarked()
        if len(self._pending) < len(self._sequence):
            self._launch_complete(is_last=True)
        self._num_launched = len(self._pending)
        is_serial = self._transport.is_serial
        if is_serial:
            self._wait_for_buckets()
        nonfinite = self._transport.take_nonfinite()
        overflowed = self._find_overflowed(self._weight) if is_serial else []
        self._called = self._transport.order.take(self._identity)
        own = self._report(
            status,
            unused,
            allow_unused,
            nonfinite=len(nonfinite),
            overflowed=len(overflowed),
            identity=self._called,
        )
        wait_for_reports = self._begin_all_gather(own)
        if not is_serial:
            self._wait_for_buckets()
        self._reports.read(wait_for_reports())
        # These ranks made other calls, so buckets of several models were added up.
        self._unknown_peers = self._reports.unknown_peers(self._called)
        if self._unknown_peers:  # their details would not be about these parameters
            return
        self._gather_details(unused, nonfinite, overflowed)
        if self._skip_unused:
            self._launch_idle()

    def _begin_all_gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        """See `Transport`; a single rank makes no call."""
        return (lambda: [payload]) if self._world_size == 1 else self._transport.begin_all_gather(payload)

    def _wait_for_buckets(self) -> None:
        for pending in self._pending[-1:] if self._transport.is_in_order else self._pending:
            pending.wait()

    def _find_overflowed(self, largest_weight: float) -> list[int]:
        may_have = self._transport.may_have_overflowed(largest_weight / self._expected_weight)
        return self._transport.find_overflowed() if may_have else []

    def _check_reports(self) -> None:
        unknown_peers = self._unknown_peers
        if not unknown_peers:
            return
        transport = self._transport
        raise MismatchError(
            f"Rank {transport.rank} of {transport.world_size} averaged gradients of another model than "
            f"{format_ranks(unknown_peers)}.",
            where="the end of backward; the gradients of this backward are not to be used, on any rank",
            seen=f"{format_ranks(unknown_peers)} averaged buckets of several wrapped models in another order",
            likely="a rank skipped a model's backward after an exception that it caught, or in a branch, or "
            "ran the backward passes of several models in another order",
            hint="run the same backward passes in the same order on every rank; where one backward runs "
            "through several models, wrap the module that holds them",
        )

    def _begin_backward(self) -> None:
        super()._begin_backward()
        self._pending: list[Pending] = []

    def _launch_complete(self, *, is_last: bool = False) -> bool:
        order, scale = self._transport.order, self._weight / self._expected_weight
        pending, is_complete = self._pending, self.marks.is_complete
        for number in self._sequence[len(pending) :]:
            if not is_complete(number):
                return False
            if not (is_last or order.is_turn_of(self)):
                return True
            self._note_complete_bucket(number)
            pending.append(self._launch(number, scale))
        return False

    def _launch(self, number: int, scale: float) -> Pending:
        self._transport.order.note(self._identity, number)
        return self._transport.launch(number, scale)

    def _gather_details(
        self, unused: Sequence[int], nonfinite: Sequence[int], overflowed: Sequence[int]
    ) -> None:
        self._unused, self._nonfinite, self._overflowed = self._all_used, [], []
        may_have_overflowed = not self._transport.is_serial and self._transport.may_have_overflowed(
            self._reports.largest_weight / self._expected_weight
        )
        if may_have_overflowed:
            overflowed = self._transport.find_overflowed()
        if may_have_overflowed or self._reports.counts_any:
            self._unused, rows, sums = self._gather_bits(unused, nonfinite, overflowed)
            self._note_nonfinite({(rank, index) for rank, row in enumerate(rows) for index in row}, sums)

    def _note_nonfinite(self, pairs: Iterable[tuple[int, int]], sums: Iterable[list[int]]) -> None:
        """A sum that is not finite has overflowed, unless some rank's own gradient was not finite."""
        self._nonfinite = sorted(pairs)
        to_blame = {index for _, index in self._nonfinite}
        self._overflowed = sorted({index for row in sums for index in row}.difference(to_blame))

    def _gather_bits(self, *found: Sequence[int]) -> list[list[list[int]]]:
        count = len(self._plan.parameters)
        rows = self._begin_all_gather(b"".join(pack_bits(indices, count) for indices in found))()
        size = len(pack_bits((), count))
        return [
            [unpack_bits(row[place * size : (place + 1) * size]) for row in rows]
            for place in range(len(found))
        ]

    def _finish_means(self) -> None:
        if not self._reports.take_new_weights():  # the usual case
            return
        with _core.DefaultFloats():  # each rank corrects its own buffer, and all must get the same bits
            total = sum(self._reports.weights)
            if total not in (0, self._expected_weight):  # with a total of 0, all values are zeros
                self._transport.rescale(self._expected_weight / total)
                self._expected_weight = total
