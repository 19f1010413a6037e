"""Every row of docs/coming-from-paddle.md against the real signatures of torch, Paddle and Paceline.

The one place where both frameworks are imported into one process, besides pytest's own collection.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

import paceline.paddle
import paceline.torch
from paceline.paddle import DataParallel, DistributedDataParallel
from tests.multiprocess import parity
from tests.unit import documented_tests

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "coming-from-paddle.md"
TorchDDP = torch.nn.parallel.DistributedDataParallel
of_newer_torch = pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(TorchDDP).parameters,
    reason="the page shows the class of torch 2.13, which has arguments that this one has not",
)


def rows(columns: int) -> list[list[str]]:
    """The rows of the table of so many columns; a dash is "-"."""
    found = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines() if line[:1] == "|"]
    return [row for row in found if len(row) == columns and row[0] not in ("torch", "---")]


def lines() -> list[str]:
    return DOCUMENT.read_text().splitlines()


def arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}


@of_newer_torch
def test_every_argument_of_torch_has_a_row_that_is_true() -> None:
    theirs, paddles = arguments(TorchDDP.__init__), arguments(paddle.DataParallel.__init__)
    ours = arguments(paceline.paddle.DataParallel.__init__)
    table = [row for row in rows(5) if row[-1].startswith("test_") and not row[1].isdigit()]
    assert len(table) > 10
    wrappers = {kind.__name__: list(arguments(kind)) for kind in (DataParallel, DistributedDataParallel)}
    for torchs, in_paddle, in_paceline, _, test in table:
        assert torchs in theirs or torchs == "forward_sync_buffers", torchs
        assert (in_paddle in paddles) if in_paddle != "-" else (torchs not in paddles), torchs
        assert in_paceline in ours, torchs
        assert documented_tests.passes(test, in_paceline, "paddle", wrappers), (
            f"{test} passes no {in_paceline}"
        )
    later = {name for name, remark in parity.REMARKS.items() if remark.startswith("torch 2.15's")}
    assert not set(theirs) - {row[0] for row in table} - {"self"} - later
    assert set(paddles) <= set(ours)


@of_newer_torch
def test_the_signatures_come_first_in_their_own_order() -> None:
    paddles = list(arguments(paddle.DataParallel.__init__))
    assert list(arguments(paceline.paddle.DataParallel.__init__))[: len(paddles)] == paddles
    ours = list(arguments(paceline.paddle.DistributedDataParallel.__init__))
    positional = ours[: ours.index("options")]
    assert list(arguments(TorchDDP.__init__))[: len(positional)] == positional
    for kind, original in (
        (paceline.paddle.DataParallel, paddle.DataParallel),
        (paceline.paddle.DistributedDataParallel, TorchDDP),
    ):
        for name, parameter in arguments(original.__init__).items():
            if name in arguments(kind.__init__):
                assert arguments(kind.__init__)[name].default == parameter.default, name


def names_of(kind: type) -> set[str]:
    """Public ones, of the class and those that it sets in its objects."""
    set_there = re.findall(r"self\.([a-z]\w*)\b[^=\n]*= ", inspect.getsource(kind))
    return {name for name in {*dir(kind), *set_there} if not name.startswith("_")}


@of_newer_torch
def test_the_names_that_hide_those_of_a_model_are_listed() -> None:
    def listed(document: Path) -> set[str]:
        lines = document.read_text().splitlines()
        (line,) = [each for each in lines if each.startswith("Besides ") and "shadow attributes" in each]
        return set(re.findall(r"`(\w+)`", line.partition(". ")[0]))

    assert listed(DOCUMENT) == names_of(paceline.paddle.DataParallel) - names_of(paddle.DataParallel)
    in_torch = names_of(paceline.torch.DistributedDataParallel) - names_of(TorchDDP)
    of_later_torchs = {name for name, remark in parity.REMARKS.items() if remark.startswith("torch 2.15's")}
    assert listed(DOCUMENT.with_name("coming-from-ddp.md")) == in_torch - of_later_torchs


def test_every_method_has_a_row_that_is_true() -> None:
    linear = torch.nn.Linear(1, 1)
    for torchs, paddles, ours in rows(3):
        in_instances = {"module", "_layers"}  # set by the constructor
        assert torchs in ("-", *in_instances) or hasattr(TorchDDP, torchs) or hasattr(linear, torchs), torchs
        assert paddles in ("-", *in_instances) or hasattr(paddle.DataParallel, paddles), paddles
        assert hasattr(paceline.paddle.DataParallel, ours), ours
        if torchs == "-":
            assert not hasattr(TorchDDP, ours), ours
        if paddles == "-":
            assert not hasattr(paddle.DataParallel, ours), ours


@of_newer_torch
def test_the_table_of_both_front_ends_is_what_their_classes_have() -> None:
    made = parity.page()
    assert parity.PAGE.read_text() == made, "python -m tests.multiprocess.parity writes it anew"


def test_each_of_paddles_own_tests_has_one_here() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    here = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    table = [row for row in rows(5) if row[1].isdigit() and row[0] != "sum"]
    for theirs, *counts, tests in table:
        assert len(set(counts)) == 1, theirs
        assert set(re.findall(r"test_\w+", tests)) <= here and "test_" in tests, theirs
    (total,) = [row for row in rows(5) if row[0] == "sum"]
    assert total[1:4] == [str(sum(int(row[1]) for row in table))] * 3 == ["47"] * 3
