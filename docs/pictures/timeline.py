"""Draws docs/pictures/timeline.svg: what a timeline shows of two steps, the second with a slow data loader.

python docs/pictures/timeline.py     # writes it; a test compares the file with this program
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_suffix(".svg")

INK, PALE, PAPER = "#1f2733", "#e8edf3", "#ffffff"
COLORS = {
    "data": "#8a6d3b",
    "forward": "#2f6db5",
    "backward": "#1f4e86",
    "average": "#5b6775",
    "optimizer": "#3f7d4e",
    "reduce": "#c8641b",
    "wait": "#b9c2cc",
}
WIDTH, HEIGHT = 780, 306
LEFT, PER_MS = 76, 14.9
TOP = (44, 168)  # of the rows of ranks 0 and 1
ROW, GAP = 30, 4


class Bar(NamedTuple):
    """A slice of a rank: from when to when, in milliseconds; `row` 1 lies within the one above."""

    rank: int
    name: str
    begin: float
    end: float
    row: int = 0


# In step 1 both ranks work equally long. In step 2 the data loader of rank 1 takes 6 ms longer.
BARS = (
    Bar(0, "data", 0.0, 1.0),
    Bar(0, "forward", 1.0, 6.0),
    Bar(0, "backward", 6.0, 16.0),
    Bar(0, "average", 16.0, 18.0),
    Bar(0, "optimizer", 18.0, 20.0),
    Bar(0, "data", 20.0, 21.0),
    Bar(0, "forward", 21.0, 26.0),
    Bar(0, "backward", 26.0, 36.0),
    Bar(0, "average", 36.0, 44.0),
    Bar(0, "optimizer", 44.0, 46.0),
    Bar(1, "data", 0.0, 1.0),
    Bar(1, "forward", 1.0, 6.2),
    Bar(1, "backward", 6.2, 16.4),
    Bar(1, "average", 16.4, 18.0),
    Bar(1, "optimizer", 18.0, 20.0),
    Bar(1, "data", 20.0, 27.0),
    Bar(1, "forward", 27.0, 32.0),
    Bar(1, "backward", 32.0, 42.0),
    Bar(1, "average", 42.0, 44.0),
    Bar(1, "optimizer", 44.0, 46.0),
    Bar(0, "reduce", 10.4, 11.0, 1),
    Bar(0, "reduce", 13.6, 14.2, 1),
    Bar(0, "reduce", 16.3, 17.2, 1),
    Bar(0, "wait", 36.0, 42.0, 1),
    Bar(0, "reduce", 42.2, 43.2, 1),
    Bar(1, "reduce", 10.6, 11.2, 1),
    Bar(1, "reduce", 13.8, 14.4, 1),
    Bar(1, "reduce", 16.6, 17.3, 1),
    Bar(1, "reduce", 35.6, 36.2, 1),
    Bar(1, "reduce", 38.8, 39.4, 1),
    Bar(1, "reduce", 42.2, 43.2, 1),
)
# When each rank had all gradients of a bucket.
POSTED = {
    0: (9.2, 12.6, 16.0, 29.2, 32.6, 36.0),
    1: (9.4, 12.8, 16.4, 35.2, 38.6, 42.0),
}


def across(ms: float) -> float:
    """How far right a time lies."""
    return LEFT + ms * PER_MS


def down(rank: int, row: int) -> float:
    """How far down a row lies."""
    return TOP[rank] + row * (ROW + GAP)


def text(x: float, y: float, words: str, size: int = 12, color: str = INK, **more: str) -> str:
    """One line of text; more: attributes, with _ for -."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" fill="{color}"{attributes}>{escape(words)}</text>'


def bar(each: Bar) -> list[str]:
    """A slice with its name, where there is room."""
    x, y, width = across(each.begin), down(each.rank, each.row), (each.end - each.begin) * PER_MS
    shapes = [
        f'<rect x="{x:.1f}" y="{y:g}" width="{max(2.0, width - 1):.1f}" height="{ROW}" rx="3" '
        f'fill="{COLORS[each.name]}"/>'
    ]
    words = "wait for rank 1" if each.name == "wait" else each.name
    if width > 5.9 * len(words):
        ink = INK if each.name == "wait" else PAPER
        shapes.append(text(x + width / 2, y + 19, words, 11, ink, text_anchor="middle"))
    return shapes


def triangle(x: float, y: float) -> str:
    """A mark that points down, from its upper left corner."""
    points = f"M{x:.1f} {y:g} L{x + 8:.1f} {y:g} L{x + 4:.1f} {y + 7:g} z"
    return f'<path d="{points}" fill="{COLORS["reduce"]}"/>'


def mark(rank: int, ms: float) -> str:
    """A bucket was posted."""
    x, y = across(ms), down(rank, 0)
    return triangle(x - 4, y - 8)


def legend() -> list[str]:
    """What has no name in the picture."""
    y = HEIGHT - 18
    shapes: list[str] = []
    entries = (
        (24, "data", "data loading"),
        (140, "optimizer", "optimizer"),
        (240, "average", "average: until the means are in place"),
        (496, "reduce", "reduce a bucket"),
    )
    for x, name, words in entries:
        shapes.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{COLORS[name]}"/>')
        shapes.append(text(x + 20, y, words))
    x = 626
    shapes.append(triangle(x, y - 8))
    shapes.append(text(x + 14, y, "bucket posted"))
    return shapes


def draw() -> str:
    """The whole picture, as SVG."""
    shapes = [
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>',
    ]
    for rank, top in enumerate(TOP):
        shapes.append(
            f'<rect x="12" y="{top - 14}" width="{WIDTH - 24}" height="{2 * ROW + GAP + 22}" rx="8" '
            f'fill="{PALE}"/>'
        )
        shapes.append(text(22, top + 20, f"rank {rank}", 13, font_weight="bold"))
    for number, begin, end in ((1, 0.0, 20.0), (2, 20.0, 46.0)):
        shapes.append(text(across((begin + end) / 2), 20, f"step {number}", 13, text_anchor="middle"))
    shapes.append(
        f'<line x1="{across(20):.1f}" y1="10" x2="{across(20):.1f}" y2="{TOP[1] + 2 * ROW + GAP + 8}" '
        f'stroke="{INK}" stroke-width="1" stroke-dasharray="3 4"/>'
    )
    for each in BARS:
        shapes += bar(each)
    for rank, times in POSTED.items():
        shapes += [mark(rank, ms) for ms in times]
    came = across(42.0)
    shapes.append(
        f'<line x1="{came:.1f}" y1="{TOP[1] - 10}" x2="{came:.1f}" y2="{down(0, 1) + ROW + 3:g}" '
        f'stroke="{INK}" stroke-width="2" marker-end="url(#head)"/>'
    )
    shapes.append(text(came - 8, 142, "rank 1 comes last: rank 0 has waited for it", 12, text_anchor="end"))
    shapes += legend()
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
