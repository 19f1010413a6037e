"""docs/design/gradient.md: the files that one gradient passes through are those that the page names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import paceline
from tests.harness import needs_paddle, ranks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(paceline.__file__).parent
PAGE = ROOT / "docs" / "design" / "gradient.md"
TIMED_PASSES = 10  # as torch's DDP does, a wrapper times its first passes, in one file more
# Where torch has no DLPack exchange table (before 2.10), the core cannot read gradients by itself.
WITHOUT_EXCHANGE = ("torch/passes/gradient_hooks.py", "torch/passes/replica_state.py")
BUFFERS = ("none", "broadcast", "average")


def files_in_table(heading: str, *, with_buffers: bool = True) -> list[str]:
    """The files in the rows of the table below a heading, which are numbered from 1, or marked +."""
    section = PAGE.read_text().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+|\+) \| `([^`]+)` \|", section, re.M)
    numbers = [int(number) for number, _ in rows if number != "+"]
    assert numbers == list(range(1, len(numbers) + 1))
    return [name for number, name in rows if with_buffers or number != "+"]


def test_the_ways_are_short_and_their_files_exist():
    ways, core = (
        [files_in_table(f"Python, with {name}") for name in ("torch", "Paddle")],
        files_in_table("C++"),
    )
    assert all(5 < len(way) <= 15 for way in ways)
    assert 5 < len(core) <= 8
    missing = [name for way in ways for name in way if not (PACKAGE / name).exists()]
    helpers = re.findall(r"`(cpp/[^`]+)`", PAGE.read_text())
    assert set(core) < set(helpers)
    missing += [name for name in helpers if not (ROOT / name).exists()]
    assert not missing


def files_of(step: Callable[[], object]) -> list[str]:
    """The files of the package in which `step` calls a function, in the order of their first calls."""
    touched: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            touched[str(path.relative_to(PACKAGE))] = None

    for _ in range(TIMED_PASSES + 1):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return list(touched)


def step_in_torch(group: object, buffers: str) -> Callable[[], object]:
    import torch
    from torch import nn

    from paceline.torch import DistributedDataParallel

    torch.manual_seed(0)
    norm = nn.ReLU() if buffers == "none" else nn.BatchNorm1d(4)
    policy = {"*": "average"} if buffers == "average" else {}
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))
    ddp = DistributedDataParallel(model, process_group=group, buffers=policy)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    batch = torch.randn(2, 4)

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()

    return step


def step_in_paddle(group: object, buffers: str) -> Callable[[], object]:
    import paddle
    from paddle import nn

    from paceline.paddle import DataParallel

    paddle.seed(0)
    norm = nn.ReLU() if buffers == "none" else nn.BatchNorm1D(4)
    policy = {"*": "average"} if buffers == "average" else {}
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1))
    wrapped = DataParallel(model, group=group, buffers=policy)
    optimizer = paddle.optimizer.SGD(0.1, parameters=wrapped.parameters())
    batch = paddle.randn([2, 4])

    def step() -> None:
        wrapped(batch).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    return step


@ranks(2)
@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize(
    "make_step", [step_in_torch, pytest.param(step_in_paddle, marks=needs_paddle)], ids=["torch", "Paddle"]
)
def test_a_step_runs_the_files_of_the_page_in_their_order(group, make_step, buffers):
    framework = "torch" if make_step is step_in_torch else "Paddle"
    expected = files_in_table(f"Python, with {framework}", with_buffers=buffers != "none")
    found = files_of(make_step(group, buffers))
    if framework == "torch" and not has_exchange_table():
        assert set(WITHOUT_EXCHANGE) < set(found)
        found = [name for name in found if name not in WITHOUT_EXCHANGE]
    assert found == expected


def has_exchange_table() -> bool:
    import torch

    return hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
