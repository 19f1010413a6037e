"""A wrapped model that goes on with other ranks: what fault-tolerant users of torch call when one is lost.

The one idea: everything that belongs to the ranks is in `Peers` and in the passes over them, so both are made
anew, and the model, its gradients and its options stay.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.torch.peers import find_peers

if TYPE_CHECKING:
    from paceline.torch.config import DDPConfig
    from paceline.torch.hooked import CommHook
    from paceline.torch.passes import GradientPasses
    from paceline.torch.peers import Peers


class Regrouping:
    """Mixed into `DistributedDataParallel`."""

    if TYPE_CHECKING:
        _comm_hook: CommHook | None
        _config: DDPConfig
        _is_connected: bool
        _passes: GradientPasses | None

        def _begin_passes(self, *, is_first: bool = True) -> GradientPasses: ...

        def _connect(self, peers: Peers, *, is_first: bool = True) -> None: ...

    _on_drop: weakref.finalize[Any, Any] | None = None  # tells the passes that the wrapper is gone

    def _update_process_group(self, new_process_group: Any) -> None:
        """Train with the ranks of another process group from now on.

        Collective over the new group, between two steps; a rank that is not in it returns at once, and
        takes no part in synchronised backwards until it is. A pass that an exception has broken off, as
        when a rank died in it, is forgotten. Nothing is broadcast: give a rank that comes anew the weights
        first. Communication hooks stay, with the group that their state holds.

        Raises:
            ModelMismatchError: The ranks' models differ; names the first difference.
        """
        if new_process_group == dist.GroupMember.NON_GROUP_MEMBER:
            return
        peers = find_peers(new_process_group, None, self._config.timeout_s, self._config.warn_after_s)
        before, self._passes = self._passes, None
        self._is_connected = False
        if before is not None:
            before.graphs.close()
        if self._on_drop is not None:
            self._on_drop.detach()
        self._connect(peers, is_first=False)
        if self._comm_hook is not None:
            if self._passes is None:  # alone
                self._passes = self._begin_passes(is_first=False)
            self._passes.use_hook(self._comm_hook)
        if before is not None and self._passes is not None:
            self._passes.buffers.hook = before.buffers.hook
