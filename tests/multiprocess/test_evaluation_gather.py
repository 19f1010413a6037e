"""EvaluationSampler.gather() restores the order of the data set, over a Group and over torch.distributed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline import Group
from paceline.data import EvaluationSampler
from paceline.errors import ConfigError
from tests.harness import kept_ranks

TRUTH = np.arange(21, dtype=np.float32).reshape(7, 3)


@kept_ranks(3)
def test_over_a_group(group: Group) -> None:
    sampler = EvaluationSampler(range(7), group.world_size, group.rank)
    assert_array_equal(sampler.gather(TRUTH[list(sampler)], group), TRUTH)
    on_one = sampler.gather(TRUTH[list(sampler)], group, root=2)
    assert (on_one is None) == (group.rank != 2)


@kept_ranks(2, group="gloo")
def test_over_torch_distributed(rank: int) -> None:
    import torch

    sampler = EvaluationSampler(range(7))
    batches = [torch.from_numpy(TRUTH[[i]]) for i in sampler]
    assert_array_equal(sampler.gather(batches), TRUTH)


def gather_wrongly_on_rank_1(rank: int, world_size: int, group: Group | None = None) -> None:
    """Passes each wrong argument on rank 1 only, then valid arguments on all ranks."""
    sampler = EvaluationSampler(range(7), world_size, rank)
    rows = TRUTH[list(sampler)]
    for wrong, expected in (
        ({"rows": None}, "rows=None"),
        ({"rows": 3.5}, "rows=3.5"),
        ({"rows": [rows, rows[:, :1]]}, "rows="),
        ({"root": world_size}, f"root={world_size}"),
        ({"root": "0"}, "root='0'"),
    ):
        with pytest.raises(ConfigError) as caught:
            sampler.gather(**{"rows": rows, "group": group} | (wrong if rank == 1 else {}))
        assert expected in str(caught.value)
        if rank != 1:
            assert f"rank 1 of {world_size} could not hand in rows" in str(caught.value)
            assert caught.value.ranks == (1,)
    assert_array_equal(sampler.gather(rows, group), TRUTH)


@kept_ranks(3)
def test_an_error_on_one_rank_is_reported_to_all_over_a_group(group: Group) -> None:
    gather_wrongly_on_rank_1(group.rank, 3, group)


@kept_ranks(2, group="gloo")
def test_an_error_on_one_rank_is_reported_to_all_over_torch_distributed(rank: int) -> None:
    gather_wrongly_on_rank_1(rank, 2)


@kept_ranks(2)
def test_each_rank_raises_its_own_error(group: Group) -> None:
    sampler = EvaluationSampler(range(7), 2, group.rank)
    with pytest.raises(ConfigError, match=f"rows={group.rank}"):
        sampler.gather(group.rank, group)
