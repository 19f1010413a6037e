"""Arithmetic of the benchmarks: how often to repeat a call, and statistics of the samples.

A sample is the time of one call (or step) on one rank in one round: `samples[rank][round]`, in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from paceline.tune.compare import Interval, interval
from paceline.units import format_ratio, format_time

__all__ = [
    "Interval",
    "Samples",
    "interval",
    "iterations_for",
    "overhead",
    "overhead_cells",
    "ratio",
    "slowest_by_round",
    "slowest_median",
]

Samples = Sequence[Sequence[float]]


def iterations_for(seconds_per_call: float, sample_s: float, at_most: int) -> int:
    """Return how many calls make a sample of about `sample_s` seconds, at least 1.

    Example:
        >>> iterations_for(0.001, 0.02, 10_000)
        20
    """
    return max(1, min(at_most, math.ceil(round(sample_s / max(seconds_per_call, 1e-9), 6))))


def slowest_median(samples: Samples) -> float:
    """Return the median over rounds of the slowest rank, for which all others wait."""
    return max(statistics.median(rounds) for rounds in samples)


def slowest_by_round(samples: Samples) -> list[float]:
    """Return the slowest rank's time in each round."""
    return [max(ranks) for ranks in zip(*samples, strict=True)]


def overhead(with_it: Samples, alone: Samples) -> Interval:
    """Return the time that synchronising adds to a step: the median over rounds of (with it - alone).

    The two are subtracted round by round before the median is taken, because they ran within the same
    second: the effect of another program that slows the machine for a minute cancels out.

    Example:
        Two ranks, three rounds; alone takes 1.0, 2.0, 1.0 and with synchronisation 1.5, 2.5, 1.7: 0.5.
    """
    return interval([a - b for a, b in zip(slowest_by_round(with_it), slowest_by_round(alone), strict=True)])


def ratio(of: Samples, to: Samples, starts: int = 1) -> Interval:
    """Return the ratio of two times: divided round by round, then the median over rounds.

    Args:
        of: The samples of the numerator.
        to: The samples of the denominator.
        starts: How many times the processes were started, with the same number of rounds each. With more than
            one, the result is the median of the starts' medians, and the interval reaches from the smallest
            to the largest of them: the rounds of one start do not predict the next start.

    Example:
        Two ranks, three rounds; 1.1, 2.2, 1.0 to 1.0, 2.0, 1.0: 1.1.
    """
    ratios = [a / b for a, b in zip(slowest_by_round(of), slowest_by_round(to), strict=True)]
    if starts == 1:
        return interval(ratios)
    each = len(ratios) // starts
    medians = [statistics.median(ratios[start * each :][:each]) for start in range(starts)]
    return Interval(statistics.median(medians), min(medians), max(medians))


def overhead_cells(key: str, ours: Interval | None, theirs: Interval | None) -> list[str]:
    """Return the overhead, its interval, and their overhead over ours, no larger than the samples support.

    Args:
        key: The case; only cases of Paceline get a ratio.
        ours: Its overhead; None: unknown.
        theirs: The overhead of the library that it is compared with.
    """
    if ours is None:
        return ["-", "-", "-"]
    cells = [format_time(ours.median), f"{format_time(ours.low)} .. {format_time(ours.high)}"]
    if theirs is None or theirs.low <= 0 or not key.startswith(("paceline", "before_")):
        return [*cells, "-"]
    if ours.low > 0:
        return [*cells, format_ratio(theirs.median / ours.median)]
    # Our overhead is not distinguishable from zero: only a lower bound of the ratio is known.
    return [*cells, f"> {format_ratio(theirs.median / ours.high)}" if ours.high > 0 else "no overhead"]
