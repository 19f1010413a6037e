"""Which virtual ranks a process runs, so that training is the same on any number of processes."""

from __future__ import annotations

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.reducer.sum_order import cut_tree


def played_by(owner: str, virtual_ranks: int, rank: int, world_size: int) -> range:
    """The virtual ranks that a process runs, in this order.

    Each process has a whole subtree of the tree in which gradients are added. So it has a single sum, and the
    sum over the processes is the rest of that tree.

    Raises:
        ConfigError: There are too many processes, or the tree cannot be cut into this number of subtrees.
    """
    hint = "virtual_ranks=8 runs on 1 to 8 processes, and equally fast on each of 1, 2, 4, 8"
    virtual_ranks = Arguments(owner).whole("virtual_ranks", virtual_ranks, least=1, hint=hint)
    cut = cut_tree(virtual_ranks, world_size)
    if cut is None:
        fitting = [count for count in range(1, virtual_ranks + 1) if cut_tree(virtual_ranks, count)]
        raise ConfigError(
            f"{owner}: {virtual_ranks} virtual ranks can't be played by {world_size} processes.",
            where=f"rank {rank} of {world_size}",
            expected=f"one of these numbers of processes: {', '.join(map(str, fitting))}",
            hint="a power of two in virtual_ranks takes any number of processes up to itself",
        )
    return cut[rank]
