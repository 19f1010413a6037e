"""Parameters of a module of torch's move into memory that the ranks of a host share, and out of it.

The one idea: only `.data` of each `Parameter` changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from paceline.rendezvous.shared_memory import HostMemory
from paceline.sharding import moving
from paceline.sharding.moving import overlapping
from paceline.sharding.shared_parameters import storage_of, storages_of
from paceline.torch.communicator.gradient_buffer import extent
from paceline.torch.communicator.peers import Peers
from paceline.torch.model.inner_tensors import is_disjoint, is_wrapper
from paceline.torch.sharding.guards import watch_optimizers
from paceline.torch.sharding.shared_storage import PLACING, SharedStorage


def move(
    owner: str,
    tensors: Mapping[str, torch.Tensor],
    peers: Peers,
    memory: HostMemory,
    *,
    are_equal: bool,
    allows_writing: bool,
) -> SharedStorage:
    """See `reducer.moving.move`."""
    watch_optimizers()
    return moving.move(
        owner, tensors, peers, memory, PLACING, are_equal=are_equal, allows_writing=allows_writing
    )


def move_out(module: nn.Module) -> None:
    """Give this process a copy of its own of each parameter of a module that lies elsewhere."""
    for storage in storages_of([*module.parameters(), *module.buffers()]):
        storage.move_out()


def refuse_strange(owner: str, module: nn.Module, tensors: Mapping[str, torch.Tensor], peers: Peers) -> None:
    """Refuse tensors that can't be shared. Collective.

    Args:
        owner: Who is to share them, for errors.
        module: Holds the tensors.
        tensors: By name.
        peers: The ranks.

    Raises:
        ConfigError: A rank has one; on every rank.
    """
    moving.refuse_strange(owner, _problems(module, tensors), peers)


def _problems(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Why these tensors can't be shared, each with what to do in a second line."""
    for name, tensor in tensors.items():
        kind = (type(tensor) if is_wrapper(tensor) else type(tensor.data)).__name__
        if kind != "Tensor" or tensor.layout is not torch.strided or tensor.is_quantized:
            yield f"'{name}' is no plain dense tensor: {kind}, {tensor.layout}, {tensor.dtype}\n{_LEAVE}"
        elif not tensor.is_cpu:
            yield f"'{name}' is on {tensor.device}, and not in the memory of the host\nmodel.cpu()"
        elif not is_disjoint(tensor):
            yield (
                f"several elements of '{name}' lie in the same memory (strides {tensor.stride()})\n"
                "contiguous() makes a parameter of it whose elements are its own"
            )
        elif (storage := storage_of(tensor)) is not None and storage.is_writing:
            yield f"'{name}' is being written to\nleave `writing()` first"
    yield from overlapping((t.data_ptr(), name, extent(t)) for name, t in tensors.items() if t.numel())
    shared = {id(tensor) for tensor in tensors.values()}
    for name, child in module.named_modules():
        is_embedding = isinstance(child, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and child.max_norm is not None and id(child.weight) in shared:
            yield (
                f"the embedding '{name}' has max_norm={child.max_norm}: forward changes its weight\n"
                "leave max_norm out, and scale the weight within writing()"
            )


_LEAVE = "name it in module._ddp_params_and_buffers_to_ignore; or train without sharing parameters"
