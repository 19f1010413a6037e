"""Checks each row of docs/coming-from-paddle.md against the signatures of torch, Paddle and Paceline.

Only this file, and pytest's collection, imports both frameworks into one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest

import paceline.paddle
import paceline.torch
from tests.multiprocess import parity

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "coming-from-paddle.md"
TorchDDP = torch.nn.parallel.DistributedDataParallel
of_newer_torch = pytest.mark.skipif(
    "forward_sync_buffers" not in inspect.signature(TorchDDP).parameters,
    reason="the page shows the class of torch 2.13, which has arguments that this one lacks",
)


def rows(columns: int) -> list[list[str]]:
    """Return the rows of the table with that number of columns; "-" means none."""
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
    for torchs, in_paddle, in_paceline, *_ in table:
        assert torchs in theirs or torchs == "forward_sync_buffers", torchs
        assert (in_paddle in paddles) if in_paddle != "-" else (torchs not in paddles), torchs
        assert in_paceline in ours, torchs
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
def test_the_table_of_both_front_ends_matches_their_classes() -> None:
    made = parity.page()
    assert parity.PAGE.read_text() == made, "python -m tests.multiprocess.parity writes it again"
