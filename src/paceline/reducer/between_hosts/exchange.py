"""Exchanges one rank's shard of each bucket with the other hosts; the package docstring defines the words.

The thread that runs the backward makes and sends messages; another thread waits, adds up and publishes. It
has to be a thread, because a transport reports an arrived message only to a caller that waits for it. Its
waits release Python's global lock, so messages travel while the backward goes on.

Steps of a bucket, on each rank
1. `_make_ready`: receives are begun; those of the first buckets before their backward, as far as there is
   memory. A process group that asks the receiver for room before it sends then gets its answer at once. The
   waiting thread begins them when the previous backward has ended. If there are few, it begins them while
   messages of the previous backward are still on their way and nothing else runs, because two threads that
   pass Python's global lock back and forth take longer than the work (0.3 to 0.6 ms of a backward of 100 kB).
2. `launch`: the shard is sent: summed over the host's ranks piece by piece (`sum_messages`), or as it is
   (`value_messages`).
3. The waiting thread: in one round, the pieces of all blocks are published as they arrive. In two rounds, the
   pieces of this host's part are added up and sent. Then, after the first round of the next bucket if that is
   launched, the parts of the other hosts are published.
4. The waiting thread waits until the messages are sent and so their memory is free. Then the next bucket may
   use it.
If there are few messages, no other rank on the host, and signal handlers run during waits, then the thread
that runs the backward does steps 3 and 4 itself: it has nothing else to do, and no thread has to be woken.

Memory: a few buckets are in flight at a time (WINDOW), each in a *room* of its own for the messages sent and
received: together about WINDOW * 2 to 3 shards of the largest bucket, or one shard each for values, whatever
the size of the model. There are at least two rooms, so that a model of one bucket can receive that of the
next backward. A bucket has the same room in every backward (that of a model of one bucket alternates), so its
messages are laid out once, when it is first used (`messages`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from paceline import _core
from paceline.errors import CollectiveError
from paceline.health import exit_reports
from paceline.health.control_channel import ControlChannel
from paceline.health.peer_errors import pack_failure, unpack_failure
from paceline.reducer.between_hosts.messages import InFlightBucket, Terms
from paceline.reducer.between_hosts.sum_messages import InFlightSums
from paceline.reducer.between_hosts.value_messages import InFlightFewValues, InFlightValues, ValuesBackward
from paceline.rendezvous.resource_limits import start_thread

WINDOW = 4
_LOOK_S = 0.05  # how often a thread that waits for free memory checks whether the host's group has ended
_FEW_MESSAGES = 8  # of a backward: with at most so many, receives are begun during the backward before it


class _ReceiveNext: ...


_RECEIVE_NEXT = _ReceiveNext()


class HostExchange:
    """Exchanges the sums of one rank's shards with the other hosts.

    Args:
        terms: What all buckets of this rank have in common.
        group: The shared memory of this host, whose other ranks are notified of a failure.
        control: Reports a failure of this rank to all ranks, and theirs to this one.
        timeout_s: Most seconds to wait for ranks of the host.
    """

    def __init__(
        self, terms: Terms, group: _core.HostGroup, control: ControlChannel, timeout_s: float
    ) -> None:
        self.failure: BaseException | None = None
        self._terms, self._core, self._waits = terms, terms.core, terms.waits
        self._group, self._control, self._timeout_s = group, control, timeout_s
        self._rank = terms.transport.ranks[terms.host]
        buckets = range(len(terms.routes))
        nbytes = max(self._room_bytes(bucket) for bucket in buckets)
        self._rooms = [np.empty(nbytes, np.uint8) for _ in range(min(WINDOW, max(2, len(buckets))))]
        self._is_taken = [False] * len(self._rooms)
        self._laid_out: dict[tuple[int, int], InFlightBucket] = {}  # by bucket and room
        # Results of all steps except the last, whose result has its own place.
        self._joined = [np.empty(self._piece_bytes(), np.uint8) for _ in terms.blocks.steps[:-1]]
        self._values = ValuesBackward(terms)
        self._is_free = threading.Condition()
        self._number = 1  # of the current backward, or else of the next one
        self._ready: deque[InFlightBucket] = deque()  # of that backward, in the plan's order, not launched
        self._next_ready = 0  # its first bucket that has not been in `_ready`
        self._is_due = False  # its first receives must still be begun by the waiting thread
        # Held while receives are begun, for the four attributes above. None are begun during
        # `_open_next_backward`.
        self._making = threading.Lock()
        self._has_few_messages = len(buckets) == 1 and self._has_few()
        is_alone = group.world_size == 1
        self._waits_itself = self._has_few_messages and is_alone and terms.transport.lets_signals_in
        self._receive_error: CollectiveError | None = None
        # Of `_take_only`, which has not waited until its messages were sent.
        self._last_in_flight: InFlightBucket | None = None
        self._launched: queue.SimpleQueue[InFlightBucket | _ReceiveNext | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)
        start_thread(self._thread)
        control.at_failure(self._fail)
        exit_reports.before_leaving(self.join)  # this rank's backward may be over before its peer's

    # --- the thread that runs the backward ---

    def end_backward(self) -> None:
        """Let the waiting thread begin to receive what peers send for the next backward.

        It does this while the user's program continues.
        """
        if not self._has_few_messages:
            self._open_next_backward()
            self._launched.put(_RECEIVE_NEXT)

    def launch(
        self,
        bucket: int,
        note_nonfinite: Callable[[int, range], None],
        make_report: Callable[[], bytes] | None = None,
        *,
        may_wait: bool,
    ) -> bool:
        """Sum this rank's shard of a bucket that all ranks of the host have posted, and begin to exchange it.

        Returns:
            Whether it was launched: False if there is no memory now.

        Raises:
            CollectiveError: The exchange has failed, or no memory became free in time.
        """
        with self._making:
            self._is_due = False
            if not self._ready:
                self._make_ready(may_wait=may_wait)
                if not self._ready:
                    return False
            in_flight = self._ready.popleft()
        assert in_flight.bucket == bucket and in_flight.has_report == (make_report is not None)
        in_flight.send(note_nonfinite, make_report)
        if self._waits_itself:
            self._take_only(in_flight)
        else:
            self._launched.put(in_flight)
        return True

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def give_up(self, error: BaseException) -> None:
        """Report this rank's failure to all others, and end all transfers. Does not block."""
        if self.failure is None:
            self.failure = error
        self._group.abort(pack_failure(error, self._rank))
        self._report(error)
        self.stop()

    def stop(self) -> None:
        """End the waiting thread when it has nothing more to do. Does not block."""
        self._launched.put(None)

    def join(self) -> None:
        """Wait until the waiting thread has ended, and the memory of this host is no longer written."""
        self.stop()
        self._thread.join(self._timeout_s)

    def _make_ready(self, *, may_wait: bool) -> None:
        """Begin receives of the next buckets, as far as there is memory."""
        if self._receive_error is not None:
            raise self._receive_error
        while self._next_ready < len(self._terms.routes):
            in_flight = self._take_in_flight(self._next_ready, may_wait=may_wait and not self._ready)
            if in_flight is None:
                return
            in_flight.receive()
            self._next_ready += 1
            self._ready.append(in_flight)

    def _take_in_flight(self, bucket: int, *, may_wait: bool) -> InFlightBucket | None:
        room = self._room_of(bucket, self._number)
        ends_s = time.monotonic() + self._waits.patience_with_its_host_s
        with self._is_free:
            self.check()
            if self._is_taken[room] and not may_wait:
                return None
            while self._is_taken[room] and time.monotonic() <= ends_s:
                self._is_free.wait(_LOOK_S)
                self.check()
                self._group.check_usable()  # a rank of this host may have died meanwhile
            is_late = self._is_taken[room]
            self._is_taken[room] = True
        if is_late:  # not under the lock, which the thread that reports the reason needs
            raise self._waits.late(self._terms.others, "take earlier buckets", bucket)
        in_flight = self._laid_out.get((bucket, room))
        if in_flight is None:
            in_flight = self._laid_out[bucket, room] = self._lay_out(bucket, room)
        in_flight.begin(self._number)
        return in_flight

    def _room_of(self, bucket: int, number: int) -> int:
        num_rooms = len(self._rooms)
        return (number if len(self._terms.routes) < num_rooms else bucket) % num_rooms

    def _take_only(self, in_flight: InFlightBucket) -> None:
        """Wait for the messages of a backward of one bucket, and publish the means.

        The next backward needs the memory of the sent messages; most likely they have left by then.
        """
        before, self._last_in_flight = self._last_in_flight, in_flight
        with _core.DefaultFloats():
            if before is not None:
                self._end_in_flight(before)
            self._open_next_backward()
            self._receive_next()
            in_flight.first_round()
            if not in_flight.is_one_round:
                in_flight.second_round()
        self._core.count_share()

    # --- messages ---

    def _lay_out(self, bucket: int, room: int) -> InFlightBucket:
        kind, memory = self._kind_of(bucket), self._rooms[room]
        if issubclass(kind, InFlightSums):
            return kind(self._terms, bucket, memory, self._joined)
        if issubclass(kind, InFlightValues):
            return kind(self._terms, bucket, memory, self._values)
        return kind(self._terms, bucket, memory)

    def _kind_of(self, bucket: int) -> type[InFlightSums | InFlightValues | InFlightFewValues]:
        route = self._terms.routes[bucket]
        if not route.is_of_values:
            return InFlightSums
        return InFlightFewValues if route.is_one_round else InFlightValues

    def _room_bytes(self, bucket: int) -> int:
        return self._kind_of(bucket).room_bytes(self._terms, bucket)

    def _piece_bytes(self) -> int:
        terms = self._terms
        return max(
            terms.sums.nbytes(bucket, len(piece))
            for bucket, route in enumerate(terms.routes)
            for part in route.parts
            for piece in part
        )

    def _has_few(self) -> bool:
        return self._kind_of(0).num_coming(self._terms, 0) <= _FEW_MESSAGES

    # --- the waiting thread ---

    def _run(self) -> None:
        try:
            with _core.DefaultFloats():  # so that sums of weights, too, are the same on all hosts
                self._wait_and_publish()
        except CollectiveError as error:
            self._fail(unpack_failure(error))  # another rank of this host may have reported its error
        except BaseException as error:
            self._fail(error)

    def _wait_and_publish(self) -> None:
        halfway: deque[InFlightBucket] = deque()
        while (in_flight := self._next(halfway)) is not None:
            if in_flight in halfway:
                halfway.remove(in_flight)
                in_flight.second_round()
            else:
                if self._has_few_messages:  # messages are on their way, and the user's thread waits, too
                    self._open_next_backward()
                    self._receive_next()
                in_flight.first_round()
                if not in_flight.is_one_round:
                    halfway.append(in_flight)
                    continue
            self._core.count_share()
            self._end_in_flight(in_flight)

    def _end_in_flight(self, in_flight: InFlightBucket) -> None:
        in_flight.wait_sent()
        with self._is_free:
            self._is_taken[self._room_of(in_flight.bucket, in_flight.number)] = False
            self._is_free.notify()

    def _next(self, halfway: deque[InFlightBucket]) -> InFlightBucket | None:
        """The last launched bucket if there is a new one; else the oldest that waits for its second round."""
        while True:
            try:
                in_flight = self._launched.get(block=not halfway)
            except queue.Empty:
                return halfway[0]
            if not isinstance(in_flight, _ReceiveNext):
                return in_flight
            self._receive_next()

    def _open_next_backward(self) -> None:
        """Count the next backward: all buckets of this one are launched, so receives are for the next."""
        self._number, self._next_ready, self._is_due = self._number + 1, 0, True

    def _receive_next(self) -> None:
        """Begin receives of the next backward, unless it has begun.

        If a connection has broken meanwhile, the next backward raises the error, because the backward that
        has ended is good.
        """
        # A thread that holds it begins the receives itself, and may wait for memory that this thread frees.
        if not self._making.acquire(blocking=False):
            return
        try:
            if self._is_due:
                self._make_ready(may_wait=False)
        except CollectiveError as error:
            self._receive_error = error
        finally:
            self._is_due = False
            self._making.release()

    # --- failures ---

    def _fail(self, error: BaseException) -> None:
        with self._is_free:
            if self.failure is not None:  # this error is a consequence of the first
                return
            self.failure = error
            self._is_free.notify_all()
        self._group.abort(pack_failure(error, self._rank))
        self._report(error)

    def _report(self, error: BaseException) -> None:
        """Report the reason to all hosts, then end the connections, so that the waits of peers end."""
        self._control.report_failure(error)
        self._terms.transport.abort()
