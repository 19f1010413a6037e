"""The table of docs/trainers.md: each row was run, in the version that it names, by a test that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.unit import documented_tests

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "trainers.md"
REQUIRED = ROOT / "tests" / "integrations" / "requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"


class Row(NamedTuple):
    library: str
    version: str
    write: str
    cannot: str
    test: str


def rows() -> list[Row]:
    section = PAGE.read_text().partition("## Library by library\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def pinned() -> dict[str, str]:
    text = REQUIRED.read_text() + CONSTRAINTS.read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==([\w.]+)", text, re.MULTILINE))


def test_every_row_names_tests_that_exist_and_says_what_to_write():
    assert rows()
    for row in rows():
        assert row.write and row.cannot, row
        names = re.findall(r"`(test_\w+)`", row.test)
        assert names, row
        for name in names:
            assert any("integrations" in path.parts for path in documented_tests.tests().get(name, ())), name


def test_every_row_names_the_version_that_is_run():
    known = pinned()
    for row in rows():
        package = re.fullmatch(r".*\(`([\w.-]+)`\)|.*`([\w.-]+)`", row.library)
        assert package, row
        name = package[1] or package[2]
        assert known[name].startswith(row.version), row


def test_every_library_that_is_installed_for_the_tests_has_a_row():
    named = " ".join(row.library for row in rows())
    for name in re.findall(r"^([\w-]+)(?:\[\w+\])?==", REQUIRED.read_text(), re.MULTILINE):
        assert f"`{name}`" in named, name


def test_every_row_names_an_example_that_exists_and_every_example_is_named():
    examples = {path.name for path in (ROOT / "examples" / "trainers").glob("*.py")}
    for row in rows():
        named = re.findall(r"`examples/trainers/(\w+\.py)", row.write)
        assert named and examples.issuperset(named), row
    assert examples == set(re.findall(r"`examples/trainers/(\w+\.py)", PAGE.read_text()))
