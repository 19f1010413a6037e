"""The methods of a wrapped model that register communication hooks, torch's half-private ones included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.reducer.agreement import telling_peers
from paceline.reducer.comm_hooks import CommHook, agree_on_hook, check_is_first
from paceline.torch.ddp.logging_data import noting_errors
from paceline.torch.link.buffer_hook import BufferHook
from paceline.torch.link.comm_hook import check_hook

if TYPE_CHECKING:
    from paceline.torch.link.peers import Peers
    from paceline.torch.passes.passes import GradientPasses


class CommHooks:
    """Mixed into `DistributedDataParallel`."""

    if TYPE_CHECKING:
        _passes: GradientPasses | None

        def _begin_passes(self) -> GradientPasses: ...

        def _connected(self) -> Peers: ...

    _comm_hook: CommHook | None = None
    _builtin_hook: str | None = None  # what torch calls the hook, if it is one of those in C++

    @noting_errors
    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook` average each bucket of gradients, over torch's process group.

        Collective. torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work unmodified, on the
        CPU too. Once in the life of a wrapped model, and not within a backward.

        Args:
            state: Handed to the hook, as it is.
            hook: Called as `hook(state, bucket)` when all gradients of a bucket are there, not divided by
                the world size; returns a future of the tensor that replaces `bucket.buffer()`.

        Raises:
            RuntimeError: A hook was registered before.
            TypeError: It is not callable; or, in backward, does not return a future of a tensor.
            ValueError: Its annotations, or the shape or dtype it returns, are wrong; or the ranks are
                connected by a `paceline.Group`, which hooks can't use.
            ModelMismatchError: Ranks registered different hooks.

        Example:
            >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
            >>> model.register_comm_hook(None, fp16_compress_hook)  # half the bytes on the wire
        """
        peers = self._connected()
        with telling_peers(lambda: (peers.exchange, peers.timeout_s), doing="register a hook"):
            check_hook(hook)
            check_is_first(self._comm_hook)
        if peers.process_group is None:
            raise ConfigError(
                "register_comm_hook: a communication hook needs a process group of torch.",
                seen="a paceline.Group",
                hint='torch.distributed.init_process_group("paceline") makes one in shared memory',
            )
        chosen = CommHook(state, hook)
        if peers.world_size > 1:
            agree_on_hook(chosen, peers.exchange, peers.timeout_s)
        if self._passes is None:
            self._passes = self._begin_passes()
        self._passes.use_hook(chosen, peers.process_group)
        self._comm_hook = chosen

    @noting_errors
    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Torch's names for its hooks written in C++: ALLREDUCE and FP16_COMPRESS."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        hook = hooks.get(comm_hook_type) if isinstance(comm_hook_type, BuiltinCommHookType) else None
        if hook is None:
            check, hint = Arguments("_register_builtin_comm_hook"), "dist.BuiltinCommHookType.FP16_COMPRESS"
            raise check.refuse("comm_hook_type", comm_hook_type, "a BuiltinCommHookType", hint, is_type=True)
        self.register_comm_hook(self._connected().process_group, hook)
        self._builtin_hook = str(comm_hook_type)

    @noting_errors
    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        """Let `hook` keep the buffers in step, instead of what `buffers` and broadcast_buffers say.

        Args:
            state: Handed to the hook, as it is.
            hook: Called as `hook(state, {name: buffer})` on every rank, in each forward whose backward will
                synchronise; changes the buffers. May return a list of futures, which the end of that
                backward waits for.
            comm_hook_location: torch's `_BufferCommHookLocation`: before forward, or (None) after it.

        Raises:
            TypeError: It is not callable.
        """
        chosen = BufferHook(state, hook, comm_hook_location)
        self._connected()
        if self._passes is None:
            self._passes = self._begin_passes()
        self._passes.buffers.hook = chosen

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Let an optimizer of torch step each parameter as soon as its bucket is averaged.

        Raises:
            RuntimeError: torch has no functional form of this optimizer.
        """
        if not isinstance(optim, type) or not issubclass(optim, torch.optim.Optimizer):
            check, hint = Arguments("_register_fused_optim"), "torch.optim.Adam, without a call"
            raise check.refuse("optim", optim, "the class of an optimizer", hint, is_type=True)
        from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

        overlapped = _as_overlapped_optim(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise ConfigError(
                f"{optim.__name__} does not support overlapped DDP.", hint="step it after backward()"
            ) from error

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets have their final order: after the first pass."""
        return self._passes is not None and self._passes.is_order_final
