"""Communication hooks: functions of the user that reduce each bucket. torch's own hooks work unmodified.

A hook gets a state and a `GradBucket`, and returns a future of the tensor that replaces the bucket's buffer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _BufferCommHookLocation

from paceline.arguments import Arguments
from paceline.errors import ConfigError, ConfigTypeError
from paceline.reducer.comm_hooks import CommHook, HookedBucket, HookedBuckets, check_callable, wrong_result
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.torch.communicator.flat_buckets import as_real

if TYPE_CHECKING:
    from paceline.torch.communicator.calls import GroupCalls

_HINT = "return work.get_future().then(lambda f: f.value()[0] / world_size)"


class GradBucket(HookedBucket[torch.Tensor]):
    """The bucket that a hook gets: the members of `torch.distributed.GradBucket`, and three more."""

    def __init__(self, process_group: dist.ProcessGroup, *members: Any) -> None:
        super().__init__(*members)
        first = self._buffer.storage_offset()
        self._places = [(view.storage_offset() - first, view) for view in self._gradients]
        self._process_group = process_group

    def process_group(self) -> dist.ProcessGroup:
        return self._process_group

    def _cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer[first : first + view.numel()].as_strided(view.shape, view.stride())
            for first, view in self._places
        ]


class TorchHook(HookedBuckets[torch.Tensor]):
    """`HookedBuckets` for hooks that return torch futures."""

    def __init__(
        self,
        hook: CommHook,
        gradient_buffer: GradientBuffer[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        calls: GroupCalls,
        process_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(hook, gradient_buffer.plan)
        self._places, self._parameters = gradient_buffer.places, list(parameters)
        self._calls, self._process_group = calls.but(plan=gradient_buffer.plan), process_group

    def _show(
        self, number: int, flat: torch.Tensor, members: Sequence[int], weight: float
    ) -> tuple[GradBucket, Any]:
        shown = GradBucket(
            self._process_group,
            number,
            flat,
            # .data: writes of the hook must not count as changes of the gradient itself
            [self._places[index].data for index in members],
            [self._parameters[index] for index in members],
            number == len(self._plan.buckets) - 1,
            weight,
        )
        with torch.no_grad():
            future = self._hook.call(self._hook.state, shown)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future
            expected = "a torch.futures.Future of a tensor"
            raise wrong_result(self._hook.name, expected, type(future).__name__, _HINT, ConfigTypeError)
        return shown, future

    def _put(self, result: torch._C.Future[Any], number: int, flat: torch.Tensor) -> None:
        waits, name = self._calls.waits, self._hook.name
        waits.poll(result.done, number)
        try:
            value = result.wait()
        except RuntimeError as error:
            raise waits.failed(error, number) from error
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]  # the futures of torch's own collectives hold lists
        if not isinstance(value, torch.Tensor):
            got = f"one of {type(value).__name__}"
            raise wrong_result(name, "a future of a tensor", got, _HINT, ConfigTypeError)
        if flat.is_complex() and not value.is_complex():
            flat = as_real(flat)  # torch's all_reduce returns pairs of real numbers
        if value.numel() != flat.numel() or value.is_floating_point() != flat.is_floating_point():
            expected = f"a tensor like bucket.buffer(), shape {tuple(flat.shape)}, {flat.dtype}"
            raise wrong_result(name, expected, f"shape {tuple(value.shape)}, {value.dtype}", _HINT)
        if value.data_ptr() != flat.data_ptr():
            with torch.no_grad():
                flat.copy_(value.reshape(flat.shape))

    def _is_finite(self, flat: torch.Tensor) -> bool:
        return bool(torch.isfinite(flat).all())


def check_hook(hook: Any) -> None:
    """Refuse an object that cannot be a hook, with torch's exception types."""
    hint = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks has some"
    check_callable(hook, returns="a future of a tensor", hint=hint)
    try:
        signature = inspect.signature(hook)
    except ValueError:  # written in C: it has no signature
        return
    bucket = signature.parameters.get("bucket")
    buckets = (inspect.Parameter.empty, torch._C._distributed_c10d.GradBucket, GradBucket)
    if bucket is not None and not isinstance(bucket.annotation, str) and bucket.annotation not in buckets:
        raise ConfigError(
            "register_comm_hook: bucket annotation should be dist.GradBucket.", got=str(bucket.annotation)
        )
    returned = signature.return_annotation
    futures = (inspect.Signature.empty, torch.futures.Future, torch.futures.Future[torch.Tensor])
    if not isinstance(returned, str) and returned not in futures:
        raise ConfigError(
            "register_comm_hook: return annotation should be torch.futures.Future[torch.Tensor].",
            got=str(returned),
        )


class BufferHook:
    """A user's hook that synchronises buffers: torch's buffer communication hook.

    It is called before or after forward. The end of backward waits for the futures that a hook after forward
    returns.
    """

    def __init__(
        self, state: object, call: Callable[..., Any], location: _BufferCommHookLocation | None
    ) -> None:
        check = Arguments("_register_buffer_comm_hook")
        check.function("hook", call, "hook(state, {name: buffer})")
        if location is not None and not isinstance(location, _BufferCommHookLocation):
            name, expected = "comm_hook_location", "torch.nn.parallel.distributed._BufferCommHookLocation"
            raise check.refuse(name, location, expected, "leave it out: after forward", is_type=True)
        self._state = state
        self._call = call
        self._is_before = location is _BufferCommHookLocation.PRE_FORWARD
        self._futures: list[torch.futures.Future[Any]] = []

    def before_forward(self, buffers: dict[str, torch.Tensor]) -> None:
        if self._is_before:
            self._run(buffers)
            self.end_backward()  # forward must see the result

    def after_forward(self, buffers: dict[str, torch.Tensor]) -> None:
        if not self._is_before:
            self._run(buffers)

    def end_backward(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def _run(self, buffers: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self._futures += self._call(self._state, buffers) or []
