"""The backend "paceline" under the real torchrun."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from tests.harness.warm import warm_python
from tests.multiprocess.torch_groups import needs_backend


def torchrun(folder, script, **environment):
    """Run two ranks, which may be restarted once."""
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
    """The agent's store survives, with what the ranks of the first attempt wrote there."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from datetime import timedelta

            attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
            if (attempt, rank) == ("0", "1"):
                # Wait until rank 0 joins: the faster it is, the more it has written to the store.
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
def test_ranks_over_gloo_get_a_warning_about_the_agents_store(tmp_path, is_shared):
    """As torch warns its own ranks; setting the variable that the warning names avoids it."""
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
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    done = torchrun(tmp_path, script, **({} if is_shared else {variable: "1"}))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"Set {variable}=1") == int(is_shared), done.stderr
