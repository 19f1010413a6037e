"""Pure arithmetic of the bench: how often to repeat, and what to say of the samples.

A sample is the time of one call (or step) on one rank in one round. `samples[rank][round]` in seconds.
Imports only the standard library.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Samples = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % confidence interval around it, in seconds."""

    median: float
    low: float
    high: float


def iterations_for(seconds_per_call: float, sample_s: float, at_most: int) -> int:
    """How many calls make a sample of about `sample_s`, at least 1.

    Example:
        >>> iterations_for(0.001, 0.02, 10_000)
        20
    """
    return max(1, min(at_most, math.ceil(round(sample_s / max(seconds_per_call, 1e-9), 6))))


def slowest_median(samples: Samples) -> float:
    """The median over rounds of each rank, then the slowest rank's: the job is as fast as that one."""
    return max(statistics.median(rounds) for rounds in samples)


def slowest_by_round(samples: Samples) -> list[float]:
    """The slowest rank's time of each round."""
    return [max(ranks) for ranks in zip(*samples, strict=True)]


def overhead(with_it: Samples, alone: Samples) -> Interval:
    """What synchronising adds to a step: the median over rounds of (with it - alone).

    The two are subtracted round by round before the median is taken, because they ran within the same
    second: a neighbour that slows the machine for a minute then cancels out.

    Example:
        Two ranks, three rounds; alone takes 1.0, 2.0, 1.0 and with synchronisation 1.5, 2.5, 1.7: 0.5.
    """
    differences = [a - b for a, b in zip(slowest_by_round(with_it), slowest_by_round(alone), strict=True)]
    return interval(differences)


def ratio(of: Samples, to: Samples, starts: int = 1) -> Interval:
    """How long one takes as a part of the other: the median over rounds, divided round by round.

    Args:
        of: The samples of one.
        to: The number of the other.
        starts: How often the processes were started, with as many rounds each. With more than one, it is
            the median of the starts' medians, and from the smallest to the largest of them: rounds of one
            start say nothing of how the next one will turn out.

    Example:
        Two ranks, three rounds; 1.1, 2.2, 1.0 to 1.0, 2.0, 1.0: 1.1.
    """
    ratios = [a / b for a, b in zip(slowest_by_round(of), slowest_by_round(to), strict=True)]
    if starts == 1:
        return interval(ratios)
    each = len(ratios) // starts
    medians = [statistics.median(ratios[start * each :][:each]) for start in range(starts)]
    return Interval(statistics.median(medians), min(medians), max(medians))


def interval(values: Sequence[float]) -> Interval:
    """The median with its 95 % confidence interval from order statistics: no assumption on the noise."""
    ordered = sorted(values)
    count = len(ordered)
    # Binomial(count, 1/2) in its normal approximation: the median lies between these two ordered values.
    margin = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - margin))
    high = min(count - 1, math.ceil(count / 2 + margin))
    return Interval(statistics.median(ordered), ordered[low], ordered[high])
