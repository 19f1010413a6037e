"""The result of a benchmark: a table, as text, Markdown and JSON, and the machine that was measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from paceline.launch.topology import read_machine, read_processor

_PACKAGES = ("paceline", "numpy", "torch", "paddlepaddle", "mpi4py")


@dataclass(frozen=True)
class Machine:
    """Where and when a benchmark ran.

    Attributes:
        processor: The name that the processor reports.
        cores: Cores that this process may use, by affinity and cgroup quota.
        memory_gib: Memory of the machine.
        load: Load average over a minute, before the benchmark started.
        kernel: Operating system and its release.
        versions: The versions of Python and of the packages that matter.
        date: UTC, in ISO 8601.
    """

    processor: str
    cores: int
    memory_gib: int
    load: float
    kernel: str
    versions: dict[str, str]
    date: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            processor=read_processor(),
            cores=read_machine().num_cores,
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            load=round(os.getloadavg()[0], 2),
            kernel=f"{platform.system()} {platform.release()}",
            versions=_versions(),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    @property
    def slug(self) -> str:
        """Short name for file names, such as `xeon-2.50ghz-2c`."""
        words = re.sub(r"\((R|TM)\)|@", " ", self.processor).lower().split()
        kept = [word for word in words if word not in {"intel", "amd", "cpu", "processor", "with"}]
        return re.sub(r"[^a-z0-9.-]+", "-", "-".join(kept[:4]) or "machine") + f"-{self.cores}c"

    def describe(self) -> str:
        """Return two lines of text."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.processor}, {self.cores} cores usable, {self.memory_gib} GiB, {self.kernel}\n"
            f"{versions}; load before: {self.load}; {self.date}"
        )


def _versions() -> dict[str, str]:
    installed = {name: _version(name) for name in _PACKAGES}
    found = {name: version for name, version in installed.items() if version}
    return {"Python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass
class Report:
    """The report of one benchmark.

    Attributes:
        theme: Short name, the first part of the names of its files.
        title: Heading.
        command: The command that reproduces it.
        machine: Where it was measured.
        columns: Headings of the table.
        rows: Cells of the table; an empty row separates two parts.
        notes: How to read the table, and which case was absent or failed, and why.
        data: Plain values for JSON, including every sample.
        is_complete: False if a case of Paceline failed.
        text_columns: How many of the first columns hold text, which is aligned on the left.
    """

    theme: str
    title: str
    command: str
    machine: Machine
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True
    text_columns: int = 1

    def show(self) -> None:
        """Print the table."""
        table = [self.columns, *(row or [""] * len(self.columns) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if at < self.text_columns else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        shown = "\n".join(lines).rstrip()
        print("\n".join([self.title, self.machine.describe(), "", shown, "", *self.notes]))

    def write_json(self, path: Path) -> None:
        """Write the table and every sample."""
        content = {
            "benchmark": self.theme,
            "title": self.title,
            "command": self.command,
            "machine": asdict(self.machine),
            "is_complete": self.is_complete,
            "table": [dict(zip(self.columns, row, strict=True)) for row in self.rows if row],
            "notes": self.notes,
            **self.data,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def write_markdown(self, path: Path) -> Path:
        """Write the table. If `path` is a folder, choose the file's name, and write a JSON file beside it."""
        if path.is_dir():
            path = path / f"{self.theme}_{self.machine.slug}.md"
            self.write_json(path.with_suffix(".json"))
        path.write_text(self.as_markdown())
        return path

    def as_markdown(self) -> str:
        """The table, the command and the machine."""
        lines = [f"# {self.title}", "", "```", f"$ {self.command}", "```", ""]
        lines += [f"{line}  " for line in self.machine.describe().splitlines()]
        numbers = len(self.columns) - self.text_columns
        rule = "|---" * self.text_columns + "|--:" * numbers + "|"
        lines += ["", "| " + " | ".join(self.columns) + " |", rule]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows if row]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])
