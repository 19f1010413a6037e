"""Parameters move into memory that the ranks of a host share: whether they can, and how.

The one idea: a parameter stays the same object, so whoever holds it (an optimizer that was made before, a
tied layer, a hook) goes on with it. What can't move is refused on all ranks, before anything has moved.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping

from paceline import _core
from paceline.collectives.whole_exchange import WholeExchange
from paceline.errors import ConfigError
from paceline.reducer.peers import Ranks
from paceline.reducer.replica_check import Entry, check_replicas
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.messages import gather_objects
from paceline.rendezvous.model_memory import share_model_memory
from paceline.rendezvous.shared_memory import HostMemory
from paceline.sharding.announced_writes import OneCopy, lay_out
from paceline.sharding.shared_parameters import Placing, SharedStorage, Tensor


def move(
    owner: str,
    tensors: Mapping[str, Tensor],
    peers: Ranks,
    memory: HostMemory,
    placing: Placing[Tensor],
    *,
    are_equal: bool,
    allows_writing: bool,
) -> SharedStorage[Tensor]:
    """Let the ranks of each host have one copy of these tensors. Collective.

    Args:
        owner: Who asks for it, for errors.
        tensors: By name; alike on all ranks. `refuse_strange` has looked at them.
        peers: The ranks.
        memory: Theirs, on this host.
        placing: What the framework's tensors can do.
        are_equal: Whether all ranks are known to have the same values. False: they are compared.
        allows_writing: Whether the model is to be trained.

    Raises:
        RegionError: There is not enough memory; on every rank.
        ReplicasDifferError: The ranks have different values.
    """
    is_one_host = len(memory.hosts) == 1
    exchange: Exchange = WholeExchange(memory.host_group) if is_one_host else peers.exchange
    timeout_s = peers.timeout_s
    if not are_equal:
        hashes = placing.hashes(list(tensors.values()))
        check_replicas(
            [Entry("parameter", name, value) for name, value in zip(tensors, hashes)],
            lambda payload: exchange.all_gather(payload, timeout_s),
            where=f"{owner}, of parameters that are to be one copy",
        )
    places, nbytes = lay_out({name: placing.extent(tensor) for name, tensor in tensors.items()})
    own = next(ranks for ranks in memory.hosts if exchange.rank in ranks)
    # On pages of its own: writing() copies and compares those of the parameters.
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    step_table = _core.StepTable.nbytes(len(own))
    shared = share_model_memory(exchange, own, nbytes + step_table, timeout_s=timeout_s)
    copy = OneCopy(shared, places, nbytes, exchange, memory.hosts, timeout_s)
    storage = SharedStorage(copy, memory.host_group, placing, allows_writing=allows_writing)
    if exchange.rank == own[0]:
        for tensor, place in zip(tensors.values(), places):
            storage.fill(tensor, place)
    exchange.all_gather(b"", timeout_s)  # the values are there
    for tensor, place in zip(tensors.values(), places):
        storage.move_in(tensor, place)
    return storage


def refuse_strange(owner: str, problems: Iterable[str], peers: Ranks) -> None:
    """Refuse tensors that can't be shared. Collective.

    Args:
        owner: Who is to share them, for errors.
        problems: Why this rank's can't be, each with what to do in a second line.
        peers: The ranks.

    Raises:
        ConfigError: A rank has one; on every rank.
    """
    problem = next(iter(problems), "")
    told = [each["problem"] for each in gather_objects(peers.exchange, {"problem": problem}, peers.timeout_s)]
    found = next((text for text in told if text), "")
    if found:
        what, _, hint = found.partition("\n")
        raise ConfigError(
            f"{owner}: this model's parameters can't be shared by the ranks of a host.",
            seen=f"rank {told.index(found)}: {what}",
            hint=hint,
        )


def overlapping(ranges: Iterable[tuple[int, str, int]]) -> Iterable[str]:
    """Problems of different parameters that lie in the same memory.

    Args:
        ranges: Address, name and bytes of each.

    Example:
        >>> [text.partition("\\n")[0] for text in overlapping([(0, "a", 8), (4, "b", 8)])]
        ["'a' and 'b' are different parameters in the same memory"]
    """
    previous, end = "", 0
    for begin, name, nbytes in sorted(ranges):
        if begin < end:
            yield (
                f"'{previous}' and '{name}' are different parameters in the same memory\n"
                "use one parameter object in both places (tied weights), or clone() one of them"
            )
        previous, end = name, begin + nbytes
