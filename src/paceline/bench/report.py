"""What a bench found, and its three forms: a table for people, Markdown to commit, JSON with every sample.

Imports only the rest of the bench; rich, when it is there, draws the table.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.machine import Machine


@dataclass
class Report:
    """One bench's outcome.

    Attributes:
        theme: Short name, first part of a result's file name.
        title: Heading.
        command: The command that makes it again.
        machine: Where it was measured; None: nothing was.
        columns: Headings of the table.
        rows: Its cells; an empty row is a line between two parts.
        notes: What a reader must know: how to read it, who was absent, who failed and why.
        data: Plain values for JSON, every sample included.
        is_complete: False when something of Paceline failed.
        text_columns: How many of the first columns hold words, which line up on the left.
    """

    theme: str
    title: str
    command: str
    machine: Machine | None
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = True
    text_columns: int = 1

    def show(self) -> None:
        """Print the table, with rich when it is installed."""
        try:
            self._show_rich()
        except ImportError:
            print("\n".join([self.title, self._machine(), "", *self._plain_table(), "", *self.notes]))

    def write_json(self, path: Path) -> None:
        """Write everything, samples included."""
        content = {
            "bench": self.theme,
            "command": self.command,
            "machine": self.machine and self.machine.as_json(),
            "is_complete": self.is_complete,
            "notes": self.notes,
            **self.data,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def write_markdown(self, path: Path) -> Path:
        """Write the table as a committed result; `path` may be a folder, and the file then names itself."""
        if path.is_dir():
            names = (self.machine.slug, self.machine.date[:10]) if self.machine else ()
            path = path / f"{'_'.join([self.theme, *names])}.md"
        path.write_text(self.as_markdown())
        return path

    def as_markdown(self) -> str:
        """The table, the command and the machine."""
        lines = [f"# {self.title}", "", "```", f"$ {self.command}", "```", ""]
        lines += [f"{line}  " for line in self._machine().splitlines()]
        numbers = len(self.columns) - self.text_columns
        rule = "|---" * self.text_columns + "|--:" * numbers + "|"
        lines += ["", "| " + " | ".join(self.columns) + " |", rule]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows if row]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])

    def _machine(self) -> str:
        return self.machine.describe() if self.machine else ""

    def _show_rich(self) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="left" if number < self.text_columns else "right")
        for row in self.rows:
            if row:
                table.add_row(*(Text(cell) for cell in row))
            else:
                table.add_section()
        console = Console() if sys.stdout.isatty() else Console(width=_plain_width(self))
        if self.machine:
            console.print(Text(self._machine(), style="dim"))
        console.print(table)
        for note in self.notes:
            console.print(Text(note))

    def _plain_table(self) -> list[str]:
        table = [self.columns, *(row for row in self.rows if row)]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        return [
            "  ".join(
                cell.rjust(width) if number >= self.text_columns else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]


def _plain_width(report: Report) -> int:
    """Wide enough that nothing wraps when the output goes to a file."""
    cells = [report.columns, *(row for row in report.rows if row)]
    widest = sum(max(len(row[i]) for row in cells) + 3 for i in range(len(report.columns)))
    return max(100, widest + 1)
