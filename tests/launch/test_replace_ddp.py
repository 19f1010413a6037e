"""A script that uses the frameworks' own wrappers, unchanged, on ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import needs_paddle
from tests.launch.conftest import WITHIN_S

TRAINERS = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
TORCH = """
    assert "numpy" not in sys.modules  # nothing is imported before the script sets its variables
    import library  # the first to import torch
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    for wrap in (DistributedDataParallel, library.Wrapper):
        model = wrap(torch.nn.Linear(1, 1))
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
        assert type(model) is DistributedDataParallel
        print(type(model).__module__, model.module.weight.grad.item())
    print(torch.utils.data.DistributedSampler.__module__)
    dist.destroy_process_group()
"""
LIBRARY = """
    import torch
    from torch.nn.parallel.distributed import DistributedDataParallel as Wrapper
"""
NEVER = """
    import torch
    print("trained")
"""
PADDLE = """
    import paddle
    from paddle.distributed import fleet
    fleet.init(is_collective=True)
    model = fleet.distributed_model(paddle.nn.Linear(1, 1))
    model(paddle.full([1, 1], rank + 1.0)).sum().backward()
    print(type(model).__module__, model.weight.grad.item())
"""


@pytest.mark.parametrize(
    ("option", "sampler"), [("", "torch.utils.data.distributed"), ("=sampler", "paceline.data.sampler")]
)
def test_a_torch_script_and_a_library_wrap_in_ours(launcher, option, sampler):
    launcher.write(LIBRARY, "library.py")
    done = launcher.run("-n", "2", f"--replace-ddp{option}", "--prefix", "never", "script.py", script=TORCH)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9's
    assert sorted(printed) == sorted(
        2 * ["paceline.torch.ddp.distributed 1.5", "paceline.torch.ddp.distributed 1.5", sampler]
    )
    assert done.stderr.count("paceline: replaced torch.nn.parallel.DistributedDataParallel") == 1
    if not option:
        (shown,) = re.findall(r"^paceline: replaced .*$", TRAINERS.read_text(), re.M)
        assert re.search(re.sub(r"\d+", r"\\d+", re.escape(shown)), done.stderr)


def test_torchrun_and_a_script_that_never_wraps(launcher):
    """torchrun's own process imports torch as well, and says nothing."""
    script = launcher.write(NEVER, "script.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", str(script)],
        env=os.environ | {"PACELINE_REPLACE_DDP": "1"},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
    assert done.stderr.count("paceline: replaced") == 1
    assert done.stderr.count("paceline: warning: no model was wrapped") == 1


@needs_paddle
def test_fleet_wraps_in_ours(launcher):
    done = launcher.run("-n", "2", "--replace-ddp", "--prefix", "never", "script.py", script=PADDLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("paceline.paddle.ddp.parallel 1.5") == 2, done.stdout
    assert done.stderr.count("paceline: replaced paddle.DataParallel") == 1


def test_a_wrong_value_starts_nothing(launcher):
    done = launcher.run("-n", "2", "--replace-ddp=samplers", "script.py", script="print('started')")
    assert done.returncode == 2 and not done.stdout
    assert "--replace-ddp=samplers is not usable" in done.stderr
