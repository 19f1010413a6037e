"""Moves a wrapped model to a new process group, as fault-tolerant programs do when a rank is lost.

All state about the ranks is in `Peers` and in the `BackwardSync` over them, so both are created again. The
model, its gradients and its options stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.errors import ModelMismatchError, format_ranks
from paceline.rendezvous.exchange import Exchange
from paceline.torch.communicator.find_peers import find_peers
from paceline.torch.model.inner_tensors import plain_tensors

if TYPE_CHECKING:
    from paceline.torch.ddp.torch_names import TorchNames
    from paceline.torch.model.parameters import ManagedTensors

_UNKNOWN = -1


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
    ddp._good_backwards, had_all = _agree_on_backwards(
        ddp._good_backwards, ddp._tensors, peers.exchange, peers.timeout_s
    )
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


def _agree_on_backwards(
    good_backwards: int | None, tensors: ManagedTensors, exchange: Exchange, timeout_s: float
) -> tuple[int, bool]:
    """Raise on every rank unless all have the same weights. Collective.

    Replicas with equal numbers of good backward passes hold the same weights. If the numbers differ, the
    weights themselves are compared.

    Returns:
        The number of good backward passes to continue from, and whether all ranks had it.
    """
    own = _UNKNOWN if good_backwards is None else good_backwards
    payloads = exchange.all_gather(own.to_bytes(8, "big", signed=True), timeout_s)
    numbers = [int.from_bytes(payload, "big", signed=True) for payload in payloads]
    if _UNKNOWN not in numbers and len(set(numbers)) == 1:
        return numbers[0], True
    digests = exchange.all_gather(_digest_of_weights(tensors), timeout_s)
    if len(set(digests)) > 1:
        raise _differ(numbers, digests)
    return max(0, *numbers), False


def _differ(numbers: Sequence[int], digests: Sequence[bytes]) -> ModelMismatchError:
    ranks_of: dict[tuple[int, bytes], list[int]] = {}
    for rank, key in enumerate(zip(numbers, digests)):
        ranks_of.setdefault(key, []).append(rank)
    letters: dict[bytes, str] = {}
    for digest in digests:
        letters.setdefault(digest, f"#{len(letters) + 1}")
    return ModelMismatchError(
        "The ranks of the new group hold different weights, after different numbers of good backward passes.",
        seen="\n".join(
            f"{format_ranks(ranks)}: weights {letters[digest]}, "
            + ("trained alone" if number == _UNKNOWN else f"good backward passes: {number}")
            for (number, digest), ranks in ranks_of.items()
        ),
        likely="a rank that comes anew; or an error that ended a step on some ranks only",
        hint="give every rank the weights of one, and its optimizer's state, by broadcast or from a "
        "checkpoint; then make this call again",
        good_backwards=tuple(None if number == _UNKNOWN else number for number in numbers),
    )


def _digest_of_weights(tensors: ManagedTensors) -> bytes:
    digest = hashlib.sha256()
    for parameter in plain_tensors(list(tensors.all_parameters.values())):
        values = parameter.detach().cpu()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
