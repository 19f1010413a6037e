"""Buckets through a user's hook: what torch calls a communication hook, with torch's own unmodified.

A hook gets a state and a `GradBucket`, and returns a future of the tensor that replaces the bucket's buffer.
One hook at a time: the next begins when the future of the one before is done. Hooks make further calls on
the process group when a call of theirs completes, and only so do these have one order on all ranks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError, ConfigTypeError
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.comm_hooks import (
    CommHook,
    HookedBucket,
    ShownBuckets,
    check_callable,
    wrong_result,
)
from paceline.torch.communicator.gradient_buffer import GradientBuffer
from paceline.torch.communicator.peers import ProcessGroupPeers
from paceline.torch.communicator.transport import ProcessGroupTransport, as_real


class GradBucket(HookedBucket[torch.Tensor]):
    """What a hook sees of a bucket: the members of `torch.distributed.GradBucket`, and three that it lacks.

    Args:
        process_group: The process group of the wrapped model.
        members: The members of a `HookedBucket`.
    """

    def __init__(self, process_group: dist.ProcessGroup, *members: Any) -> None:
        super().__init__(*members)
        first = self._buffer.storage_offset()
        self._places = [(view.storage_offset() - first, view) for view in self._gradients]
        self._process_group = process_group

    def process_group(self) -> dist.ProcessGroup:
        """The ranks to average over."""
        return self._process_group

    def _cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer[first : first + view.numel()].as_strided(view.shape, view.stride())
            for first, view in self._places
        ]


class HookTransport(ProcessGroupTransport):
    """A `Transport` that gives each bucket to a hook.

    Args:
        gradient_buffer: With whole parameters in its buckets.
        peers: The process group that the hook, too, will use.
        parameters: Those that the plan lists.
        hook: Replaces the all_reduce. It gets gradients that are not divided by anything.
        checks_finite, peer_monitor: As `ProcessGroupTransport`'s.
    """

    def __init__(
        self,
        gradient_buffer: GradientBuffer,
        peers: ProcessGroupPeers,
        parameters: Sequence[torch.Tensor],
        hook: CommHook,
        *,
        checks_finite: bool,
        peer_monitor: PeerMonitor | None = None,
    ) -> None:
        super().__init__(gradient_buffer, peers, checks_finite=checks_finite, peer_monitor=peer_monitor)
        self.is_serial, self.is_in_order = True, False
        self.pointers = ()  # hooks may move the memory
        self._hook = hook
        self._parameters = list(parameters)
        self._latest: _HookWork | None = None
        self.shown: ShownBuckets[torch.Tensor] = ShownBuckets()

    def launch(self, bucket: int, scale: float) -> _HookWork:
        """Give a bucket to the hook, which divides by the world size; the rest of `scale` is a weight."""
        if self._latest is not None:
            self._latest.wait()
        flat = self._complete(bucket)
        members = [
            index
            for index in self._gradient_buffer.plan.buckets[bucket].parameters
            if self._gradient_buffer.views[index].numel()  # not sparse ones, which are averaged elsewhere
        ]
        with torch.no_grad():
            if self._checks_finite and scale:
                self._note_nonfinite(bucket, flat)
            weight = scale * self.world_size
            if weight == 0.0:
                flat.zero_()  # 0 * NaN would be NaN
            elif not math.isclose(weight, 1.0, rel_tol=1e-12):  # 1 / 49 * 49 is not 1
                flat.mul_(weight)
            shown = GradBucket(
                self._group,
                bucket,
                flat,
                # .data: what the hook does to them does not count as a change of the gradient itself
                [self._gradient_buffer.views[index].data for index in members],
                [self._parameters[index] for index in members],
                bucket == len(self._buckets) - 1,
                weight,
            )
            self.shown.add(shown, members)
            future = self._hook.call(self._hook.state, shown)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future
            raise _wrong_result(
                self._hook.name, "a torch.futures.Future of a tensor", type(future).__name__, ConfigTypeError
            )
        self._latest = _HookWork(self, future, shown)
        return self._latest

    def finish(self, future: torch._C.Future[Any], shown: GradBucket) -> None:
        """Wait for a hook's future, with the deadline, and put its tensor into the bucket."""
        bucket = shown.index()
        self._calls.waits.poll(future.done, bucket)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._calls.waits.failed(error, bucket) from error
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]  # what the futures of torch's own collectives hold
        flat = self._buckets[bucket]
        if not isinstance(value, torch.Tensor):
            raise _wrong_result(
                self._hook.name, "a future of a tensor", f"one of {type(value).__name__}", ConfigTypeError
            )
        if flat.is_complex() and not value.is_complex():
            flat = as_real(flat)  # as torch's all_reduce delivers it
        if value.numel() != flat.numel() or value.is_floating_point() != flat.is_floating_point():
            raise _wrong_result(
                self._hook.name,
                f"a tensor like bucket.buffer(), shape {tuple(flat.shape)}, {flat.dtype}",
                f"shape {tuple(value.shape)}, {value.dtype}",
                ConfigError,
            )
        if value.data_ptr() != flat.data_ptr():
            with torch.no_grad():
                flat.copy_(value.reshape(flat.shape))
        self.shown.note(shown, lambda: bool(torch.isfinite(flat).all()))

    def take_nonfinite(self) -> list[int]:
        self._latest = None
        return super().take_nonfinite()

    def may_have_overflowed(self, scale: float) -> bool:
        return self._checks_finite  # a hook may sum in a smaller type


class _HookWork:
    """A bucket in the hands of a hook."""

    def __init__(self, transport: HookTransport, future: torch._C.Future[Any], shown: GradBucket) -> None:
        self._transport = transport
        self._future: torch._C.Future[Any] | None = future
        self._shown = shown

    def wait(self) -> None:
        future, self._future = self._future, None
        if future is not None:
            self._transport.finish(future, self._shown)


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a hook, with torch's exception types.

    Raises:
        ConfigTypeError: It is not callable.
        ConfigError: Its annotations are those of something else.
    """
    hint = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks has some"
    check_callable(hook, returns="a future of a tensor", hint=hint)
    try:
        signature = inspect.signature(hook)
    except ValueError:  # written in C: nothing to look at
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


def _wrong_result(name: str, expected: str, got: str, kind: type[ConfigError]) -> ConfigError:
    hint = "return work.get_future().then(lambda f: f.value()[0] / world_size)"
    return wrong_result(name, expected, got, hint, kind)
