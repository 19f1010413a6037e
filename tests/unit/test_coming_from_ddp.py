"""docs/coming-from-ddp.md against the torch that is installed, and against the tests that it names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

import paceline.torch  # noqa: E402
from tests.unit import documented_tests  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coming-from-ddp.md"


LATER = {"DistributedDataParallel": {"lazy_bucket_allocation"}, "DataParallel": set()}  # than torch 2.13


class Row(NamedTuple):
    section: str
    name: str
    verdict: str
    how: str
    test: str


def rows() -> Iterator[Row]:
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| `"):
            name, verdict, how, test = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(section, name.strip("`"), verdict, how, test.strip("`"))


def names(section: str) -> list[str]:
    return [row.name for row in rows() if row.section == section]


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["DistributedDataParallel", "DataParallel"])
def test_the_tables_have_every_argument_and_method_of_torch(name: str) -> None:
    theirs, ours = getattr(torch.nn.parallel, name), getattr(paceline.torch, name)
    arguments = list(inspect.signature(theirs.__init__).parameters)[1:]
    assert set(arguments) <= set(names(f"Arguments of {name}")) <= set(inspect.signature(ours).parameters)
    if torch.__version__.startswith("2.13."):  # whose classes the page goes through
        assert sorted(names(f"Arguments of {name}")) == sorted({*arguments, *LATER[name]})
    methods = next(row.section for row in rows() if re.fullmatch(f"Methods .*of {name}", row.section))
    assert public(theirs) <= set(names(methods))


def test_every_row_has_a_verdict_and_a_test_that_exists() -> None:
    for row in rows():
        assert row.verdict in ("same", "better"), row
        assert row.how or row.verdict == "same", row
        assert row.test in documented_tests.tests(), row


def test_the_test_of_an_argument_passes_it() -> None:
    wrappers = {
        name: list(inspect.signature(getattr(paceline.torch, name)).parameters)
        for name in ("DistributedDataParallel", "DataParallel")
    }
    of_arguments = [row for row in rows() if row.section.startswith("Arguments")]
    assert len(of_arguments) > 20
    wrong = [
        row for row in of_arguments if not documented_tests.passes(row.test, row.name, "torch", wrappers)
    ]
    assert not wrong


def test_what_is_said_of_torchs_own_tests_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "design" / "testing.md").read_text()
    (section,) = re.findall(r"^## torch's own tests$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) > 10
    assert named <= set(documented_tests.tests())


def test_every_method_of_the_tables_is_there() -> None:
    in_instances = {"module", "reducer", "logger", "require_backward_grad_sync", "device_mesh"}
    for row in rows():
        if row.section.startswith("Methods") and row.name not in in_instances:
            assert hasattr(getattr(paceline.torch, row.section.split()[-1]), row.name), row
