"""Decides which layout is measured next, when to stop, and which layout is fastest. Pure.

Layouts are compared round by round. The turns of one round run within moments of each other, so other load on
the machine slows all of them. Two layouts are compared by the ratio of their rates: its median over rounds,
and the 95 % interval of the median. A layout is called slower only if the whole interval is below 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.launch.tune_answers import Layout
from paceline.tune.rates import LEAST_STEPS, Turn, counts_elements

LEAST_ROUNDS = 5
"""Fewer rounds prove nothing: all of five rounds agree by chance in 1 of 16 cases."""
_ROUNDS_BEFORE_AN_END = 7
_SAME = 0.02  # a layout that certainly differs from the fastest by less needs no further rounds
_OUT = 0.85  # a layout that certainly reaches less than this of the fastest gets no further turns
_AS_GOOD = 0.97  # of the layouts that reach this part of the fastest, the fewest ranks are recommended

_SHORTEST_TURN_S, _LONGEST_TURN_S = 0.4, 2.0
_STEPS_OF_A_TURN = 10
_LEAST_STEPS_OF_A_TURN = LEAST_STEPS + 2  # a turn begins and ends in the middle of a step
_PLANNED_ROUNDS = 15
_ROUNDS_TO_AFFORD = 3


@dataclass(frozen=True)
class Interval:
    """A median and the 95 % confidence interval around it."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The median with its 95 % confidence interval from order statistics, for noise of any distribution."""
    ordered = sorted(values)
    count = len(ordered)
    # Binomial(count, 1/2) in its normal approximation: the median lies between these two ordered values.
    margin = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - margin))
    high = min(count - 1, math.ceil(count / 2 + margin))
    return Interval(statistics.median(ordered), ordered[low], ordered[high])


@dataclass
class Standing:
    """What is known of one layout so far.

    Attributes:
        layout: The layout.
        turns: What its job did in each round; None: too few steps.
        is_running: Whether it can get further turns.
        step_s: Seconds of a step, measured before the first turn.
        out: Why it was not started, or ended, for the user; "" if there is nothing to report.
        whole: What its job did in all, if it ended before its first turn.
    """

    layout: Layout
    turns: list[Turn | None] = field(default_factory=list)
    is_running: bool = False
    step_s: float = 0.0
    out: str = ""
    whole: Turn | None = None

    @property
    def known(self) -> list[Turn | None]:
        """Its turns; if there is no usable one, the whole job as a single turn."""
        if any(self.turns) or self.whole is None:
            return self.turns
        return [self.whole]


