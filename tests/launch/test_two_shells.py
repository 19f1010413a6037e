"""`paceline run --nnodes 2`, where torch's agent starts ranks, in two shells of a machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from paceline.launch.ports import free_ports
from tests.harness.warm import warm_python
from tests.launch.conftest import WITHIN_S
from tests.tutorials import own_address

pytest.importorskip("torch")

_SCRIPT = """
import os
import torch
import torch.distributed as dist
from paceline.torch import DistributedDataParallel, init_process_group
init_process_group("gloo")
net = torch.nn.Linear(1, 1, bias=False)
rank = dist.get_rank()
DistributedDataParallel(net)(torch.full((1, 1), 1.0 + rank)).sum().backward()
print(f"rank {rank} of {dist.get_world_size()}, {os.environ['LOCAL_RANK']} here: {net.weight.grad.item()}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("numbers", [(None, None), (1, 0)], ids=["agreed", "numbered"])
@pytest.mark.parametrize("host", ["localhost", own_address()])
def test_two_shells_are_two_hosts(host: str, numbers: tuple[int | None, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [
        warm_python("torch"),
        "-m",
        "paceline",
        "run",
        "--nnodes",
        "2",
        "--rdzv",
        f"{host}:{free_ports(1)[0]}",
    ]
    launchers = []
    for number in numbers:  # at the same moment: either may be the first
        chosen = [] if number is None else ["--node-rank", str(number)]
        launchers.append(
            subprocess.Popen(
                [*command, "-n", "1", *chosen, "train.py"],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = [launcher.communicate(timeout=WITHIN_S) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], done
    # Gloo of torch before 2.11 writes a line about its connections there.
    outputs = [re.sub(r"^\[Gloo\].*\n", "", output, flags=re.MULTILINE) for output, _ in done]
    assert sorted(outputs) == [f"rank {rank} of 2, 0 here: 1.5\n" for rank in range(2)], done
    if None not in numbers:
        assert [f"rank {number} of 2" in output for number, output in zip(numbers, outputs)] == [True, True]


def test_ranks_that_failed_are_shown_without_the_traceback_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '0': raise SystemExit(3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    rdzv = f"localhost:{free_ports(1)[0]}"
    command = [warm_python("torch"), "-m", "paceline", "run", "--nnodes", "1", "--rdzv", rdzv, "-n", "2"]
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=WITHIN_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"paceline: ranks of host {socket.gethostname()} failed\n" in done.stderr
    ends = "  rank 0: exit status 3", "  rank 1: killed by SIGKILL"
    assert any(end in done.stderr for end in ends), done.stderr  # the agent stops the later one
    assert "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr
