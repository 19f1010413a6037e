"""`paceline top`: draws what a job does in a terminal, once a second."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import ConfigError
from paceline.monitor.snapshot import JobSnapshot, RankSnapshot
from paceline.monitor.watch import JobWatch, as_plain, find_running

if TYPE_CHECKING:
    from rich.console import Console, Group

_DESCRIPTION = """\
Show what the ranks of a job do now, once a second, until it ends or you press Ctrl-C. A job is given by its
id, by the process id of its launcher, or by the folder in which it records; without one, the only job that
runs is shown. This does not slow the job down.
"""
_EVERY_S = 1.0
_WIDE, _WIDER = 64, 92  # columns that a terminal must have for more figures
_HOST_WIDTH = 10
_FAR_SILENT_S = 3  # a rank of another host reports its figures once a second
_ROWS_AROUND = 8  # rows of the terminal that do not show ranks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline top", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", help="an id, a process id, or a folder")
    parser.add_argument("--once", action="store_true", help="show it once, as always without a terminal")
    parser.add_argument("--json", action="store_true", help="write it once, as JSON")
    parsed = parser.parse_args(arguments)
    watch = JobWatch(find_running(parsed.job))
    if parsed.json:
        print(json.dumps(as_plain(watch, watch.look()), indent=1))
        return 0
    if importlib.util.find_spec("rich") is None:
        raise ConfigError(
            "`paceline top` draws with rich, which is not installed.",
            hint="pip install rich; or `paceline top --json`",
        )
    from rich.console import Console

    console = Console(highlight=False)
    if parsed.once or not sys.stdout.isatty():
        console.print(frame(watch, watch.look(), console))
        return 0
    try:
        return _follow(watch, console)
    except KeyboardInterrupt:
        return 0


def _follow(watch: JobWatch, console: Console) -> int:
    from rich.live import Live

    signal.signal(signal.SIGTERM, _exit)  # so that `Live` restores the terminal
    signal.signal(signal.SIGHUP, _exit)
    if console.is_dumb_terminal:  # it can't move its cursor: draw one frame below the other
        while not watch.has_ended:
            console.print(frame(watch, watch.look(), console))
            console.print()
            time.sleep(_EVERY_S)
    else:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not watch.has_ended:
                live.update(frame(watch, watch.look(), console), refresh=True)
                time.sleep(_EVERY_S)
    console.print(f"Job {watch.id} has ended.")
    return 0


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def frame(watch: JobWatch, now: JobSnapshot, console: Console) -> Group:
    """The lines about the job, and a table with a row for each rank."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    width = console.width
    name = watch.facts.name if watch.facts is not None else ""
    title = Text(f"{watch.id} {name}".strip(), style="bold", overflow="ellipsis", no_wrap=True)
    if not now.ranks:
        return Group(title, Text("No rank has recorded a backward yet: no model is wrapped so far."))
    lines = [title, *(Text(line) for line in _summary(now))]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    columns = _columns(width, has_hosts=any(each.is_far for each in now.ranks))
    for heading in columns:
        is_name = heading == "host"
        table.add_column(
            heading,
            justify="left" if is_name else "right",
            no_wrap=True,
            max_width=_HOST_WIDTH if is_name and width < _WIDER else None,
        )
    shown = _most_relevant(now, max(4, console.height - _ROWS_AROUND) if console.is_terminal else None)
    for rank in shown:
        cells = _cells(rank)
        style = "red" if not rank.is_alive else "yellow" if rank.rank == now.slow_rank else ""
        table.add_row(*(cells[heading] for heading in columns), style=style)
    more = len(now.ranks) - len(shown)
    reported = [Text(f"{more} more ranks, which wait for longer", style="dim")] if more else []
    return Group(*lines, Text(), table, *reported, *(Text(line, style="red") for line in _troubles(now)))


def _summary(now: JobSnapshot) -> list[str]:
    first = [f"{len(now.ranks)} of {now.world_size} ranks" if len(now.ranks) < now.world_size else ""]
    first += [f"step {now.step}" if now.step is not None else "no step yet"]
    first += [f"{now.steps_per_s:.3g} steps/s"]
    if now.samples_per_s is not None:
        first.append(f"{now.samples_per_s:.4g} samples/s")
    second = [f"{name} {value:.5g}" for name, value in _values(now).items()]
    norm = next((each.norm for each in now.ranks if each.norm is not None), None)
    if norm is not None:
        second.append(f"gradient norm {norm:.4g}")
    found = [", ".join(filter(None, first)), ", ".join(second)]
    if now.slow_rank is not None:
        lost = now.waited_for[now.slow_rank]
        found.append(f"rank {now.slow_rank} is slow: {lost:.0%} of all time waits for it")
        found += [now.cause]
    return [line for line in found if line]


def _values(now: JobSnapshot) -> dict[str, float]:
    found: dict[str, float] = {}
    for rank in now.ranks:
        for name, value in rank.values.items():
            if name != "samples":
                found.setdefault(name, value)
    return dict(list(found.items())[:6])


def _columns(width: int, *, has_hosts: bool) -> list[str]:
    columns = ["rank", "step", "waits", "for", "memory"]
    if width >= _WIDE:
        columns[2:2] = ["doing", "own ms"]
    if width >= _WIDER:
        columns += ["samples/s", "loss", "pid"]
    if has_hosts:
        columns.insert(1, "host")
    return columns


def _cells(rank: RankSnapshot) -> dict[str, str]:
    loss = rank.values.get("loss")
    return {
        "rank": str(rank.rank),
        "host": rank.host,
        "step": "-" if rank.step is None else str(rank.step),
        "doing": _doing(rank),
        "own ms": "-" if rank.worked_s is None else f"{rank.worked_s * 1e3:.1f}",
        "waits": f"{rank.waiting:.0%}",
        "for": "" if rank.waits_for is None or rank.waiting < 0.02 else str(rank.waits_for),
        "memory": as_size(rank.memory_bytes),
        "samples/s": "-" if rank.samples_per_s is None else f"{rank.samples_per_s:.4g}",
        "loss": "-" if loss is None else f"{loss:.5g}",
        "pid": str(rank.pid),
    }


def _doing(rank: RankSnapshot) -> str:
    if not rank.is_alive:
        return "ended"
    between = "" if rank.is_far else "between"
    words = {"average": "averages", "data": "loads data"}.get(rank.doing, rank.doing) or between
    if rank.silent_s < (_FAR_SILENT_S if rank.is_far else 2):
        return words or "-"
    return f"{words or 'silent'} {rank.silent_s:.0f} s"


def _most_relevant(now: JobSnapshot, most: int | None) -> list[RankSnapshot]:
    """The ranks to show if there is no room for all: those that ended, then those that wait least.

    A rank that waits little is one that the others wait for.
    """
    if most is None or len(now.ranks) <= most:
        return list(now.ranks)
    chosen = sorted(now.ranks, key=lambda each: (each.is_alive, each.waiting))[:most]
    return sorted(chosen, key=lambda each: each.rank)


def _troubles(now: JobSnapshot) -> list[str]:
    found = []
    for rank in now.ranks:
        if rank.nonfinite:
            found.append(
                f"rank {rank.rank}: {rank.nonfinite} gradients were not finite, "
                f"first those of rank {rank.nonfinite_rank}"
            )
        if rank.failure:
            after = "went on after" if rank.is_recovered else "failed:"
            found.append(f"rank {rank.rank} {after} {rank.failure.splitlines()[0]}")
    return found[:4]


def as_size(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / 2**30:.2f}G" if size >= 2**30 else f"{size / 2**20:.0f}M"
