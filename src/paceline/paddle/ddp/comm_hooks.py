"""The method of a wrapped model that registers a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.paddle.link.comm_hook import GradBucket
from paceline.reducer.agreement import telling_peers
from paceline.reducer.comm_hooks import CommHook, agree_on_hook, check_callable, check_is_first

if TYPE_CHECKING:
    from paceline.paddle.link.peers import Peers
    from paceline.paddle.passes.passes import GradientPasses


class CommHooks:
    """Mixed into `DataParallel`."""

    if TYPE_CHECKING:
        _peers: Peers | None
        group: Any

        def _passes_to_weigh(self) -> GradientPasses: ...

    _comm_hook: CommHook | None = None

    def register_comm_hook(self, state: object, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Let `hook` average each bucket of gradients.

        Collective. Once in the life of a wrapped model, and not within a backward. Hooks that send fewer
        bits are in `paceline.paddle.compression`.

        Args:
            state: Handed to the hook, as it is.
            hook: Called as `hook(state, bucket)` when all gradients of a bucket are there, not divided by
                the world size, on every rank in the same order. Returns the tensor that replaces
                `bucket.buffer()`, or a future of it: `bucket.all_reduce(tensor)` and `bucket.all_gather()`
                return futures, and connect the ranks however they are connected.

        Raises:
            RuntimeError: A hook was registered before.
            TypeError: It is not callable; or, in backward, does not return a tensor or a future of one.
            ValueError: The shape or dtype it returns is wrong.
            ModelMismatchError: Ranks registered different hooks.

        Example:
            >>> def hook(state, bucket):  # half the bytes on the wire
            ...     sums = bucket.all_reduce(bucket.buffer().astype("bfloat16"))
            ...     return sums.then(lambda f: f.value() / bucket.world_size)
            >>> model.register_comm_hook(None, hook)
        """
        peers = self._peers
        with telling_peers(
            lambda: None if peers is None else (peers.exchange, peers.timeout_s), doing="register a hook"
        ):
            hint = "paceline.paddle.compression has some"
            check_callable(hook, returns="a tensor, or a future of one", hint=hint)
            check_is_first(self._comm_hook)
        chosen = CommHook(state, hook)
        if peers is not None:
            agree_on_hook(chosen, peers.exchange, peers.timeout_s)
        self._passes_to_weigh().use_hook(chosen, self.group)
        self._comm_hook = chosen
