"""Ranks that run out of data before the others, in torch's `Join`; see also `reducer.backward.uneven_inputs`.

Such a rank takes part in the others' backwards without gradients. Before each one it asks, as torch's `Join`
does, whether there will be one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from paceline.errors import ConfigError
from paceline.reducer.backward.uneven_inputs import Shadow
from paceline.torch.communicator.calls import GroupCalls
from paceline.torch.communicator.find_peers import Peers, ProcessGroupPeers

if TYPE_CHECKING:
    from paceline.torch.backward.autograd import TorchBackwardSync

_WHO_HAS_JOINED = "the all-reduce of torch's Join that counts who still has data"


class Joining:
    """One wrapped model within torch's `Join`."""

    def __init__(self, backward_sync: TorchBackwardSync | None, peers: Peers, device: torch.device) -> None:
        if not isinstance(peers, ProcessGroupPeers):
            raise ConfigError(
                "DistributedDataParallel: torch's Join needs a process group of torch.",
                seen="a paceline.Group connects the ranks",
                hint="call ddp.finish() on each rank when its data ends; or torch.distributed."
                "init_process_group() before wrapping the model",
            )
        peer_monitor = None if backward_sync is None else backward_sync.communicator.peer_monitor
        calls = GroupCalls(peers.process_group, peers, peer_monitor)
        self._device = torch.device("cpu") if calls.serves_cpu else device
        self._calls = calls
        self._backward_sync = backward_sync
        self._shadow: Shadow | None = None  # set when this rank runs out of data
        self._work: dist.Work | None = None  # kept: dropping a Work in progress may abort it

    def notify(self, joinable: Any, is_syncing: bool, *, is_training: bool) -> None:
        """Notify ranks without data that this rank begins a forward, and whether it will synchronise."""
        if self._backward_sync is not None:
            self._backward_sync.autograd.check_direct_step()
            # Before torch's calls: a rank with one forward too many waits here for the others.
            self._backward_sync.publish_forward(is_syncing=is_syncing, is_training=is_training)
        with self.naming_the_lost():
            self._work = Join.notify_join_context(joinable)
        self._any(is_syncing)

    def naming_the_lost(self) -> contextlib.AbstractContextManager[None]:
        return self._calls.naming(_WHO_HAS_JOINED)

    def shadow(self, divide_by_initial_world_size: bool) -> None:
        """Take part in the next backward of the other ranks, if it synchronises."""
        if self._backward_sync is not None and self._shadow is None:
            self._shadow = Shadow(self._backward_sync, keep_accumulated=True)
        if self._any(False) and self._backward_sync is not None:
            # With a weight of 1 the zeros count, so the others' sum is divided by the whole world size.
            self._backward_sync.shadow(weight=1.0 if divide_by_initial_world_size else 0.0)

    def take_last_model(self, is_last: bool) -> None:
        if self._backward_sync is None:
            return
        if self._shadow is not None:
            shadow, self._shadow = self._shadow, None
            shadow.end()
        votes = self._backward_sync.communicator.all_gather(bytes([is_last]))
        self._backward_sync.broadcast_model(votes.index(bytes([True])))

    def _any(self, is_syncing: bool) -> bool:
        if self._backward_sync is None:
            return is_syncing
        votes = torch.tensor([float(is_syncing)], device=self._device)
        self._backward_sync.communicator.sum(votes)
        return bool(votes.item())


class DDPJoinHook(JoinHook):
    """The hook that `Join` runs on a rank that has run out of data."""

    def __init__(
        self, joining: Joining, divide_by_initial_world_size: bool, leave: Callable[[], None]
    ) -> None:
        super().__init__()
        self._joining = joining
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._leave = leave

    def main_hook(self) -> None:
        self._joining.shadow(self._divide_by_initial_world_size)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._joining.take_last_model(is_last_joiner)
        self._leave()


class NamingJoin(Join):
    """torch's `Join` of one wrapped model, with errors that name the rank that was lost."""

    def __init__(
        self, ddp: Any, enable: bool, throw_on_early_termination: bool, divide_by_initial_world_size: bool
    ) -> None:
        divide = divide_by_initial_world_size
        super().__init__([ddp], enable, throw_on_early_termination, divide_by_initial_world_size=divide)
        self._joining: Joining = ddp._joining  # set by join_hook(), which torch has just called

    def __exit__(self, *error: Any) -> None:
        if error and error[0] is not None:  # after an error torch's Join makes no calls
            super().__exit__(*error)
            return
        with self._joining.naming_the_lost():
            super().__exit__(*error)
