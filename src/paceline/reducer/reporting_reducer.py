"""The common part of reducers whose ranks exchange reports at the end of a backward.

A subclass moves the bytes, and so decides how a backward is completed. Everything else is here: marks,
weights and notes, the evaluation of the reports, queries about the last backward, and the refusal to go on
after a failure.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from paceline import _core
from paceline.errors import GroupClosedError, MismatchError
from paceline.reducer.plan import Plan
from paceline.reducer.reducer_interface import BackwardResult, BackwardStatus, BackwardTimes
from paceline.trace.recording import recording
from paceline.trace.records import Event

_POSTED, _WAITED = int(Event.POSTED), int(Event.WAITED)
_BACKWARD_ENDED = int(Event.BACKWARD_ENDED)


class ReportingReducer(ABC):
    """A `Reducer` except for moving the bytes. A subclass calls `_begin_backward` in its constructor.

    Args:
        plan: The same on all ranks.
        world_size: Number of ranks.
        who: This rank in words: "rank 1 of 4".
        pointers: The address of each parameter's place, for gradients that the reducer copies there itself;
            empty: it copies none.

    Attributes:
        marks: Takes gradients; a hook in C++ hands them over there.
        note_stream: Called when a gradient has been written to its place; None: no call is needed.
        last: See `Reducer`.
    """

    note_stream: Callable[[], None] | None = None

    def __init__(self, plan: Plan, world_size: int, who: str, pointers: Sequence[int] = ()) -> None:
        self._plan, self._world_size, self._who = plan, world_size, who
        self.marks = self._make_marks(pointers)
        # Several threads of the framework may compute gradients of one backward.
        self._lock = threading.Lock()
        self._weight, self._is_weight_in_gradients = 1.0, False
        self._note, self._recorded_backward = 0, -1
        self._counting_unused: set[int] = set()
        self.last: BackwardResult | None = None
        self._first_bucket_ns = 0
        self._reports = _core.BackwardReports(world_size)
        self._unused: list[list[int]] = [[] for _ in range(world_size)]
        self._nonfinite: list[tuple[int, int]] = []
        self._overflowed: list[int] = []
        self._has_no_means = False
        self._failure: BaseException | None = None

    @property
    def times(self) -> BackwardTimes:
        return self._reports.times

    def set_weight(self, weight: float, is_in_gradients: bool = False) -> None:
        self._weight, self._is_weight_in_gradients = weight, is_in_gradients

    def set_note(self, note: int, recorded_backward: int = -1) -> None:
        self._note, self._recorded_backward = note, recorded_backward

    def mark_ready(self, param: int, grad_pointer: int = 0) -> None:
        self._check_usable()
        self.marks.mark_ready(param, grad_pointer)

    def mark_copied(self, param: int, grad_pointer: int, nbytes: int, is_shared: bool = False) -> None:
        self._check_usable()
        self.marks.mark_copied(param, grad_pointer, nbytes, is_shared)

    def mark_unused(self, param: int) -> None:
        self._counting_unused.add(param)

    def add_foreign(self, pointer: int, nbytes: int) -> None:
        self.marks.add_foreign(pointer, nbytes)

    def finish(
        self, status: BackwardStatus, allow_unused: bool, allow_globally_unused: bool = False
    ) -> BackwardResult:
        self._check_usable()
        if (note := recording.note) is not None and self._recorded_backward >= 0:
            note(_BACKWARD_ENDED, self._recorded_backward, status.finished)
        self._recorded_backward = -1
        started_ns = time.monotonic_ns()
        self._reports.end_backward(started_ns)
        self._has_no_means = True  # until the backward is complete
        self.last, has_reports = None, False
        try:
            self._complete(status, allow_unused)
            has_reports = True
            result = self._conclude(status, started_ns, allow_globally_unused)
        except BaseException as error:
            # All ranks find a mismatch, and the next backward may be good. After any other exception, such as
            # one of a signal handler, it is unknown how much of the backward was done.
            if not (has_reports and isinstance(error, MismatchError)):
                self._fail(error)
                self.marks.end_backward(keeps_means=True)
            raise
        self.last = result
        return result

    def _conclude(
        self, status: BackwardStatus, started_ns: int, allow_globally_unused: bool
    ) -> BackwardResult:
        """Evaluate the reports of all ranks."""
        ended_ns = time.monotonic_ns()
        last = self._reports.end_averaging(ended_ns, ended_ns - started_ns)
        if (note := recording.note) is not None:
            note(_WAITED, started_ns, last)
        # After an interrupted backward, the user may have cleared the gradients before this.
        overlapping = self.marks.end_backward(status.interrupted)
        first_bucket_ns, self._first_bucket_ns = self._first_bucket_ns, 0
        self._begin_backward()
        self._check_reports()
        result = self._reports.conclude(
            self._unused,
            self._nonfinite,
            self._overflowed,
            overlapping,
            first_bucket_ns,
            len(self._plan.parameters),
            allow_globally_unused,
        )
        if not result.is_void:
            self._finish_means()
            self._has_no_means = False
            self.marks.copy_back()
        return result

    def squared_norm(self) -> float:
        return math.nan if self._has_no_means else self._squared_norm()

    # --- what a subclass implements ---

    @abstractmethod
    def _take_complete(self) -> bool:
        """Act on buckets that became complete, which `marks.take_complete()` lists. Called under a lock.

        Returns:
            Whether some complete bucket waits for others. Then the next gradient calls this again.
        """

    @abstractmethod
    def _complete(self, status: BackwardStatus, allow_unused: bool) -> None:
        """Call `_leave_out_unmarked`; wait until the gradient buffer holds the sums or means of all ranks.

        Reads `_reports`, and sets `_unused`, `_nonfinite` and `_overflowed`.
        """

    @abstractmethod
    def _clear(self, param: int) -> None:
        """Fill the parameter's place with zeros."""

    def _check_reports(self) -> None:  # noqa: B027  # optional
        """Raise if the reports show that this backward is unusable; the next one may still be good."""

    def _finish_means(self) -> None:  # noqa: B027
        """Make the gradient buffer hold the means; called if the backward is not void."""

    @abstractmethod
    def _squared_norm(self) -> float:
        """The squared norm of the means that the gradient buffer holds."""

    def _begin_backward(self) -> None:  # noqa: B027
        """Forget the last backward; called by the constructor, and at the end of each backward."""

    def _note_complete_bucket(self, number: int) -> None:
        """Record that this rank has all gradients of a bucket."""
        if (note := recording.note) is not None:
            note(_POSTED, number, 0)
        self._first_bucket_ns = self._first_bucket_ns or time.monotonic_ns()

    # --- helpers for subclasses ---

    def _leave_out_unmarked(self) -> list[int]:
        """Give zeros for each unmarked parameter, or its place as it is after `mark_unused`. Returns them."""
        unmarked = self.marks.unmarked()
        for index in unmarked:
            if index not in self._counting_unused:
                self._clear(index)
            self.marks.leave_out(index)
        self._counting_unused.clear()
        return unmarked

    def _report(
        self,
        status: BackwardStatus,
        unused: Sequence[int],
        allow_unused: bool,
        *,
        nonfinite: int = 0,
        overflowed: int = 0,
        identity: int = 0,
    ) -> bytes:
        """This rank's report of its backward, packed.

        Args:
            status: What `finish` was given.
            unused: Parameters that this rank left without a gradient.
            allow_unused: See `Reducer.finish`.
            nonfinite: How many of its gradients hold an infinity or a NaN.
            overflowed: How many parameters it has found whose sum does.
            identity: A hash of its calls; ranks with another one have averaged another model's gradients.
        """
        refuses = bool(unused) and not allow_unused
        counts = nonfinite, overflowed
        return self._reports.pack(status, self._weight, self._note, len(unused), refuses, *counts, identity)

    def _make_marks(self, pointers: Sequence[int]) -> _core.BackwardMarks:
        plan, me = self._plan, weakref.ref(self)
        buckets_of: list[list[int]] = [[] for _ in plan.parameters]
        for number, bucket in enumerate(plan.buckets):
            for index in bucket.parameters:
                buckets_of[index].append(number)

        def take_complete() -> bool:
            reducer = me()
            if reducer is None:
                return False
            with reducer._lock:
                return reducer._take_complete()

        sizes = [spec.nbytes for spec in plan.parameters]
        begin = min(filter(None, pointers), default=0)  # the pointer of a place without elements is 0
        offsets = [max(0, pointer - begin) for pointer in pointers] or plan.offsets
        return _core.BackwardMarks(begin, list(zip(offsets, sizes, buckets_of)), take_complete)

    # --- failures ---

    def give_up(self, error: BaseException) -> None:
        """See `Reducer.give_up`."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Close the reducer: the calls of the ranks may no longer match, so later backward passes raise."""
        self._failure = self._failure or error
        self.marks.close()

    def _check_usable(self) -> None:
        if self._failure is not None:
            words = str(self._failure).splitlines() or [type(self._failure).__name__]
            raise GroupClosedError(
                f"{self._who.capitalize()} cannot average gradients any more.",
                seen=f"an earlier backward ended in an error: {words[0]}",
                hint="end this process, and start all ranks again from a checkpoint",
            ) from self._failure
