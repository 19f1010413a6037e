"""The backend "paceline" under torchrun, the real one."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from tests.harness.warm import warm_python
from tests.multiprocess.torch_groups import needs_backend


def torchrun(folder, script, **environment):
    """Two ranks, which may be restarted once."""
    command = (warm_python("torch"), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return subprocess.run(
        [*command, "--max-restarts", "1", "--log-dir", str(folder / "logs"), str(script)],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


@needs_backend
def test_a_rank_that_died_before_it_joined_costs_one_restart(tmp_path):
    """The agent's store lives on, and with it what the ranks of the first attempt wrote there."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from datetime import timedelta

            attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
            if (attempt, rank) == ("0", "1"):
                # Not before rank 0 has come: the faster that one is, the more it has written.
                os.read(os.open("joining", os.O_RDONLY), 1)
                os.kill(os.getpid(), signal.SIGKILL)

            import torch
            import torch.distributed as dist
            import paceline.torch

            if (attempt, rank) == ("0", "0"):
                os.write(os.open("joining", os.O_WRONLY), b"!")
            dist.init_process_group("paceline", timeout=timedelta(seconds=40))
            total = torch.ones(1)
            dist.all_reduce(total)
            print(f"attempt {attempt}: {total.item():g} ranks\\n", end="", flush=True)
            dist.destroy_process_group()
            """
        )
    )
    os.mkfifo(tmp_path / "joining")
    done = torchrun(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1: 2 ranks") == 2, done.stdout


@pytest.mark.parametrize("is_shared", [True, False])
def test_ranks_over_gloo_are_warned_of_the_agents_store(tmp_path, is_shared):
    """As torch itself tells its ranks; and the cure that is named ends it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            import torch.distributed as dist
            from paceline.torch import DistributedDataParallel

            dist.init_process_group("gloo")
            DistributedDataParallel(torch.nn.Linear(2, 2))
            dist.destroy_process_group()
            """
        )
    )
    cure = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    done = torchrun(tmp_path, script, **({} if is_shared else {cure: "1"}))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"Set {cure}=1") == int(is_shared), done.stderr
