"""The next synchronised backward averages what has accumulated in no_sync()."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import Branches

PATHS = ["group", "memory"]
WORLD = 2


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_what_accumulated_counts_even_if_the_last_backward_leaves_it_out(rank: int, path: str) -> None:
    model = Branches()
    del model.never
    ddp = DistributedDataParallel(model, reduce_through=path)
    x = torch.full((1, 3), 1.0 + rank)
    with ddp.no_sync():
        ddp(x, "both").sum().backward()
    ddp(x, "left").sum().backward()
    assert_close(model.left.weight.grad, torch.full((2, 3), 3.0))
    assert_close(model.right.weight.grad, torch.full((2, 3), 1.5))
