"""Pictures of a report, drawn with matplotlib from the values that its JSON holds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from paceline.units import format_size

# Ours in one hue from dark to light, the others in different ones; markers tell them apart without colour.
_STYLES = {
    "paceline_region": ("#0b5394", "o"),
    "paceline_any": ("#3d85c6", "s"),
    "paceline_torch": ("#9fc5e8", "^"),
    "paceline": ("#3d85c6", "s"),
    "paceline_view": ("#0b5394", "o"),
    "gloo": ("#cc4125", "D"),
    "torch": ("#cc4125", "D"),
    "paddle": ("#cc4125", "D"),
    "torch_view": ("#e69138", "P"),
    "openmpi": ("#6aa84f", "v"),
}
# A legend between the axes and the line that names the machine.
_BELOW: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.06), "frameon": False}


def draw_all_reduce(report: Report, path: Path) -> None:
    """Time of a call against its size, both logarithmic; the bands hold half of the samples."""
    figure, axes = _figure(8, 5.5)
    for key, (color, marker) in _STYLES.items():
        rows = [row for row in report.data["rows"] if row["case"] == key]
        if not rows:
            continue
        sizes = [row["bytes"] for row in rows]
        axes.plot(sizes, [row["median_s"] for row in rows], marker=marker, color=color, label=key)
        lows, highs = zip(*(_quartiles(row["samples_s"]) for row in rows), strict=True)
        axes.fill_between(sizes, lows, highs, color=color, alpha=0.2)
    sizes = sorted({row["bytes"] for row in report.data["rows"]})
    axes.set(xscale="log", yscale="log", title=report.title)
    axes.set(xlabel="bytes", ylabel="seconds of one all_reduce")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), **_BELOW, ncols=3)
    _save(figure, report, path, bottom=0.17)


def draw_step(report: Report, path: Path) -> None:
    """One panel per model: what each case adds to a step, with its 95 % interval."""
    models = list(dict.fromkeys(row["model"] for row in report.data["rows"]))
    figure, panels = _figure(max(6.0, 2.6 * len(models) + 1), 4.6, len(models))
    for model, axes in zip(models, panels, strict=True):
        of_model = [row for row in report.data["rows"] if row["model"] == model]
        for at, row in enumerate(row for row in of_model if "overhead_s" in row):
            median, low, high = (row["overhead_s"][name] * 1e3 for name in ("median", "low", "high"))
            color, _ = _STYLES.get(row["case"], ("#999999", ""))
            axes.bar(at, median, color=color, label=row["case"])
            axes.errorbar(at, median, [[median - low], [high - median]], color="black", capsize=4)
            axes.annotate(f"{median:.3g}", (at, max(high, 0)), ha="center", va="bottom")
        alone = [row["median_s"] for row in of_model if row["case"] == "alone"]
        axes.set(title=f"{model}\nalone: {alone[0] * 1e3:.3g} ms" if alone else model, xticks=[])
        axes.axhline(0, color="black", linewidth=0.8)
        axes.margins(y=0.15)
    figure.supylabel("overhead of a step, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), **_BELOW, ncols=4 if len(models) > 3 else 2)
    figure.suptitle(report.title)
    _save(figure, report, path, bottom=0.14 if len(models) > 3 else 0.2)


def _figure(width: float, height: float, panels: int = 0) -> tuple[Any, Any]:
    """A figure, and its axes: a list of them where `panels` is not 0."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, max(1, panels), figsize=(width, height), squeeze=False)
    return figure, list(axes[0]) if panels else axes[0][0]


def _save(figure: Any, report: Report, path: Path, bottom: float) -> None:
    figure.text(0.01, 0.01, report.machine.describe(), fontsize=6, color="gray", va="bottom")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)


def _quartiles(samples: list[list[float]]) -> tuple[float, float]:
    """The quartiles of the rank with the slowest median: the rank that the line shows."""
    slowest = max(samples, key=statistics.median)
    if len(slowest) < 2:
        return slowest[0], slowest[0]
    low, _, high = statistics.quantiles(slowest, n=4)
    return low, high
