"""Parameters move into memory that the ranks of a host share: which can, and how.

The one idea: only `.data` of each `Parameter` changes, so whoever holds the object (an optimizer that was
made before, a tied layer, a hook) goes on with it. What can't move is refused on all ranks, before anything
has moved. Imports its neighbours, the rooms below, and what is below the front ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from paceline import _core
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import ConfigError
from paceline.reducer.one_copy import OneCopy, lay_out
from paceline.reducer.replica_check import Entry, check_replicas
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.model_memory import share_model_memory
from paceline.rendezvous.shared_memory import HostMemory
from paceline.torch.link.arena import extent
from paceline.torch.link.peers import Peers
from paceline.torch.one_model.guards import watch_optimizers
from paceline.torch.one_model.homes import Home, home_of, homes_of


def move(
    owner: str,
    tensors: Mapping[str, torch.Tensor],
    peers: Peers,
    memory: HostMemory,
    *,
    are_equal: bool,
    allows_writing: bool,
) -> Home:
    """Let the ranks of each host have one copy of these tensors. Collective.

    Args:
        owner: Who asks for it, for errors.
        tensors: By name; alike on all ranks. `refuse_strange` has looked at them.
        peers: The ranks.
        memory: Theirs, on this host.
        are_equal: Whether all ranks are known to have the same values. False: they are compared.
        allows_writing: Whether the model is to be trained.

    Raises:
        RegionError: There is not enough memory; on every rank.
        ReplicasDifferError: The ranks have different values.
    """
    watch_optimizers()
    is_one_host = len(memory.hosts) == 1
    exchange: Exchange = WholeExchange(memory.host_group) if is_one_host else peers.exchange
    timeout_s = peers.timeout_s
    if not are_equal:
        where = f"{owner}, of parameters that are to be one copy"
        check_replicas(
            _hashes(tensors),
            lambda payload: exchange.all_gather(payload, timeout_s),
            where=where,
        )
    places, nbytes = lay_out({name: extent(tensor) for name, tensor in tensors.items()})
    own = next(ranks for ranks in memory.hosts if exchange.rank in ranks)
    shared = share_model_memory(exchange, own, nbytes, timeout_s=timeout_s)
    copy = OneCopy(shared, places, exchange, memory.hosts, timeout_s)
    home = Home(copy, memory.host_group, allows_writing=allows_writing)
    if exchange.rank == own[0]:
        with torch.no_grad():
            for tensor, place in zip(tensors.values(), places):
                if place.nbytes:
                    home.view(tensor, shared.writable + place.begin, place.nbytes).copy_(tensor)
    exchange.all_gather(b"", timeout_s)  # the values are there
    for tensor, place in zip(tensors.values(), places):
        home.move_in(tensor, place)
    return home


def _hashes(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    whole = [tensor.detach().contiguous() for tensor in tensors.values()]
    hashes = _core.hash_all([each.data_ptr() for each in whole], [each.nbytes for each in whole])
    return [Entry("parameter", name, value) for name, value in zip(tensors, hashes)]


def move_out(module: nn.Module) -> None:
    """Give this process a copy of its own of each parameter of a module that lies elsewhere."""
    for home in homes_of([*module.parameters(), *module.buffers()]):
        home.move_out()


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
    problem = next(_problems(module, tensors), "")
    told = [each["problem"] for each in gather_objects(peers.exchange, {"problem": problem}, peers.timeout_s)]
    found = next((text for text in told if text), "")
    if found:
        what, _, hint = found.partition("\n")
        raise ConfigError(
            f"{owner}: this model's parameters can't be shared by the ranks of a host.",
            seen=f"rank {told.index(found)}: {what}",
            hint=hint,
        )


def _problems(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Why these tensors can't be shared, each with what to do in a second line."""
    for name, tensor in tensors.items():
        kind = type(tensor.data).__name__
        if kind != "Tensor" or tensor.layout is not torch.strided or tensor.is_quantized:
            yield f"'{name}' is no plain dense tensor: {kind}, {tensor.layout}, {tensor.dtype}\n{_LEAVE}"
        elif not tensor.is_cpu:
            yield f"'{name}' is on {tensor.device}, and not in the memory of the host\nmodel.cpu()"
        elif not _is_disjoint(tensor):
            yield (
                f"several elements of '{name}' lie in the same memory (strides {tensor.stride()})\n"
                "contiguous() makes a parameter of it whose elements are its own"
            )
        elif (home := home_of(tensor)) is not None and home.is_writing:
            yield f"'{name}' is being written to\nleave `writing()` first"
    previous, end = "", 0
    ranges = [(t.data_ptr(), name, extent(t)) for name, t in tensors.items() if t.numel()]
    for begin, name, nbytes in sorted(ranges):
        if begin < end:
            yield (
                f"'{previous}' and '{name}' are different parameters in the same memory\n"
                "use one Parameter object in both places (tied weights), or clone() one of them"
            )
        previous, end = name, begin + nbytes
    shared = {id(tensor) for tensor in tensors.values()}
    for name, child in module.named_modules():
        is_embedding = isinstance(child, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and child.max_norm is not None and id(child.weight) in shared:
            yield (
                f"the embedding '{name}' has max_norm={child.max_norm}: forward changes its weight\n"
                "leave max_norm out, and scale the weight within writing()"
            )


_LEAVE = "name it in module._ddp_params_and_buffers_to_ignore; or train without sharing parameters"


def _is_disjoint(tensor: torch.Tensor) -> bool:
    """Whether no two elements lie at the same place: enough, and true of all that people make."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < end:
                return False
            end = stride * (size - 1) + end
    return True
