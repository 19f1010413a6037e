"""Runs a program on two ranks and compares its losses with the library's own DDP and with Paceline's.

Each rank of a program writes `RANK.json` into a given folder: its losses, and the module of the wrapper.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 400  # starting two processes that import a trainer takes most of a minute on a busy machine
OURS = "paceline.torch.ddp.distributed"
TORCHS = "torch.nn.parallel.distributed"


def paceline_run() -> list[str]:
    """The command line that starts two ranks, without the program."""
    return [sys.executable, "-m", "paceline", "run", "-n", "2"]


def accelerate_launch() -> list[str]:
    """The same with Accelerate's launcher, with options for GPUs: with --cpu it starts one process."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    options = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*launcher, *options, "--main_process_port", "0"]


def ended(
    command: Sequence[str], within_s: float = WITHIN_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        cwd=ROOT,
        env=os.environ | variables,
    )


def reports(folder: Path, command: Sequence[str], **variables: str) -> list[dict[str, Any]]:
    """Run a command that must succeed, and return the reports of its two ranks."""
    done = ended(command, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [report_of(folder, rank) for rank in range(2)]


def report_of(folder: Path, rank: int | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


def assert_same_curve(losses: Sequence[float], others: Sequence[float]) -> None:
    """Check that all losses are the same, except for rounding, and that the model has learnt."""
    assert len(losses) == len(others) > 4
    np.testing.assert_allclose(losses, others, rtol=2e-5, atol=2e-6)
    half = len(losses) // 2
    assert np.mean(losses[half:]) < np.mean(losses[:half]), losses
