"""Moves parameters into memory that the ranks of a host share, if they can be moved.

A parameter stays the same object, so an optimizer that was made before, a tied layer or a hook keeps working.
A model that can't be shared is refused on all ranks before anything is moved.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paceline import _core
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import ConfigError, format_ranks
from paceline.reducer.framework_ops import FrameworkOps, Tensor, nbytes, numel
from paceline.reducer.peers import Ranks
from paceline.reducer.replica_hashes import Entry, check_replicas
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.model_memory import share_model_memory
from paceline.rendezvous.shared_memory import HostMemory
from paceline.sharding.collective_writes import OneCopy, lay_out
from paceline.sharding.shared_parameters import SharedStorage, refuse_step, storage_of, storages_of

_watched: list[object] = []
"""The frameworks whose optimizer steps are checked by `refuse_step`."""


def move(
    owner: str,
    tensors: Mapping[str, Tensor],
    peers: Ranks,
    memory: HostMemory,
    ops: FrameworkOps[Tensor],
    is_in_backward: Callable[[], bool],
    *,
    are_equal: bool,
    allows_writing: bool,
) -> SharedStorage[Tensor]:
    """Move these tensors into one copy for each host. Collective.

    Raises:
        RegionError: There is not enough memory; on every rank.
        ReplicasDifferError: The ranks have different values.
    """
    if ops not in _watched:
        _watched.append(ops)
        ops.watch_steps(refuse_step)  # cannot be undone
    is_one_host = len(memory.hosts) == 1
    exchange: Exchange = WholeExchange(memory.host_group) if is_one_host else peers.exchange
    timeout_s = peers.timeout_s
    if not are_equal:
        whole = [tensor.detach().contiguous() for tensor in tensors.values()]
        hashes = _core.hash_all([each.data_ptr() for each in whole], [nbytes(each) for each in whole])
        check_replicas(
            [Entry("parameter", name, value) for name, value in zip(tensors, hashes)],
            lambda payload: exchange.all_gather(payload, timeout_s),
            where=f"{owner}, of parameters that are to be one copy",
        )
    places, size = lay_out({name: ops.extent(tensor) for name, tensor in tensors.items()})
    own = next(ranks for ranks in memory.hosts if exchange.rank in ranks)
    # The step table gets pages of its own, because writing() copies and compares the parameters' pages.
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    step_table = _core.StepTable.nbytes(len(own))
    shared = share_model_memory(exchange, own, size + step_table, timeout_s=timeout_s)
    copy = OneCopy(shared, places, size, exchange, memory.hosts, timeout_s)
    storage = SharedStorage(copy, memory.host_group, ops, is_in_backward, allows_writing=allows_writing)
    if exchange.rank == own[0]:
        for tensor, place in zip(tensors.values(), places):
            storage.fill(tensor, place)
    exchange.all_gather(b"", timeout_s)  # a barrier: rank 0's values are in place
    for tensor, place in zip(tensors.values(), places):
        storage.move_in(tensor, place)
    return storage


def move_out(model: Any) -> None:
    for storage in storages_of([*model.parameters(), *model.buffers()]):
        storage.move_out()


def share_to_read(
    owner: str,
    model: Any,
    tensors: Mapping[str, Tensor],
    peers: Any,
    ops: FrameworkOps[Tensor],
) -> None:
    """Replace the model's tensors on all ranks of a host by one copy, which has rank 0's values. Collective.

    Raises:
        ConfigError: The ranks are on several hosts, or a tensor can't be shared.
        RegionError: There is not enough memory; on every rank.
    """
    refuse_unshareable(owner, model, tensors, peers, ops)
    memory: HostMemory = peers.share_hosts()
    if len(memory.hosts) > 1:
        raise ConfigError(
            f"{owner}: the ranks are on several hosts, and share no memory.",
            seen="; ".join(format_ranks(ranks) for ranks in memory.hosts),
            hint="pass a group of the ranks of one host, on each host",
        )
    move_out(model)
    move(owner, tensors, peers, memory, ops, lambda: False, are_equal=True, allows_writing=False)


def refuse_unshareable(
    owner: str, model: Any, tensors: Mapping[str, Tensor], peers: Ranks, ops: FrameworkOps[Tensor]
) -> None:
    """Raise on every rank if any rank has a tensor that can't be shared. Collective."""
    problem = next(_problems(model, tensors, ops), "")
    reported = [
        each["problem"] for each in gather_objects(peers.exchange, {"problem": problem}, peers.timeout_s)
    ]
    found = next((text for text in reported if text), "")
    if found:
        what, _, hint = found.partition("\n")
        raise ConfigError(
            f"{owner}: this model's parameters can't be shared by the ranks of a host.",
            seen=f"rank {reported.index(found)}: {what}",
            hint=hint,
        )


def _problems(model: Any, tensors: Mapping[str, Tensor], ops: FrameworkOps[Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if problem := ops.why_not_shared(name, tensor):
            yield problem
        elif (storage := storage_of(tensor)) is not None and storage.is_writing:
            yield f"'{name}' is being written to\nleave `writing()` first"
    yield from overlapping((t.data_ptr(), name, ops.extent(t)) for name, t in tensors.items() if numel(t))
    shared = {id(tensor) for tensor in tensors.values()}
    for embedding, weight in ops.rescaled(model):
        if id(weight) in shared:
            yield (
                f"the embedding {embedding}: forward changes its weight\n"
                "leave max_norm out, and scale the weight within writing()"
            )


def overlapping(ranges: Iterable[tuple[int, str, int]]) -> Iterable[str]:
    """Describe parameters that overlap in memory."""
    previous, end = "", 0
    for begin, name, size in sorted(ranges):
        if begin < end:
            yield (
                f"'{previous}' and '{name}' are different parameters in the same memory\n"
                "use one parameter object in both places (tied weights), or clone() one of them"
            )
        previous, end = name, begin + size
