"""Predictions come back in the data set's order, over a paceline.Group and over torch.distributed."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from paceline import Group
from paceline.data import EvaluationSampler
from tests.harness import ranks

TRUTH = np.arange(21, dtype=np.float32).reshape(7, 3)


@ranks(3)
def test_over_a_group(group: Group) -> None:
    sampler = EvaluationSampler(range(7), group.world_size, group.rank)
    assert_array_equal(sampler.gather(TRUTH[list(sampler)], group), TRUTH)
    on_one = sampler.gather(TRUTH[list(sampler)], group, root=2)
    assert (on_one is None) == (group.rank != 2)


@ranks(2, group="gloo")
def test_over_torch_distributed(rank: int) -> None:
    import torch

    sampler = EvaluationSampler(range(7))
    batches = [torch.from_numpy(TRUTH[[i]]) for i in sampler]
    assert_array_equal(sampler.gather(batches), TRUTH)
