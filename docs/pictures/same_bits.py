"""Draws docs/pictures/same_bits.svg: one model on several numbers of processes, and hashes of its weights.

python docs/pictures/same_bits.py     # writes it; a test compares the file with this program

What it shows is what `make same-bits` has found: the JSON file of benchmarks/results.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).with_suffix(".svg")
RESULTS = PICTURE.parents[2] / "benchmarks" / "results"

TRAINING = "torch, GPT"
INK, PAPER = "#1f2733", "#ffffff"
COLORS = {1: "#9dc3ea", 2: "#2f6db5", 3: "#f0a860", 4: "#c8641b"}
"""Of a number of processes."""
NAMES = {"by hand": "torch alone, by hand"}
WIDTH, LEFT, RIGHT = 780, 172, 600  # the bars lie between left and right
TOP, ROW, BAR = 84, 30, 20


def text(x: float, y: float, words: str, size: int = 13, **more: str) -> str:
    """One line of text; more: attributes, with _ for -."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{INK}"{attributes}>{escape(words)}</text>'


def bar(y: float, parts: list[list[int]], steps: int) -> list[str]:
    """One training: a piece for each part, in the colour of its number of processes."""
    scale = (RIGHT - LEFT) / steps
    return [
        f'<rect x="{LEFT + begin * scale:.1f}" y="{y:g}" width="{(end - begin) * scale:.1f}" height="{BAR}" '
        f'fill="{COLORS[processes]}" stroke="{PAPER}" stroke-width="0.5"/>'
        for processes, begin, end in parts
    ]


def legend(y: float) -> list[str]:
    """The colours."""
    shapes, x = [], LEFT
    for processes, color in COLORS.items():
        shapes.append(f'<rect x="{x:g}" y="{y - 11:g}" width="14" height="14" fill="{color}"/>')
        shapes.append(text(x + 19, y, f"{processes} process{'es' if processes > 1 else ''}"))
        x += 108
    return shapes


def draw() -> str:
    """The whole picture, as SVG."""
    (result,) = RESULTS.glob("same-bits_*.json")
    found: dict[str, Any] = json.loads(result.read_text())
    steps, runs = found["steps"], [run for run in found["runs"] if run["training"] == TRAINING]
    height = TOP + ROW * len(runs) + 34
    shapes = [f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>']
    shapes.append(text(16, 28, f"{steps} steps of a GPT with virtual_ranks=8", 16, font_weight="bold"))
    shapes += legend(58)
    shapes.append(text(RIGHT + 16, 58, "hash of all weights", font_weight="bold"))
    for number, run in enumerate(runs):
        y = TOP + ROW * number
        shapes.append(text(16, y + 15, NAMES.get(run["layout"], run["layout"])))
        shapes += bar(y, run["parts"], steps)
        shapes.append(text(RIGHT + 16, y + 15, run["hash"], 14, font_family="monospace"))
    y = TOP + ROW * len(runs) + 12
    shapes += [text(LEFT, y, "step 0"), text(RIGHT, y, f"step {steps}", text_anchor="end")]
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
