"""What Paddle knows about the ranks under each launcher; tests/pages runs the documented example."""

from __future__ import annotations

import os

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_array_equal

import paceline.paddle
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import ranks, two_layers


def be_started_by_torchrun(rank: int) -> None:
    """The harness starts ranks in this way."""


def be_started_by_srun(rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    job = {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_NODES": "1", "STEP_NODELIST": "localhost"}
    size = {"STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2"}
    place = {"PROCID": str(rank), "LOCALID": str(rank), "NODEID": "0"}
    os.environ |= {f"SLURM_{name}": value for name, value in (job | size | place).items()}


@pytest.mark.parametrize("start", [be_started_by_torchrun, be_started_by_srun])
@pytest.mark.parametrize("wraps", [True, False])
@ranks(2, group=None)
def test_paddle_learns_its_rank_under_other_launchers(rank: int, wraps: bool, start: object) -> None:
    start(rank)
    assert "PADDLE_TRAINER_ID" not in os.environ
    assert dist.get_world_size() == 1  # Paddle caches this
    if wraps:
        DataParallel(two_layers())
    group = paceline.paddle.init_parallel_env()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    drawn = [*paddle.io.DistributedBatchSampler(range(8), batch_size=2)]
    assert sorted(np.ravel(group.all_gather(np.array(drawn)))) == list(range(8))
    assert paceline.paddle.init_parallel_env() is group and not dist.is_initialized()
    group.close()
    assert paceline.paddle.init_parallel_env().world_size == 2
    dist.init_parallel_env()  # uses its own port: torchrun's agent may serve the launcher's
    total = paddle.full([1], 1.0 + rank)
    dist.all_reduce(total)
    assert_array_equal(total.numpy(), [3])


@ranks(2, group=None)
def test_variables_of_paddles_launcher_stay(rank: int) -> None:
    place = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": "127.0.0.1:29500"}
    os.environ |= place
    before = dict(os.environ)
    paceline.paddle.init_parallel_env()
    assert dict(os.environ) == before
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
