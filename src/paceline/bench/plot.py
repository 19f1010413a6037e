"""Pictures of a report, drawn with matplotlib from the same values that its JSON holds."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from paceline.bench import all_reduce, step
from paceline.bench.report import Report
from paceline.bench.units import format_size, format_time

# Ours in one hue from dark to light, theirs in others; told apart without colour by the markers.
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
    for entry in all_reduce.ENTRIES:
        rows = [row for row in report.data["rows"] if row["contender"] == entry.key]
        if not rows:
            continue
        color, marker = _STYLES[entry.key]
        sizes = [row["bytes"] for row in rows]
        axes.plot(sizes, [row["median_s"] for row in rows], marker=marker, color=color, label=entry.label)
        quartiles = [_quartiles(row["samples_s"]) for row in rows]
        lows, highs = zip(*quartiles, strict=True)
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
    """One panel per model: what each way adds to a step, with its 95 % interval."""
    models = list(dict.fromkeys(row["model"] for row in report.data["rows"]))
    figure, panels = _figure(max(6.0, 2.6 * len(models) + 1), 4.6, len(models))
    labels = {entry.key: entry.label for entry in step.ENTRIES[report.data["framework"]]}
    for model, axes in zip(models, panels if len(models) > 1 else [panels], strict=True):
        of_model = [row for row in report.data["rows"] if row["model"] == model]
        rows = [row for row in of_model if "overhead_s" in row]
        for at, row in enumerate(rows):
            median, low, high = (row["overhead_s"][name] * 1e3 for name in ("median", "low", "high"))
            color, _ = _STYLES[row["way"]]
            axes.bar(at, median, color=color, label=labels[row["way"]])
            axes.errorbar(at, median, [[median - low], [high - median]], color="black", capsize=4)
            axes.annotate(f"{median:.3g}", (at, max(high, 0)), ha="center", va="bottom")
        alone = [row["median_s"] for row in of_model if row["way"] == "alone"]
        axes.set(title=f"{model}\nalone: {alone[0] * 1e3:.3g} ms" if alone else model, xticks=[])
        axes.axhline(0, color="black", linewidth=0.8)
        axes.margins(y=0.15)
    figure.supylabel("overhead of a step, ms")
    first = panels[0] if len(models) > 1 else panels
    figure.legend(*first.get_legend_handles_labels(), **_BELOW, ncols=4 if len(models) > 3 else 2)
    figure.suptitle(report.title)
    _save(figure, report, path, bottom=0.14 if len(models) > 3 else 0.2)


def draw_predict(report: Report, path: Path) -> None:
    """One panel per rate, all of one scale: an average's time by the number of hosts, both logarithmic."""
    rates = list(dict.fromkeys(row["gbits_per_s"] for row in report.data["rows"]))
    figure, panels = _figure(max(6.0, 3.4 * len(rates)), 4.2, len(rates))
    for rate, axes in zip(rates, panels if len(rates) > 1 else [panels], strict=True):
        rows = [row for row in report.data["rows"] if row["gbits_per_s"] == rate]
        hosts = [row["hosts"] for row in rows]
        for name, label, style, color in (
            ("torch", "torch DDP on Gloo", "torch", "#cc4125"),
            ("paceline", "Paceline", "paceline", "#0b5394"),
            ("int8", "Paceline, int8 between hosts", "paceline_torch", "#6fa8dc"),
        ):
            seconds = [row["seconds"][name] for row in rows]
            axes.plot(hosts, seconds, marker=_STYLES[style][1], color=color, label=label)
        axes.set(xscale="log", yscale="log", title=f"{rate:g} Gbit/s", xlabel="hosts")
        axes.set_xticks(hosts, [str(number) for number in hosts], minor=False)
        axes.grid(alpha=0.3)
    times = [row["seconds"][name] for row in report.data["rows"] for name in ("torch", "paceline", "int8")]
    ticks = _round_times(min(times), max(times))
    for axes in panels if len(rates) > 1 else [panels]:
        axes.set_ylim(min(*times, *ticks) / 1.3, max(*times, *ticks) * 1.3)
        axes.set_yticks(ticks, [format_time(tick) for tick in ticks])
        axes.minorticks_off()
    first = panels[0] if len(rates) > 1 else panels
    first.set(ylabel="time of one average")
    figure.legend(*first.get_legend_handles_labels(), **_BELOW, ncols=3)
    figure.suptitle(report.title)
    _save(figure, report, path, bottom=0.12)


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, panels, figsize=(width, height))


def _save(figure: Any, report: Report, path: Path, bottom: float) -> None:
    machine = report.machine.describe() if report.machine else "computed, not measured"
    figure.text(0.01, 0.01, machine, fontsize=6, color="gray", va="bottom")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=150)


def _round_times(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten; for a short one also twice and five times these."""
    factors = (1,) if high > 100 * low else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def _quartiles(samples: list[list[float]]) -> tuple[float, float]:
    """The quartiles of the rank with the slowest median: the rank that the line shows."""
    slowest = max(samples, key=statistics.median)
    if len(slowest) < 2:
        return slowest[0], slowest[0]
    low, _, high = statistics.quantiles(slowest, n=4)
    return low, high
