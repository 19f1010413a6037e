"""Draws docs/pictures/one_backward.svg: how two ranks average their gradients in the memory that they share.

python docs/pictures/one_backward.py     # writes it; a test compares the file with this program
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_suffix(".svg")

GRADIENTS = ((1, 3, 5, 7), (3, 5, 7, 9))  # of ranks 0 and 1, one number for each chunk
MEANS = tuple(sum(column) / len(GRADIENTS) for column in zip(*GRADIENTS))
COLORS = ("#2f6db5", "#c8641b")  # of ranks 0 and 1
INK, PALE, PAPER = "#1f2733", "#e8edf3", "#ffffff"
CELL, GAP = 44, 4
ROW = 4 * (CELL + GAP) - GAP
COLUMNS = (24, 292, 560)  # where the three steps begin
WIDTH, HEIGHT = 780, 330
TOP = (96, 236)  # of the memory of ranks 0 and 1

STEPS = (
    ("1  backward", "each rank makes its gradients,", "in memory that both can read"),
    ("2  average", "each rank reads half of the chunks", "from both, and adds in a fixed order"),
    ("3  return", "both hold the same means,", "to the bit"),
)


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, **more: str) -> str:
    """One line of text; more: attributes, with _ for -."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{attributes}>{escape(words)}</text>'


def cell(x: float, y: float, number: float, fill: str, ink: str) -> list[str]:
    """A chunk of a rank's gradients, with its value."""
    middle = x + CELL / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="4" fill="{fill}"/>',
        text(middle, y + 28, f"{number:g}", 17, ink, text_anchor="middle"),
    ]


def arrow(x: float, y: float, to_x: float, to_y: float, color: str) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{color}" stroke-width="2" '
        f'marker-end="url(#{"first" if color == COLORS[0] else "second"})"/>'
    )


def heads() -> list[str]:
    """Arrowheads in the colour of each rank."""
    return [
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
        for name, color in zip(("first", "second"), COLORS)
    ]


def place(chunk: int) -> int:
    """How far right in its row a chunk lies."""
    return chunk * (CELL + GAP)


def owner(chunk: int) -> int:
    """The rank that averages a chunk."""
    return chunk // 2


def draw() -> str:
    """The whole picture, as SVG."""
    shapes = ["<defs>", *heads(), "</defs>"]
    shapes.append(f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>')
    for left, (title, *lines) in zip(COLUMNS, STEPS):
        shapes.append(text(left, 28, title, 16, font_weight="bold"))
        shapes += [text(left, 50 + 17 * number, line) for number, line in enumerate(lines)]
        height = TOP[1] - TOP[0] + CELL + 24
        shapes.append(
            f'<rect x="{left - 10}" y="{TOP[0] - 12}" width="{ROW + 20}" height="{height}" rx="8" '
            f'fill="{PALE}"/>'
        )
    for rank, gradients in enumerate(GRADIENTS):
        for chunk, number in enumerate(gradients):
            shapes += cell(COLUMNS[0] + place(chunk), TOP[rank], number, COLORS[rank], PAPER)
            shapes += cell(COLUMNS[2] + place(chunk), TOP[rank], MEANS[chunk], INK, PAPER)
        shapes.append(text(COLUMNS[0] + ROW + 18, TOP[rank] + 28, f"rank {rank}", 13, COLORS[rank]))
    middle = (TOP[0] + TOP[1]) / 2
    for chunk, mean in enumerate(MEANS):
        x, color = COLUMNS[1] + place(chunk), COLORS[owner(chunk)]
        for rank, gradients in enumerate(GRADIENTS):
            shapes += cell(x, TOP[rank], gradients[chunk], PAPER, COLORS[rank])
        shapes += cell(x, middle, mean, color, PAPER)
        shapes.append(arrow(x + CELL / 2, TOP[0] + CELL - 8, x + CELL / 2, middle - 1, color))
        shapes.append(arrow(x + CELL / 2, TOP[1] + 8, x + CELL / 2, middle + CELL + 1, color))
    for rank in range(len(GRADIENTS)):
        x = COLUMNS[1] + place(2 * rank) + CELL + GAP / 2
        shapes.append(text(x, HEIGHT - 12, f"by rank {rank}", 13, COLORS[rank], text_anchor="middle"))
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif" role="img">\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw())
