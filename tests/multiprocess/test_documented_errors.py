"""The code raises the errors that the documentation shows, with exactly the same text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "getting_started.md"


class Branching(nn.Module):
    """A model that can skip its head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, skips_head: bool) -> torch.Tensor:
        encoded = self.encoder(x)
        return encoded.sum() if skips_head else self.head(encoded).sum()


def shown_error(beginning: str) -> str:
    """Returns the only block of the page with this beginning."""
    (shown,) = re.findall(rf"^```\n({beginning}.*?)\n```$", PAGE.read_text(), re.M | re.S)
    return shown


@ranks(2)
def test_the_error_that_getting_started_shows(group):
    shown = shown_error("2 of 4 parameters ")
    ddp = DistributedDataParallel(Branching(), process_group=group)
    loss = ddp(torch.ones(2, 4), skips_head=group.rank == 1)
    with pytest.raises(UnusedParameterError) as caught:
        loss.backward()
    assert str(caught.value) == shown


@ranks(2)
def test_the_wrong_argument_that_getting_started_shows(group):
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallel(Branching(), process_group=group, device_ids=0 if group.rank == 0 else None)
    shown = shown_error("DistributedDataParallel: device_ids=0 ")
    if group.rank == 0:
        assert str(caught.value) == shown
    else:
        assert all(line.strip() in str(caught.value) for line in shown.splitlines())
