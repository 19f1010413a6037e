"""Presents the answer as a table with bars, sentences, and a picture. Pure, except for `show` and `draw`.

A sentence claims no more than the intervals show. If rich is installed, it draws the table.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.launch.tune_answers import Layout, counted
from paceline.tune.compare import LEAST_ROUNDS, Interval, Result, Standing, Verdict

HEADINGS = ("ranks", "threads", "{unit}/s", "of one rank", "from - to", "per step", "rounds", "")
_SPARED = (5, 6, 4, 7)  # columns that are left out, in this order, if there is no room for all of them
_FOLDED = 3  # the column whose cells may take two lines, on the narrowest terminals
_WIDTH_OF_FILES = 100
_BAR, _SHORTEST_BAR = 24, 8
_BUSY = 0.5  # the machine is busy if its load is more than this part of its cores


def rows(verdict: Verdict, standings: Sequence[Standing]) -> list[list[str]]:
    """The rows of the table: one for each layout, measured or not. The last cell is the bar."""
    most = max(each.rate.median for each in verdict.results)
    found = []
    for standing in sorted(standings, key=lambda each: each.layout):
        layout, result = standing.layout, verdict.result(standing.layout)
        cells = [str(layout.ranks), str(layout.threads)]
        if result is None:
            found.append([*cells, "", "", "", "", "0", ""])
            continue
        rate = result.rate
        found.append(
            [
                *cells,
                number(rate.median),
                times(result.of_one) if result.of_one else "",
                f"{number(rate.low)} - {number(rate.high)}" if result.rounds > 1 else "",
                f"{result.samples_per_step:.0f}",
                str(result.rounds),
                bar(rate.median / most),
            ]
        )
    return found


def sentences(
    verdict: Verdict, standings: Sequence[Standing], num_cores: int, load: float = 0.0
) -> list[str]:
    """Explain the table: which layout to use, how much faster it is, and how certain that is.

    Args:
        verdict: The result of the comparison.
        standings: All layouts, measured or not.
        num_cores: Cores of the machine.
        load: Load average of the machine before the measurement.
    """
    found = [*_not_sure(verdict), _recommendation(verdict), *_doubts(verdict), *_fairness(verdict)]
    if verdict.unit == "elements":
        found.append(
            "Elements of the batches are counted, because their first dimension does not show their size."
        )
    found += [
        f"{each.layout}: {each.out}." for each in sorted(standings, key=lambda each: each.layout) if each.out
    ]
    if busy := busy_before(num_cores, load):
        # Threads of one process synchronise at the end of each operation, and wait for one without a core.
        found.append(
            f"{busy[0].upper()}{busy[1:]}, which slows threads of one process down more than processes "
            "of one thread. Measure again when it is idle."
        )
    if num_cores == 1:
        found.append("This process may use one core only: there is nothing to divide among ranks.")
    return found


def busy_before(num_cores: int, load: float) -> str:
    """A clause that says that the machine was busy before the measurement; "" if it was not.

    Example:
        >>> busy_before(2, 3.5)
        'the machine was busy before the measurement (load 3.5 on 2 cores)'
    """
    if load <= _BUSY * num_cores:
        return ""
    return f"the machine was busy before the measurement (load {load:.1f} on {counted(num_cores, 'core')})"


def _not_sure(verdict: Verdict) -> list[str]:
    """A warning, which comes first, if layouts were measured too rarely."""
    if not verdict.unsure:
        return []
    names = ", ".join(f"{each.layout} ({counted(each.rounds, 'round')})" for each in verdict.unsure)
    return [
        f"Not sure: too few measurements of {names}; {LEAST_ROUNDS} rounds are the least. --seconds gives it "
        "longer. What follows may be wrong."
    ]


def _recommendation(verdict: Verdict) -> str:
    best, fastest = verdict.recommended, verdict.result(verdict.fastest)
    result = verdict.result(best)
    assert result is not None and fastest is not None
    others = [each for each in verdict.results if each.layout != best]
    if not others:
        return f"Only {best} could be measured: there is nothing to compare it with."
    if best.ranks == 1:
        return _one_is_best(best, verdict, others)
    gain = f"{times(result.of_one)} of one rank" if result.of_one is not None else "one rank was not measured"
    if best == verdict.fastest:
        is_certain = not any(each.layout.ranks == 1 for each in _as_fast(verdict))
        return f"{best} is fastest: {gain}{'' if is_certain else ', by the median'}."
    return (
        f"{best} is as fast as any: {gain}. No difference that can be told from {verdict.fastest} "
        f"({times(result.of_best)} of it), and fewer ranks are simpler."
    )


def _one_is_best(best: Layout, verdict: Verdict, others: Sequence[Result]) -> str:
    if (equal := _equal_of(verdict)) is not None:
        assert equal.of_one is not None
        return (
            f"One process with {counted(best.threads, 'thread')} is as good as any: {equal.layout} "
            f"reaches {times(equal.of_one)} of it, no difference that can be told. More ranks gain nothing."
        )
    nearest = max(others, key=lambda each: each.of_best.median)
    return (
        f"One process is fastest: {nearest.layout}, the next best, reaches {times(nearest.of_best)} of it. "
        "More ranks make this script slower on this machine."
    )


def _doubts(verdict: Verdict) -> list[str]:
    """Names the layouts that may be as fast as the fastest, except those that the recommendation names."""
    equal = _equal_of(verdict) if verdict.recommended.ranks == 1 else None
    close = [each for each in _as_fast(verdict) if each is not equal]
    if not close or any(each.rounds < LEAST_ROUNDS for each in close):
        return []
    names = ", ".join(f"{each.layout} ({times(each.of_best)})" for each in close)
    return [f"No difference that can be told from the fastest: {names}."]


def _as_fast(verdict: Verdict) -> list[Result]:
    """The layouts, besides the fastest and the recommended one, that are not certainly slower."""
    named = (verdict.fastest, verdict.recommended)
    return [each for each in verdict.results if not each.is_slower and each.layout not in named]


def _equal_of(verdict: Verdict) -> Result | None:
    """The best layout that is no different from the recommended one; None: all others are slower."""
    if verdict.recommended != verdict.fastest:
        return verdict.result(verdict.fastest)
    return max(_as_fast(verdict), key=lambda each: each.of_best.median, default=None)


def _fairness(verdict: Verdict) -> list[str]:
    """A warning if steps do not have as many samples in all layouts, so that their work differs."""
    per_step = {each.layout: each.samples_per_step for each in verdict.results}
    if verdict.unit == "elements" or max(per_step.values()) < 1.05 * min(per_step.values()):
        return []
    sizes = ", ".join(
        f"{round(samples)} with {counted(layout.ranks, 'rank')}" for layout, samples in per_step.items()
    )
    return [
        f"A step does not have as many samples in all layouts: {sizes}. With larger steps an epoch has fewer "
        "of them, and the learning rate may have to be another one. To compare at the same global batch, let "
        "the script divide it by the number of ranks, or give the batch as '{256/ranks}'."
    ]


def times(ratio: Interval) -> str:
    """Format a ratio and its interval.

    Example:
        >>> times(Interval(1.634, 1.58, 1.7))
        '1.63x (1.58 to 1.70)'
    """
    if ratio.low == ratio.median == ratio.high:
        return f"{ratio.median:.2f}x"
    if ratio.high == float("inf"):  # no round has both layouts
        return f"about {ratio.median:.2f}x"
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def number(value: float) -> str:
    """Format a number with three significant digits, and all digits before the point.

    Example:
        >>> number(12345.6), number(3.14159)
        ('12,346', '3.14')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def bar(part: float) -> str:
    """A bar that takes this part of the full width."""
    return "█" * max(1, round(_BAR * part))


