"""The documentation's generated pictures match their programs' output, and pages show them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_picture_is_what_its_program_draws(program: Path) -> None:
    picture = program.with_suffix(".svg")
    drawn = runpy.run_path(str(program))["draw"]()
    assert picture.read_text() == drawn, f"run it: python docs/pictures/{program.name}"
    pages = [page.read_text() for page in FOLDER.parent.glob("*.md")]
    assert any(f"pictures/{picture.name}" in page for page in pages)
