"""Chooses the layouts of ranks and threads that are worth trying on a machine, and their order. Pure.

A layout uses as many cores as it can, and never more than there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.launch.placement import threads_per_rank
from paceline.launch.tune_answers import Layout

MOST_LAYOUTS = 7


def layouts_of(num_cores: int, most_ranks: int) -> list[Layout]:
    """Layouts to compare, by number of ranks: one rank with all cores, ..., one rank per core.

    Between these two there are only layouts that leave no core idle, if there are any. Of many layouts, those
    that are far apart are kept.

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
    """Layouts with these numbers of ranks, and as many threads each as fit.

    Example:
        1 and 3 ranks on 8 cores: 1 x 8, 3 x 2
    """
    return [Layout(n, threads_per_rank(num_cores, n)) for n in ranks]


def in_order_of_start(layouts: Sequence[Layout]) -> list[Layout]:
    """Sort layouts so that the two ends come first, and then the middle of each gap.

    So the most is known when time runs out.

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
    """Remove numbers with near neighbours until `MOST_LAYOUTS` are left; both ends stay."""
    ranks = list(ranks)
    while len(ranks) > MOST_LAYOUTS:
        nearest = min(range(1, len(ranks) - 1), key=lambda at: ranks[at + 1] / ranks[at - 1])
        del ranks[nearest]
    return ranks