def show(title: str, unit: str, table: Sequence[Sequence[str]], lines: Sequence[str]) -> None:
    """Print the table, as wide as the terminal (or COLUMNS) allows, and below it the sentences in `lines`.

    The table is drawn with rich, if that is installed.
    """
    headings = [heading.format(unit=unit) for heading in HEADINGS]
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal or "COLUMNS" in os.environ else _WIDTH_OF_FILES
    try:
        from rich.console import Console
    except ImportError:
        print(title)
        shown, bar_width = fitting([headings, *table], width + 2, between=2)
        widths = [max(len(line[at]) for line in [headings, *table]) for at in range(len(headings))]
        for line in [headings, *table]:
            cells = [line[at].rjust(widths[at]) for at in shown if headings[at]]
            if shown[-1] == len(HEADINGS) - 1:
                cells.append(line[-1][: round(len(line[-1]) * bar_width / _BAR)])
            print("  ".join(cells).rstrip())
        print("", *lines, sep="\n")
        return
    _show_rich(Console(width=width), title, headings, table)
    print(*lines, sep="\n")


def fitting(lines: Sequence[Sequence[str]], width: int, *, between: int) -> tuple[list[int], int]:
    """Choose the columns of the table that fit, and the width of the last one, the bar.

    Args:
        lines: The headings and the rows.
        width: Characters in a line of the terminal.
        between: Characters that each column takes besides its cells.
    """
    widths = [between + max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    bar_at = len(HEADINGS) - 1
    widths[bar_at] = between + _SHORTEST_BAR
    shown = list(range(len(HEADINGS)))
    for spared in _SPARED:
        if sum(widths[at] for at in shown) <= width:
            break
        shown.remove(spared)
    left = width - sum(widths[at] for at in shown)
    return shown, min(_BAR, _SHORTEST_BAR + max(0, left))


def _show_rich(console: Any, title: str, headings: Sequence[str], table: Sequence[Sequence[str]]) -> None:
    from rich.bar import Bar
    from rich.table import Table
    from rich.text import Text

    # Each column takes a rule and two blanks besides its cells, and the table one rule more.
    shown, bar_width = fitting([headings, *table], console.width - 1, between=3)
    drawn = Table(title=title, title_justify="left")
    for at in shown:
        if headings[at]:
            drawn.add_column(headings[at], justify="right", no_wrap=at != _FOLDED)
        else:
            drawn.add_column(width=bar_width)
    for row in table:
        # rich scales all bars of the table to the width of their column.
        drawn.add_row(
            *(
                Text(row[at]) if headings[at] or not row[at] else Bar(_BAR, 0, len(row[at]), color="cyan")
                for at in shown
            )
        )
    console.print(drawn)


def draw(verdict: Verdict, title: str, machine: str, path: Path) -> None:
    """Write a picture with a bar for each layout and its interval.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 1.6 + 0.45 * len(verdict.results)))
    for at, result in enumerate(verdict.results):
        rate = result.rate
        color = "#0b5394" if result.layout == verdict.recommended else "#9fc5e8"
        axes.barh(at, rate.median, color=color)
        axes.errorbar(
            rate.median,
            at,
            xerr=[[rate.median - rate.low], [rate.high - rate.median]],
            color="black",
            capsize=4,
        )
        text = number(rate.median)
        if result.of_one is not None and result.layout.ranks > 1:
            text += f"  ({result.of_one.median:.2f}x)"
        axes.annotate(text, (rate.high, at), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(verdict.results)), [str(result.layout) for result in verdict.results])
    axes.invert_yaxis()
    axes.set(xlabel=f"{verdict.unit} per second, median and its 95 % interval", title=title)
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    figure.text(0.01, 0.01, machine, fontsize=6, color="gray", va="bottom")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
