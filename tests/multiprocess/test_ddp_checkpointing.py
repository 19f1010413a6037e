"""Layers that backward recomputes (activation checkpointing) are averaged once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import two_layers


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = two_layers()
        self._use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=self._use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@kept_ranks(2, group="gloo")
def test_activation_checkpointing(rank: int, use_reentrant: bool) -> None:
    model = Checkpointed(use_reentrant)
    for view in (False, True):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
        x = torch.full((1, 4), 1.0 + rank, requires_grad=True)
        for _ in range(2):
            model.zero_grad()
            (ddp(x).sum() * (1 + rank)).backward()
            assert_close(model.layers[2].bias.grad, torch.full((2,), 1.5))
        del ddp
