"""Passes buckets to a user's communication hook. Paddle has no such hooks; these have torch's interface.

A hook gets a state and a `GradBucket`, and returns the tensor that replaces the bucket's buffer, or a
`Future` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import paddle

from paceline.errors import ConfigTypeError
from paceline.paddle import internals
from paceline.reducer.comm_hooks import CommHook, HookedBucket, HookedBuckets, wrong_result
from paceline.reducer.gradient_buffer import GradientBuffer

if TYPE_CHECKING:
    from paceline.paddle.communicator.calls import GroupCalls

_Value = TypeVar("_Value")
_Next = TypeVar("_Next")

_HINT = "return bucket.all_reduce(bucket.buffer()).then(lambda f: f.value() / world_size)"


class Future(Generic[_Value]):
    """The result of an operation that may not be complete yet.

    Args:
        finish: Waits for the result and returns it; called once.
    """

    def __init__(self, finish: Callable[[], _Value]) -> None:
        self._finish: Callable[[], _Value] | None = finish
        self._value: _Value
        self._error: BaseException | None = None

    def wait(self) -> _Value:
        """Return the result. Blocks until it is ready, at most until the deadline of the wrapped model.

        Raises:
            BaseException: The error of the operation; raised again if wait() is called again.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._value = finish()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return self._value

    def value(self) -> _Value:
        """Same as wait(): torch's name for it within `then`."""
        return self.wait()

    def then(self, callback: Callable[[Future[_Value]], _Next]) -> Future[_Next]:
        """The future of `callback(self)`, which is called when this future is complete."""

        def finish() -> _Next:
            self.wait()
            return callback(self)

        return Future(finish)


class GradBucket(HookedBucket[paddle.Tensor]):
    """A bucket as a hook sees it: the interface of torch's GradBucket, and collectives between the ranks.

    Args:
        calls: Collectives between the ranks.
        process_group: The group that was passed to the wrapper, or found.
        members: The arguments of `HookedBucket`.
    """

    def __init__(self, calls: GroupCalls, process_group: Any, *members: Any) -> None:
        super().__init__(*members)
        self._calls = calls
        self._process_group = process_group

    @property
    def world_size(self) -> int:
        return self._calls.world_size

    def process_group(self) -> Any:
        return self._process_group

    def all_reduce(self, tensor: paddle.Tensor) -> Future[paddle.Tensor]:
        """Begin to replace a contiguous tensor by its sum over the ranks. Collective.

        Over Gloo the exchange overlaps with backward; in shared memory it is complete when this returns.
        """
        what = "sum in a communication hook"
        call = self._calls.begin(lambda: self._calls.all_reduce(tensor), what)
        return Future(lambda: self._calls.wait(call, what)).then(lambda _: tensor)

    def all_gather(self, tensor: paddle.Tensor) -> Future[paddle.Tensor]:
        """Begin to gather a contiguous tensor of every rank, by rank, in a new first dimension. Collective.

        Example:
            Rank 0 passes [1, 2] and rank 1 [3, 4]; both get the future of [[1, 2], [3, 4]].
        """
        whole = internals.empty_on(tensor.place, [self.world_size * int(tensor.size)], tensor.dtype)
        flat = tensor.reshape([-1])
        what = "gathering in a communication hook"
        call = self._calls.begin(lambda: self._calls.all_gather(whole, flat), what)
        of_ranks = [self.world_size, *tensor.shape]
        return Future(lambda: self._calls.wait(call, what)).then(lambda _: whole.reshape(of_ranks))

    def _cut(self, buffer: paddle.Tensor) -> list[paddle.Tensor]:
        return cut(buffer, self._parameters)


def cut(buffer: paddle.Tensor, parameters: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    parts, first = [], 0
    for parameter in parameters:
        last = first + int(parameter.size)
        parts.append(buffer[first:last].reshape(parameter.shape))
        first = last
    return parts


class PaddleHook(HookedBuckets[paddle.Tensor]):
    """See `HookedBuckets`; a hook returns a tensor, or a future of one."""

    def __init__(
        self,
        hook: CommHook,
        gradient_buffer: GradientBuffer[paddle.Tensor],
        parameters: Sequence[paddle.Tensor],
        calls: GroupCalls,
        process_group: Any,
    ) -> None:
        super().__init__(hook, gradient_buffer.plan)
        self._parameters, self._calls, self._process_group = parameters, calls, process_group

    def _show(
        self, number: int, flat: paddle.Tensor, members: Sequence[int], weight: float
    ) -> tuple[GradBucket, Any]:
        parameters = [self._parameters[index] for index in members]
        is_last = number == len(self._plan.buckets) - 1
        places = cut(flat, parameters)
        shown = GradBucket(
            self._calls, self._process_group, number, flat, places, parameters, is_last, weight
        )
        with paddle.no_grad():
            result = self._hook.call(self._hook.state, shown)
        if not isinstance(result, paddle.Tensor) and not callable(getattr(result, "wait", None)):
            expected = "a tensor, or a future of one (an object with wait())"
            raise wrong_result(self._hook.name, expected, type(result).__name__, _HINT, ConfigTypeError)
        return shown, result

    def _put(self, result: Any, number: int, flat: paddle.Tensor) -> None:
        name = self._hook.name
        with paddle.no_grad():
            value = result if isinstance(result, paddle.Tensor) else result.wait()
            if not isinstance(value, paddle.Tensor):
                got = f"one of {type(value).__name__}"
                raise wrong_result(name, "a future of a tensor", got, _HINT, ConfigTypeError)
            if int(value.size) != int(flat.size) or not value.is_floating_point():
                expected = f"a tensor like bucket.buffer(), shape {list(flat.shape)}, {flat.dtype}"
                raise wrong_result(name, expected, f"shape {list(value.shape)}, {value.dtype}", _HINT)
            if value.data_ptr() != flat.data_ptr():
                paddle.assign(value.reshape(flat.shape).astype(flat.dtype), flat)

    def _is_finite(self, flat: paddle.Tensor) -> bool:
        return bool(paddle.isfinite(flat).all())
