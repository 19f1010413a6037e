"""Every launcher: Paddle's documented example with one import changed, and what Paddle knows of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_array_equal

import paceline.paddle
from paceline.paddle import DataParallel
from tests.harness.warm import warm_python
from tests.multiprocess.paddle_models import ranks, two_layers

EXAMPLE = """
import sys

import paddle
import paddle.distributed as dist
import paddle.nn as nn
import paddle.optimizer as opt

import paceline.paddle
from paceline.paddle import DataParallel


class LinearNet(nn.Layer):
    def __init__(self):
        super().__init__()
        self._linear1 = nn.Linear(10, 10)
        self._linear2 = nn.Linear(10, 1)

    def forward(self, x):
        return self._linear2(self._linear1(x))


def train():
    # 1. initialize parallel environment
    (paceline.paddle if "ours" in sys.argv else dist).init_parallel_env()

    # 2. create data parallel layer & optimizer
    layer = LinearNet()
    dp_layer = DataParallel(layer)

    loss_fn = nn.MSELoss()
    adam = opt.Adam(learning_rate=0.001, parameters=dp_layer.parameters())

    # 3. run layer
    inputs = paddle.randn([10, 10], 'float32')
    outputs = dp_layer(inputs)
    labels = paddle.randn([10, 1], 'float32')
    loss = loss_fn(outputs, labels)

    loss.backward()

    adam.step()
    adam.clear_grad()

    weights = float(sum((p**2).sum() for p in dp_layer.parameters())).hex()
    with open(f"{sys.argv[-1]}.{dist.get_rank()}", "w") as file:
        file.write(f"{dist.get_world_size()} {weights}")


if __name__ == '__main__':
    if "paddle.spawn" in sys.argv:
        dist.spawn(train, nprocs=2)
    elif "paceline.spawn" in sys.argv:
        paceline.paddle.spawn(train, nprocs=2)
    else:
        train()
"""


def test_the_documented_example_runs_under_every_launcher(tmp_path: Path) -> None:
    script = tmp_path / "demo.py"
    script.write_text(EXAMPLE)
    launch = [
        "-m",
        "paddle.distributed.launch",
        "--nproc_per_node",
        "2",
        "--log_dir",
        str(tmp_path / "log"),
    ]
    commands = {
        "paddle_spawn": ["demo.py", "paddle.spawn"],
        "paceline_spawn": ["demo.py", "ours", "paceline.spawn"],
        "paddle_launch": [*launch, "demo.py"],
        "paceline_run": ["-m", "paceline", "run", "-n", "2", "demo.py"],
    }
    warm = warm_python("paddle")
    started = {}
    for name, command in commands.items():  # all at once: they wait for each other most of the time
        python = sys.executable if "spawn" in name else warm
        started[name] = subprocess.Popen(
            [python, *command, name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    for name, process in started.items():
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, f"{name}: {output.decode()}"
        first, second = ((tmp_path / f"{name}.{rank}").read_text() for rank in range(2))
        assert first == second and first.startswith("2 "), name


def be_started_by_torchrun(rank: int) -> None:
    """As the harness starts ranks."""


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
    assert dist.get_world_size() == 1  # Paddle remembers this
    if wraps:
        DataParallel(two_layers())
    group = paceline.paddle.init_parallel_env()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    drawn = [*paddle.io.DistributedBatchSampler(range(8), batch_size=2)]
    assert sorted(np.ravel(group.all_gather(np.array(drawn)))) == list(range(8))
    assert paceline.paddle.init_parallel_env() is group and not dist.is_initialized()
    group.close()
    assert paceline.paddle.init_parallel_env().world_size == 2
    dist.init_parallel_env()  # has a port of its own, where torchrun's agent may serve the launcher's
    total = paddle.full([1], 1.0 + rank)
    dist.all_reduce(total)
    assert_array_equal(total.numpy(), [3])


@ranks(2, group=None)
def test_what_paddles_launcher_has_said_stays(rank: int) -> None:
    place = {"PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_MASTER": "127.0.0.1:29500"}
    os.environ |= place
    before = dict(os.environ)
    paceline.paddle.init_parallel_env()
    assert dict(os.environ) == before
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
