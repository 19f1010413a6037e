"""The picture: a bar for each layout with its interval, drawn with matplotlib from what the table holds.

Imports bench (its machine) and its neighbours.
"""

from __future__ import annotations

from pathlib import Path

from paceline.bench.machine import Machine
from paceline.tune.answer import number
from paceline.tune.contest import Verdict


def draw(verdict: Verdict, title: str, machine: Machine, path: Path) -> None:
    """Write the picture.

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
    figure.text(0.01, 0.01, machine.describe(), fontsize=6, color="gray", va="bottom")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
