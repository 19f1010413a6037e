"""ProcessGroupReducer against plain arithmetic: ranks are threads, the group is a barrier and a sum."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CollectiveError, GroupClosedError, MismatchError
from paceline.reducer.call_order import CallOrder
from paceline.reducer.plan import ParameterSpec, Plan, plan_buckets
from paceline.reducer.process_group import ProcessGroupReducer
from paceline.reducer.reducer_interface import BackwardStatus, Outcome

COUNTS = (5, 40000, 0, 17)


def make_plan(cap: int = 1024) -> Plan:
    specs = [ParameterSpec(f"p{i}", count, "float32", 4, "cpu") for i, count in enumerate(COUNTS)]
    return plan_buckets(specs, bucket_cap_bytes=cap, first_bucket_bytes=cap)


class Switchboard:
    """Matches the n-th call of each rank, as a process group does, and notices calls that do not match."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._calls: dict[int, dict[int, tuple[str, bytes]]] = {}
        self._changed = threading.Condition()

    def gather(self, rank: int, call: int, kind: str, payload: bytes) -> list[bytes]:
        with self._changed:
            rows = self._calls.setdefault(call, {})
            rows[rank] = (kind, payload)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(rows) == self.world_size, timeout=30)
            assert len({kind for kind, _ in rows.values()}) == 1, f"call {call} does not match: {rows}"
            return [rows[peer][1] for peer in range(self.world_size)]


class Deferred:
    """A launched bucket; joins the others only when waited for."""

    def __init__(self, complete: Callable[[], Any]) -> None:
        self.wait = complete


