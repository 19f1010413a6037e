"""The backend "paceline" under torchrun, the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


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
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"), str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1: 2 ranks") == 2, done.stdout
