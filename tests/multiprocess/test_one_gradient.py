"""docs/design/gradient.md: the files that one gradient passes through are those that the page names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import paceline
from paceline.torch import DistributedDataParallel
from tests.harness import ranks

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(paceline.__file__).parent
PAGE = ROOT / "docs" / "design" / "gradient.md"
TIMED_PASSES = 10  # as torch's DDP does, a wrapper times its first passes, in one file more


def files_in_table(heading: str) -> list[str]:
    """The files in the rows of the table below a heading, which are numbered from 1."""
    section = PAGE.read_text().partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \|", section, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    return [name for _, name in rows]


def test_the_way_is_short_and_its_files_exist():
    python, core = files_in_table("Python"), files_in_table("C++")
    assert 5 < len(python) <= 12
    assert 5 < len(core) <= 8
    missing = [name for name in python if not (PACKAGE / name).exists()]
    missing += [name for name in core if not (ROOT / name).exists()]
    assert not missing


@ranks(2)
def test_a_step_runs_the_files_of_the_page_in_their_order(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    batch = torch.randn(2, 4)
    touched: dict[str, None] = {}  # in the order of their first calls

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            touched[str(path.relative_to(PACKAGE))] = None

    def step() -> None:
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()

    for _ in range(TIMED_PASSES + 1):
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert list(touched) == files_in_table("Python")