@dataclass(frozen=True)
class Result:
    """One layout's outcome.

    Attributes:
        layout: The layout.
        rate: Samples per second over all ranks: the median over rounds, with its interval.
        rounds: Number of rounds in which it was measured.
        of_best: Its rate divided by that of the fastest layout, round by round.
        of_one: Its rate divided by that of one rank, round by round; None: one rank was not measured.
        is_slower: Whether it is certainly slower than the fastest.
        samples_per_step: Samples of a step, over all ranks.
        note: As `Standing.out`.
    """

    layout: Layout
    rate: Interval
    rounds: int
    of_best: Interval
    of_one: Interval | None
    is_slower: bool
    samples_per_step: float
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison.

    Attributes:
        results: The layouts that were measured, by number of ranks.
        fastest: The layout with the highest rate.
        recommended: The layout to use: the one with the fewest ranks of those that are not certainly slower
            than the fastest, and reach 97 % of it.
        unit: "samples", or "elements" if the first dimension of a batch does not show its size.
    """

    results: tuple[Result, ...]
    fastest: Layout
    recommended: Layout
    unit: str

    @property
    def unsure(self) -> tuple[Result, ...]:
        """Layouts that were measured too rarely to be sure of; none if only one layout was measured."""
        few = tuple(each for each in self.results if each.rounds < LEAST_ROUNDS)
        return few if len(self.results) > 1 else ()

    def result(self, layout: Layout) -> Result | None:
        """The result of a layout; None: it was not measured."""
        return next((each for each in self.results if each.layout == layout), None)


def judge(standings: Sequence[Standing]) -> Verdict | None:
    """Compare all layouts that were measured; None if none was."""
    measured = sorted((each for each in standings if any(each.known)), key=lambda each: each.layout)
    if not measured:
        return None
    unit, rates = _rates(measured)
    values = {layout: [rate for rate in each if rate] for layout, each in rates.items()}
    fastest = max(values, key=lambda layout: statistics.median(values[layout]))
    one = next((layout for layout in rates if layout.ranks == 1), None)
    results = []
    for each in measured:
        layout = each.layout
        of_best = _compared(rates[layout], rates[fastest])
        samples = [turn.samples_per_step for turn in each.known if turn]
        results.append(
            Result(
                layout=layout,
                rate=interval(values[layout]),
                rounds=len(values[layout]),
                of_best=of_best,
                of_one=None if one is None else _compared(rates[layout], rates[one]),
                is_slower=_rounds_of_both(rates[layout], rates[fastest]) >= LEAST_ROUNDS and of_best.high < 1,
                samples_per_step=statistics.median(samples),
                note=each.out,
            )
        )
    good = [each for each in results if not each.is_slower and each.of_best.median >= _AS_GOOD]
    recommended = min((each.layout for each in good), default=fastest)
    return Verdict(tuple(results), fastest, recommended, unit)


def next_turn(standings: Sequence[Standing]) -> Standing | None:
    """The layout to measure next: one with the fewest turns. Every other round is in reverse order."""
    running = [each for each in standings if each.is_running]
    if not running:
        return None
    round_number = min(len(each.turns) for each in running)
    due = [each for each in running if len(each.turns) == round_number]
    return due[-1] if round_number % 2 else due[0]


def turn_seconds(standing: Standing, num_running: int, left_s: float) -> float | None:
    """Length of the next turn in seconds; None: the time left is too short for a useful turn.

    Args:
        standing: The layout whose turn it is.
        num_running: How many layouts take turns.
        left_s: Seconds until everything must be over.
    """
    least_s = max(_SHORTEST_TURN_S, _LEAST_STEPS_OF_A_TURN * standing.step_s)
    enough_s = max(least_s, _STEPS_OF_A_TURN * standing.step_s)
    share_s = left_s / (num_running * _PLANNED_ROUNDS)
    seconds = min(max(share_s, enough_s), max(_LONGEST_TURN_S, enough_s))
    if seconds * num_running * _ROUNDS_TO_AFFORD > left_s:  # slow steps: prefer more rounds to longer turns
        seconds = least_s
    return seconds if seconds <= left_s else None


def has_time_for_another(standings: Sequence[Standing], start_s: float, left_s: float) -> bool:
    """Whether one more layout can be started, with enough time left to measure all of them a few times.

    Args:
        standings: The layouts that were started so far.
        start_s: Seconds of the longest start so far.
        left_s: Seconds until everything must be over.
    """
    if sum(any(each.known) or each.is_running for each in standings) < 2:
        return True  # one layout alone is no comparison
    return 1.3 * start_s + _least_seconds_of_all(standings) <= left_s


def start_seconds(standings: Sequence[Standing], left_s: float, *, is_last: bool) -> float:
    """How long a layout may take to reach its first steps, so that time is left for the others."""
    return max(0.5 * left_s, left_s - _least_seconds_of_all(standings) if is_last else 0.0)


def _least_seconds_of_all(standings: Sequence[Standing]) -> float:
    """How long the fewest useful rounds take, for the layouts that run and one more."""
    running = [each for each in standings if each.is_running]
    turns_s = [max(_SHORTEST_TURN_S, _LEAST_STEPS_OF_A_TURN * each.step_s) for each in running]
    return _ROUNDS_TO_AFFORD * max(turns_s, default=_SHORTEST_TURN_S) * (len(running) + 1)


def is_out(standing: Standing, standings: Sequence[Standing]) -> bool:
    """Whether a layout is certainly so much slower than the fastest that it gets no further turns."""
    verdict = judge(standings)
    result = None if verdict is None else verdict.result(standing.layout)
    return result is not None and result.is_slower and result.of_best.high < _OUT


def is_decided(standings: Sequence[Standing]) -> bool:
    """Whether further rounds would not change the answer."""
    running = [each for each in standings if each.is_running]
    verdict = judge(standings)
    if verdict is None or not running:
        return not running
    least = min(len(each.turns) for each in running)
    if least != max(len(each.turns) for each in running) or least < _ROUNDS_BEFORE_AN_END:
        return False
    return all(
        result.layout == verdict.fastest
        or result.is_slower
        or (result.of_best.low > 1 - _SAME and result.of_best.high < 1 + _SAME)
        for each in running
        if (result := verdict.result(each.layout)) is not None
    )


def _rates(measured: Sequence[Standing]) -> tuple[str, Mapping[Layout, list[float | None]]]:
    """The unit that is counted, and for each layout its rate in each round."""
    first = [(each.layout.ranks, next(turn for turn in each.known if turn)) for each in measured]
    unit = "elements" if counts_elements(first) else "samples"
    rates = {each.layout: [_rate(turn, unit) for turn in each.known] for each in measured}
    return unit, rates


def _rate(turn: Turn | None, unit: str) -> float | None:
    if turn is None:
        return None
    return turn.elements_per_s if unit == "elements" else turn.samples_per_s


def _compared(some: Sequence[float | None], others: Sequence[float | None]) -> Interval:
    """The ratio of two layouts' rates, round by round; if no round has both, the ratio of their medians."""
    ratios = [a / b for a, b in zip(some, others) if a and b]
    if ratios:
        return interval(ratios)
    ratio = statistics.median(filter(None, some)) / statistics.median(filter(None, others))
    return Interval(ratio, 0.0, float("inf"))


def _rounds_of_both(some: Sequence[float | None], others: Sequence[float | None]) -> int:
    return sum(1 for a, b in zip(some, others) if a and b)
