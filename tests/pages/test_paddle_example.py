"""Paddle's documented example with one import changed, under every launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness.warm import warm_python

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
    for name, command in commands.items():  # all at once, because processes wait most of the time
        python = sys.executable if "spawn" in name else warm
        started[name] = subprocess.Popen(
            [python, *command, name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    for name, process in started.items():
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, f"{name}: {output.decode()}"
        first, second = ((tmp_path / f"{name}.{rank}").read_text() for rank in range(2))
        assert first == second and first.startswith("2 "), name
