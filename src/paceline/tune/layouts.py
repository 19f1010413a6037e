"""Which layouts of ranks and threads are worth trying on a machine, and in which order. Pure.

All cores are used, and no more than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.launch.placement import threads_per_rank
from paceline.launch.tuned import Layout

MOST_LAYOUTS = 7


def layouts_of(num_cores: int, most_ranks: int) -> list[Layout]:
    """Layouts to compare, by number of ranks: one rank with all cores, ..., one rank per core.

    Only layouts that leave no core idle, where there are such between the two ends; and when there are many,
    those that are far apart.

    Example:
        8 cores: 1 x 8, 2 x 4, 4 x 2, 8 x 1
        7 cores: 1 x 7, 2 x 3, 3 x 2, 7 x 1
    """
    most = min(num_cores, most_ranks)
    ranks = [n for n in range(1, most + 1) if num_cores % n == 0]
    if len(ranks) <= 2 < num_cores:  # a prime number: one core is left idle between the ends
        ranks += [n for n in range(2, most) if (num_cores - 1) % n == 0 and n < num_cores - 1]
    return with_ranks(_thinned(sorted({*ranks, most})), num_cores)


def with_ranks(ranks: Iterable[int], num_cores: int) -> list[Layout]:
    """Layouts of so many ranks, each with as many threads as fit.

    Example:
        1 and 3 ranks on 8 cores: 1 x 8, 3 x 2
    """
    return [Layout(n, threads_per_rank(num_cores, n)) for n in ranks]


def in_order_of_start(layouts: Sequence[Layout]) -> list[Layout]:
    """The two ends first, then what lies in between: where time runs out, the most is known by then.

    Example:
        1, 2, 4, 8 and 16 ranks: 1, 16, 4, 2, 8
    """
    ordered = sorted(layouts)
    if len(ordered) <= 2:
        return ordered
    found = [ordered[0], ordered[-1]]
    gaps = [(0, len(ordered) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle not in (low, high):
            found.append(ordered[middle])
            gaps += [(low, middle), (middle, high)]
    return found


def _thinned(ranks: list[int]) -> list[int]:
    """At most so many, both ends among them: who has the nearest neighbours goes first."""
    ranks = list(ranks)
    while len(ranks) > MOST_LAYOUTS:
        nearest = min(range(1, len(ranks) - 1), key=lambda at: ranks[at + 1] / ranks[at - 1])
        del ranks[nearest]
    return ranks
