"""A page in another language says what the English one says, as far as a program can tell.

Names, code and figures need no translation: they are the same in both pages.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TRANSLATED = sorted(DOCS.glob("zh/*.md"))


def blocks(text: str) -> list[str]:
    """Blocks of code, but for those that are Sphinx's."""
    every = re.findall(r"^```.*?^```$", text, re.M | re.S)
    return [block for block in every if not block.startswith("```{")]


def names(text: str) -> Counter[str]:
    """Everything in backticks, but for names of tests, which the source of the English page has, too."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return Counter(name for name in re.findall(r"`([^`\n]+)`", prose) if not name.startswith("test_"))


def figures(text: str) -> Counter[str]:
    """Cells of tables that are a number, or begin with one and its unit."""
    cells = (cell.strip() for line in text.splitlines() if line.startswith("|") for cell in line.split("|"))
    return Counter(cell for cell in cells if re.fullmatch(r"[\d.]+( (us|ms|s|MB|%))?", cell))


def links(text: str) -> set[str]:
    """The pages that it leads to."""
    return {Path(link.partition("#")[0]).name for link in re.findall(r"\]\(([^)]+)\)", text)} - {""}


def test_there_are_translations() -> None:
    assert [page.name for page in TRANSLATED] == ["coming-from-paddle.md", "index.md"]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
@pytest.mark.parametrize("part", [blocks, names, figures, links], ids=lambda part: part.__name__)
def test_a_translation_has_all_of_the_english_page(page: Path, part) -> None:
    assert part(page.read_text()) == part((DOCS / page.name).read_text())
