"""A wrapped model that goes on with other ranks: what fault-tolerant users of torch call when one is lost.

The one idea: everything that belongs to the ranks is in `Peers` and in the passes over them, so both are made
anew, and the model, its gradients and its options stay.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.reducer.history import agree_on_passes
from paceline.torch.link.peers import find_peers

if TYPE_CHECKING:
    from paceline.reducer.comm_hooks import CommHook
    from paceline.torch.link.peers import Peers
    from paceline.torch.model.config import DDPConfig
    from paceline.torch.model.parameters import ManagedTensors
    from paceline.torch.passes.passes import GradientPasses


class Regrouping:
    """Mixed into `DistributedDataParallel`."""

    if TYPE_CHECKING:
        _comm_hook: CommHook | None
        _config: DDPConfig
        _is_connected: bool
        _passes: GradientPasses | None
        _tensors: ManagedTensors

        def _check_model(self, peers: Peers) -> None: ...

        def _begin_passes(self, *, is_first: bool = True) -> GradientPasses: ...

        def _connect(self, peers: Peers, *, is_first: bool = True) -> None: ...

    _on_drop: weakref.finalize[Any, Any] | None = None  # tells the passes that the wrapper is gone
    _good_passes: int | None = 0  # before the passes of the present group; None: some were not counted

    def _update_process_group(self, new_process_group: Any) -> None:
        """Train with the ranks of another process group from now on.

        Collective over the new group, between two steps: every rank of it makes this call, one that comes
        anew too (wrap its model over a group of its own first). A rank that is not in it returns at once,
        and takes no part in synchronised backwards until it is. A pass that an exception has broken off, as
        when a rank died in it, is forgotten. Communication hooks stay, with the group that their state holds.

        Nothing is broadcast. The ranks compare how many good passes they have behind them; where that
        differs, their weights must be equal, bit by bit: give them to a rank that comes anew before this
        call. Gradients that are left from before are dropped then, as not every rank has them.

        Raises:
            ModelMismatchError: The ranks' models differ, or their weights; names the first difference, or
                the ranks and their numbers of good passes.
        """
        if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        timeout_s, warn_after_s = self._config.timeout_s, self._config.warn_after_s
        peers = find_peers(new_process_group, None, timeout_s, warn_after_s, "new_process_group")
        before, self._passes = self._passes, None
        if before is not None:
            self._good_passes = before.good_passes
            before.graphs.close()
            # A rank that was stopped, and whom this one has given up, may still write into the arena.
            before.gradients.leave_arena()
        elif self._is_connected:  # alone: nobody has counted
            self._good_passes = None
        self._is_connected = False
        if self._on_drop is not None:
            self._on_drop.detach()
        self._check_model(peers)
        digest, exchange = self._digest_of_weights, peers.exchange
        self._good_passes, had_all = agree_on_passes(self._good_passes, digest, exchange, peers.timeout_s)
        if not had_all:
            for parameter in self._tensors.trainable:
                parameter.grad = None
        self._connect(peers, is_first=False)
        if self._comm_hook is not None:
            if self._passes is None:  # alone
                self._passes = self._begin_passes(is_first=False)
            self._passes.use_hook(self._comm_hook, peers.process_group)
        if self._passes is not None:
            self._passes.good_passes = self._good_passes
            if before is not None:
                self._passes.buffers.hook = before.buffers.hook

    def _digest_of_weights(self) -> bytes:
        digest = hashlib.sha256()
        for parameter in self._tensors.all_parameters.values():
            values = parameter.detach().cpu()
            values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
            digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()