class ArrayTransport:
    def __init__(self, plan: Plan, board: Switchboard, rank: int) -> None:
        self.rank, self.world_size = rank, board.world_size
        self.is_serial = self.is_in_order = False
        self.note_stream = None
        self.pointers: list[int] = []
        self.gradient_buffer = np.full(plan.buffer_bytes // 4, 99.0, np.float32)
        self.plan = plan
        self.launched: list[int] = []
        self.order = CallOrder()
        self._board = board
        self._calls = 0
        self._under_way: list[Callable[[], None]] = []
        self._nonfinite: set[int] = set()
        for index in range(len(plan.parameters)):
            self.place(index)[:] = 0

    def place(self, index: int) -> npt.NDArray[np.float32]:
        begin = self.plan.offsets[index] // 4
        return self.gradient_buffer[begin : begin + self.plan.parameters[index].numel]

    def launch(self, bucket: int, scale: float) -> Deferred:
        self.launched.append(bucket)
        part = self.plan.buckets[bucket]
        flat = self.gradient_buffer[part.begin_byte // 4 : part.end_byte // 4]
        self._nonfinite.update(i for i in part.parameters if not np.isfinite(self.place(i)).all())
        sent = (flat * np.float32(scale)).tobytes()
        call = self._next_call()

        def complete() -> None:
            rows = self._board.gather(self.rank, call, f"bucket {bucket}", sent)
            flat[:] = sum(np.frombuffer(row, np.float32) for row in rows)

        self._under_way.append(complete)
        return Deferred(self._complete_all)

    def rescale(self, factor: float) -> None:
        self.gradient_buffer *= np.float32(factor)

    def clear(self, param: int) -> None:
        self.place(param)[:] = 0

    def take_nonfinite(self) -> list[int]:
        found, self._nonfinite = sorted(self._nonfinite), set()
        return found

    def may_have_overflowed(self, scale: float) -> bool:
        return scale * self.world_size > 1

    def find_overflowed(self) -> list[int]:
        return [i for i in range(len(COUNTS)) if not np.isfinite(self.place(i)).all()]

    def squared_norm(self) -> float:
        return sum(float(np.square(self.place(i), dtype=np.float64).sum()) for i in range(len(COUNTS)))

    def begin_all_gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        call, rows = self._next_call(), []

        def complete() -> None:
            rows.extend(self._board.gather(self.rank, call, "gather", payload))

        self._under_way.append(complete)

        def wait() -> list[bytes]:
            self._complete_all()
            return rows

        return wait

    def _complete_all(self) -> None:
        """A wait for a call needs all earlier calls, which other models may have made."""
        while self._under_way:
            self._under_way.pop(0)()

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls


class Rank:
    """One rank's reducer and gradient buffer; `mark` puts a gradient in its place and marks it."""

    def __init__(self, plan: Plan, board: Switchboard, rank: int) -> None:
        self.rank = rank
        self.transport = ArrayTransport(plan, board, rank)
        self.reducer = ProcessGroupReducer(plan, self.transport)

    def mark(self, index: int, value: float) -> None:
        self.transport.place(index)[:] = value
        self.reducer.mark_ready(index)


def on_ranks(world_size: int, body: Callable[[Rank], None], cap: int = 1024) -> None:
    """Run `body` for each rank in a thread; re-raise what any raised."""
    plan, board = make_plan(cap), Switchboard(world_size)
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            body(Rank(plan, board, rank))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@settings(max_examples=20, deadline=None)
@given(
    orders=st.lists(st.permutations(range(len(COUNTS))), min_size=1, max_size=3),
    cap=st.sampled_from([64, 1 << 17, 1 << 24]),
)
def test_the_mean_does_not_depend_on_who_is_ready_when(orders: list[list[int]], cap: int) -> None:
    def body(own: Rank) -> None:
        for _ in range(2):
            for index in orders[own.rank]:
                own.mark(index, float(2 * own.rank + index))
            assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
            assert own.transport.launched == sorted(own.transport.launched)
            own.transport.launched.clear()
            for index in range(len(COUNTS)):
                np.testing.assert_allclose(own.transport.place(index), len(orders) - 1 + index, rtol=1e-6)
        norm = sum(count * (len(orders) - 1 + index) ** 2 for index, count in enumerate(COUNTS))
        assert own.reducer.squared_norm() == pytest.approx(norm, rel=1e-5)

    on_ranks(len(orders), body, cap)


def test_weights_make_a_weighted_mean() -> None:
    def body(own: Rank) -> None:
        own.reducer.set_weight(1.0 + 2 * own.rank)
        for index in range(len(COUNTS)):
            own.mark(index, float(own.rank))
        own.reducer.finish(BackwardStatus(1), allow_unused=False)
        np.testing.assert_allclose(own.transport.place(0), 0.75)

    on_ranks(2, body)


def test_an_unused_parameter_is_known_to_all_and_the_next_backward_works() -> None:
    def body(own: Rank) -> None:
        for index in (0, 1) if own.rank == 1 else (0, 1, 2, 3):
            own.mark(index, 1.0)
        assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.UNUSED
        assert [own.reducer.last.unused[rank] for rank in (0, 1)] == [[], [2, 3]]
        assert own.reducer.last.globally_unused == []
        for index in range(len(COUNTS)):
            own.mark(index, 3.0)
        assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
        assert own.reducer.last.unused[1] == []
        np.testing.assert_allclose(own.transport.place(3), 3.0)

    on_ranks(2, body)


def test_an_unused_parameter_contributes_zero_where_that_is_allowed() -> None:
    def body(own: Rank) -> None:
        own.transport.place(3)[:] = 7.0  # left over from before
        for index in (0, 3) if own.rank == 0 else (0,):
            own.mark(index, 4.0)
        assert own.reducer.finish(BackwardStatus(1), allow_unused=True).outcome == Outcome.UNUSED
        np.testing.assert_allclose(own.transport.place(3), 2.0)
        assert own.reducer.last.globally_unused == [1, 2]

    on_ranks(2, body)


def test_what_is_left_of_an_unused_parameter_counts_where_it_is_marked_unused() -> None:
    def body(own: Rank) -> None:
        for step in range(2):
            own.transport.place(3)[:] = own.transport.place(2)[:] = 6.0
            for index in (0, 3) if own.rank == 0 else (0,):
                own.mark(index, 4.0)
            if own.rank == 1 and step == 0:
                own.reducer.mark_unused(3)
                own.reducer.mark_unused(2)
            assert own.reducer.finish(BackwardStatus(1), allow_unused=True).outcome == Outcome.UNUSED
            np.testing.assert_allclose(own.transport.place(3), 2.0 if step else 5.0)
            assert own.reducer.last.unused[1] == [1, 2, 3]
            assert own.reducer.last.globally_unused == [1, 2]

    on_ranks(2, body)


def test_globally_unused_parameters_are_left_alone_where_that_is_allowed() -> None:
    cases = [  # the marks of each rank, whether rank 1 has data, the result
        ([(0, 3), (0, 3)], True, Outcome.GLOBALLY_UNUSED),
        ([(0, 3), (0, 1, 3)], True, Outcome.UNUSED),
        ([(0, 3), (0, 1, 2, 3)], False, Outcome.GLOBALLY_UNUSED | Outcome.FINISHED),
        ([(0, 1, 2, 3), (0, 1, 2, 3)], True, Outcome.GOOD),
    ]

    def body(own: Rank) -> None:
        for marked, has_data, expected in cases:
            for index in marked[own.rank]:
                own.mark(index, 4.0 * own.rank)
            status = BackwardStatus(1, finished=not has_data and own.rank != 0)
            assert (
                own.reducer.finish(status, allow_unused=False, allow_globally_unused=True).outcome == expected
            )
            assert np.isnan(own.reducer.squared_norm()) == (Outcome.UNUSED in expected)
            if Outcome.UNUSED not in expected:
                np.testing.assert_allclose(own.transport.place(3), 2.0)
                assert own.reducer.last.globally_unused == (
                    [1, 2] if Outcome.GLOBALLY_UNUSED in expected else []
                )

    on_ranks(2, body)


def test_differing_forwards_are_noticed() -> None:
    def body(own: Rank) -> None:
        for index in range(len(COUNTS)):
            own.mark(index, 1.0)
        assert own.reducer.finish(BackwardStatus(1 + own.rank), allow_unused=False).outcome == Outcome.SKIPPED
        assert [status.forwards for status in own.reducer.last.statuses] == [1, 2, 3]

    on_ranks(3, body)


def test_a_backward_that_all_ranks_broke_off_is_void() -> None:
    def body(own: Rank) -> None:
        for index in range(len(COUNTS)):
            own.mark(index, 1.0)
        outcome = own.reducer.finish(BackwardStatus(interrupted=True), allow_unused=False).outcome
        assert outcome == Outcome.SKIPPED | Outcome.REPORTED
        assert np.isnan(own.reducer.squared_norm())

    on_ranks(2, body)


def test_ranks_in_backwards_of_two_models_all_raise_and_go_on() -> None:
    """The process group cannot distinguish whose buckets it adds up."""

    def body(own: Rank) -> None:
        other = ProcessGroupReducer(own.transport.plan, own.transport)
        first, second = (own.reducer, other) if own.rank else (other, own.reducer)
        for reducer in (first, second):
            for index in range(len(COUNTS)):
                own.transport.place(index)[:] = float("nan") if own.rank else 1.0
                reducer.mark_ready(index)
            with pytest.raises(MismatchError, match=f"another model than rank {1 - own.rank}"):
                reducer.finish(BackwardStatus(1), allow_unused=False)
            assert np.isnan(reducer.squared_norm())
        for index in range(len(COUNTS)):
            own.mark(index, 2.0 * own.rank)
        assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
        np.testing.assert_array_equal(own.transport.place(0), 1.0)

    on_ranks(2, body)


def test_buckets_of_two_models_in_another_order_on_one_rank_raise_on_all() -> None:
    """In one backward through both: all sizes agree, and the process group adds up unrelated buckets."""

    def body(own: Rank) -> None:
        other = ProcessGroupReducer(own.transport.plan, own.transport)
        for is_turned in (False, True, False):
            reducers = [own.reducer, other]
            for reducer in reducers[::-1] if is_turned and own.rank == 1 else reducers:
                for index in range(len(COUNTS)):
                    own.transport.place(index)[:] = 1.0
                    reducer.mark_ready(index)
            if is_turned:
                with pytest.raises(MismatchError, match="in another order"):
                    own.reducer.finish(BackwardStatus(1), allow_unused=False)
            else:
                assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
            other.finish(BackwardStatus(1), allow_unused=False)

    on_ranks(3, body)


def test_notes_that_differ_are_reported_and_change_nothing() -> None:
    def body(own: Rank) -> None:
        for notes in ([4, 4, 5], [0, 4, 4]):
            for index in range(len(COUNTS)):
                own.mark(index, float(own.rank))
            own.reducer.set_note(notes[own.rank])
            expected = Outcome.NOTES_DIFFER if notes[0] else Outcome.GOOD
            assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == expected
            assert own.reducer.last.notes == notes
            for index in range(len(COUNTS)):
                np.testing.assert_allclose(own.transport.place(index), 1.0, rtol=1e-6)

    on_ranks(3, body)


def test_nonfinite_gradients_are_known_by_rank() -> None:
    def body(own: Rank) -> None:
        for index in range(len(COUNTS)):
            own.mark(index, float("nan") if (own.rank, index) == (1, 3) else 1.0)
        assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.NONFINITE
        assert own.reducer.last.nonfinite == [(1, 3)]

    on_ranks(2, body)


@np.errstate(over="ignore", invalid="ignore")
def overflowing_backwards(own: Rank) -> None:
    own.reducer.set_weight(4.0)  # more than was expected: the sum is corrected too late
    for index in range(len(COUNTS)):
        own.mark(index, {0: 1e38, 3: float("inf") if own.rank else 1.0}.get(index, 1.0))
    outcome = own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome
    assert outcome == Outcome.NONFINITE | Outcome.OVERFLOWED
    assert own.reducer.last.overflowed == [0]
    assert own.reducer.last.nonfinite == [(1, 3)]
    for index in range(len(COUNTS)):
        own.mark(index, 1e37)
    assert own.reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
    assert own.reducer.last.overflowed == []


def test_a_sum_that_overflows_is_distinguished() -> None:
    on_ranks(2, overflowing_backwards)


def test_a_void_backward_has_no_norm() -> None:
    def body(own: Rank) -> None:
        for step in range(3):
            for index in range(len(COUNTS)):
                own.mark(index, 1.0)
            own.reducer.finish(BackwardStatus(1 + (step == 1) * own.rank), allow_unused=False)
            assert np.isnan(own.reducer.squared_norm()) == (step == 1)

    on_ranks(2, body)


def test_marking_twice_is_refused() -> None:
    def body(own: Rank) -> None:
        own.mark(1, 1.0)
        with pytest.raises(RuntimeError, match="twice"):
            own.mark(1, 1.0)

    on_ranks(1, body)


def test_buckets_that_no_rank_uses_are_skipped_until_one_does() -> None:
    big, others = 1, (0, 2, 3)

    def body(own: Rank) -> None:
        own.reducer = ProcessGroupReducer(own.transport.plan, own.transport, skip_unused=True)
        of_big = {n for n, bucket in enumerate(own.transport.plan.buckets) if bucket.parameters == (big,)}
        everything = set(range(len(own.transport.plan.buckets)))
        assert len(of_big) > 1 and of_big < everything
        # In each backward: the ranks that use the big one, and the buckets that are sent.
        for users, sent in (
            ((0, 1), everything),
            ((), everything),
            ((), everything - of_big),
            ((1,), everything),  # at its end
            ((0, 1), everything),
        ):
            own.transport.launched.clear()
            for index in others:
                own.mark(index, 1.0 + own.rank)
            if own.rank in users:
                own.mark(big, float("inf"))
            outcome = own.reducer.finish(BackwardStatus(1), allow_unused=True).outcome
            assert sorted(own.transport.launched) == sorted(sent)
            assert bool(outcome & Outcome.NONFINITE) == bool(users)
            assert own.reducer.last.nonfinite == [(rank, big) for rank in users]
            assert np.all(own.transport.place(3) == 1.5)
            assert np.all(own.transport.place(big) == (np.inf if users else 0.0))

    on_ranks(2, body)


def calls_of_a_backward(transport: ArrayTransport, reducer: ProcessGroupReducer) -> list[str]:
    """The calls of a backward and its waits, in order."""
    calls: list[str] = []
    launch, gather = transport.launch, transport.begin_all_gather

    def noting(what: str, complete: Callable[[], Any]) -> Callable[[], Any]:
        calls.append(f"begin {what}")

        def wait() -> Any:
            calls.append(f"wait for {what}")
            return complete()

        return wait

    transport.launch = lambda *call: Deferred(noting("bucket", launch(*call).wait))  # type: ignore[method-assign]
    transport.begin_all_gather = lambda payload: noting("status", gather(payload))  # type: ignore[method-assign]
    for index in range(len(COUNTS)):
        reducer.mark_ready(index)
    assert reducer.finish(BackwardStatus(1), allow_unused=False).outcome == Outcome.GOOD
    return calls


def test_the_status_is_on_its_way_with_the_last_buckets() -> None:
    """So it costs no further round; but hooks make calls of their own, and the status must come after."""
    for is_serial in (False, True):

        def body(own: Rank, is_serial: bool = is_serial) -> None:
            own.transport.is_serial = is_serial
            calls = calls_of_a_backward(own.transport, own.reducer)
            buckets = len(own.transport.plan.buckets)
            waits = ["wait for bucket"] * buckets
            expected = [*waits, "begin status"] if is_serial else ["begin status", *waits]
            assert calls == ["begin bucket"] * buckets + expected + ["wait for status"]

        on_ranks(2, body, cap=2**20)


def test_a_single_rank_makes_no_calls_for_reports() -> None:
    plan = make_plan(2**20)
    transport = ArrayTransport(plan, Switchboard(1), 0)
    calls = calls_of_a_backward(transport, ProcessGroupReducer(plan, transport))
    assert calls == [*["begin bucket"] * len(plan.buckets), *["wait for bucket"] * len(plan.buckets)]


def test_a_backward_that_fails_below_is_the_last_one() -> None:
    """The ranks' calls do not match any more, so later ones must raise instead of averaging wrongly."""
    rank = Rank(make_plan(), Switchboard(1), 0)

    def fail() -> list[int]:
        raise CollectiveError("Rank 0 of 1 lost the others.")

    rank.transport.take_nonfinite = fail  # type: ignore[method-assign]
    rank.mark(0, 1.0)
    with pytest.raises(CollectiveError, match="lost the others"):
        rank.reducer.finish(BackwardStatus(1), True)
    with pytest.raises(GroupClosedError, match=r"(?s)any more.*Rank 0 of 1 lost the others"):
        rank.mark(0, 1.0)
    with pytest.raises(GroupClosedError):
        rank.reducer.finish(BackwardStatus(1), True)
