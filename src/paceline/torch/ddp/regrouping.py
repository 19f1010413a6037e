"""Moves a wrapped model to a new process group, as fault-tolerant programs do when a rank is lost.

All state about the ranks is in `Peers` and in the `BackwardSync` over them, so both are created again. The
model, its gradients and its options stay.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.reducer.history import agree_on_backwards
from paceline.torch.communicator.find_peers import find_peers
from paceline.torch.model.inner_tensors import plain_tensors

if TYPE_CHECKING:
    from paceline.torch.ddp.torch_names import TorchNames
    from paceline.torch.model.parameters import ManagedTensors


def regroup(ddp: TorchNames, new_process_group: Any) -> None:
    if new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    timeout_s, warn_after_s = ddp._config.timeout_s, ddp._config.warn_after_s
    peers = find_peers(new_process_group, None, timeout_s, warn_after_s, "new_process_group")
    before, ddp._backward_sync = ddp._backward_sync, None
    if before is not None:
        ddp._good_backwards = before.good_backwards
        before.graphs.close()
        before.end_turn()
        # A stopped rank that this rank no longer waits for may still write into the gradient buffer.
        before.settle_interrupted()
        before.gradients.leave_buffer()
    elif ddp._is_connected:  # a single rank, which does not count its backwards
        ddp._good_backwards = None
    ddp._is_connected = False
    if ddp._on_drop is not None:
        ddp._on_drop.detach()
    if ddp._storage is not None:  # shared with the previous ranks
        ddp._storage.move_out()
        ddp._storage = None
    ddp._check_model(peers)
    digest, exchange = functools.partial(_digest_of_weights, ddp._tensors), peers.exchange
    ddp._good_backwards, had_all = agree_on_backwards(ddp._good_backwards, digest, exchange, peers.timeout_s)
    if not had_all:
        for parameter in ddp._tensors.trainable:
            parameter.grad = None
    ddp._connect(peers, is_first=False)
    if ddp._comm_hook is not None:
        if ddp._backward_sync is None:  # alone
            ddp._backward_sync = ddp._begin_sync(is_first=False)
        ddp._backward_sync.use_hook(ddp._comm_hook, peers.process_group)
    if ddp._backward_sync is not None:
        ddp._backward_sync.good_backwards = ddp._good_backwards
        if before is not None:
            ddp._backward_sync.buffers.hook = before.buffers.hook


def _digest_of_weights(tensors: ManagedTensors) -> bytes:
    digest = hashlib.sha256()
    for parameter in plain_tensors(list(tensors.all_parameters.values())):
        values = parameter.detach().cpu()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
