"""Two ranks train in restricted environments: containers, sandboxes and kernels that lack system calls.

Each restriction is real: a mount namespace made by bubblewrap, a seccomp filter, a control group. The weights
are compared with a training on the whole batch in numpy and float64, with gradients from a formula.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.harness import seccomp
from tests.launch.conftest import WITHIN_S

STEPS, RATE = 4, 0.1
INPUTS = np.random.default_rng(5).standard_normal((8, 3))
TARGETS = INPUTS @ np.array([[1.0], [-2.0], [0.5]])

SCRIPT = f"""
import json
import os
import shutil
import sys

import torch

import paceline.torch
from paceline import _core

paceline.torch.init_process_group()
rank = torch.distributed.get_rank()
with open(sys.argv[1] + "/data.json") as file:
    inputs, targets = (torch.tensor(each, dtype=torch.float64) for each in json.load(file))
layer = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(layer.weight)
model = paceline.torch.DistributedDataParallel(layer)
for _ in range({STEPS}):  # torch's optimizers import its compiler, which takes longer than all of this
    loss = torch.nn.functional.mse_loss(model(inputs[rank::2]), targets[rank::2])
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        layer.weight -= {RATE} * layer.weight.grad
found = {{
    "weight": layer.weight.tolist(),
    "path": model.gradient_path,
    "futex_waitv": _core.has_futex_waitv(),
    "robust_list": _core.has_robust_list(),
    "threads": os.environ["OMP_NUM_THREADS"],
    "proc/sys": os.path.exists("/proc/sys/kernel/osrelease"),
    "shm": shutil.disk_usage("/dev/shm").total,
}}
with open(f"{{sys.argv[1]}}/{{rank}}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""


def weight_of_one_process() -> np.ndarray:
    weight = np.zeros((1, 3))
    for _ in range(STEPS):
        weight -= RATE * 2 * (INPUTS @ weight.T - TARGETS).T @ INPUTS / len(INPUTS)
    return weight


def trained(
    folder: Path, container: Sequence[str] = (), prepare: Callable[[], object] | None = None
) -> list[dict[str, object]]:
    """The reports of both ranks of a job in a container, or of a launcher that `prepare` restricts."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "data.json").write_text(json.dumps([INPUTS.tolist(), TARGETS.tolist()]))
    command = [*container, sys.executable, "-m", "paceline", "run", "-n", "2", str(folder / "script.py")]
    done = subprocess.run(
        [*command, str(folder)], preexec_fn=prepare, capture_output=True, text=True, timeout=WITHIN_S, cwd="/"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        np.testing.assert_allclose(report["weight"], weight_of_one_process(), rtol=1e-12)
        assert report["path"] == "memory"
    return reports


def bubblewrap(folder: Path, *options: str) -> list[str]:
    """A command that runs another one in its own namespaces, where the folder is writable."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    command = ["bwrap", *options, "--bind", str(folder), str(folder)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"no namespace may be made here: {tried.stderr.strip()}")
    return command


def test_a_container_with_64_kilobytes_of_shared_memory(tmp_path):
    """The default of Docker is 64 MB. Paceline shares memory through a memory file instead."""
    container = bubblewrap(tmp_path, "--dev-bind", "/", "/", "--size", "65536", "--tmpfs", "/dev/shm")
    for report in trained(tmp_path, container):
        assert report["shm"] == 65536


def test_a_container_in_which_nothing_can_be_written(tmp_path):
    """The job runs, but is not recorded. (Not with torch, whose optimizers need a writable folder.)"""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    container = bubblewrap(tmp_path, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
    container += ["--remount-ro", str(tmp_path)]
    command = [*container, sys.executable, "-m", "paceline", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout
    assert "rank 1" in done.stdout


def test_a_container_without_proc_sys(tmp_path):
    container = bubblewrap(tmp_path, "--dev-bind", "/", "/", "--tmpfs", "/proc/sys", "--tmpfs", "/sys")
    for report in trained(tmp_path, container):
        assert not report["proc/sys"]


def mount_namespace(prepare: str) -> list[str]:
    """A command that runs another one in a mount namespace, after a line of shell has changed its mounts."""
    command = ["unshare", "--mount", "sh", "-c", f'{prepare}; exec "$@"', "sh"]
    tried = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True, timeout=60)
    if not tried or tried.returncode:
        pytest.skip("no namespace may be made here")
    return command


@pytest.mark.parametrize("launcher", ["run", "by hand"])
def test_a_container_without_proc(tmp_path, launcher):
    """The launcher reports it, and so does each rank that another launcher starts."""
    script = tmp_path / "script.py"
    script.write_text("import paceline\npaceline.init(address='127.0.0.1:1', timeout_s=60)\n")
    container = mount_namespace("mount -t tmpfs none /proc")
    if launcher == "run":
        commands = [[sys.executable, "-m", "paceline", "run", "-n", "2", str(script)]]
    else:
        job = ["WORLD_SIZE=2", f"PACELINE_JOB_ID={tmp_path}", sys.executable, str(script)]
        commands = [["env", f"RANK={rank}", *job] for rank in range(2)]
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen([*container, *command], stderr=subprocess.PIPE, text=True, cwd="/")
            )
            for command in commands
        ]
        for each in started:
            _, errors = each.communicate(timeout=WITHIN_S)
            assert each.returncode != 0
            assert "/proc is not mounted here" in errors
            assert "`mount -t proc proc /proc`" in errors


def refuse_what_sandboxes_lack() -> None:
    """Refuse the system calls that gVisor lacks. Kernels before 5.16, like WSL2's for long, lack some."""
    for call in ("futex_waitv", "set_robust_list", "get_robust_list", "pidfd_open", "process_vm_readv"):
        seccomp.refuse(call, errno.ENOSYS)


@pytest.mark.skipif(not seccomp.is_supported(), reason="the numbers of the system calls are not known")
def test_a_kernel_without_futex_waitv_and_robust_lists(tmp_path):
    """Ranks detect at the start that these are missing, and use other means."""
    for report in trained(tmp_path, prepare=refuse_what_sandboxes_lack):
        assert (report["futex_waitv"], report["robust_list"]) == (False, False)


@contextlib.contextmanager
def half_a_processor() -> Iterator[Path]:
    """A control group that may use half of the time of one CPU."""
    name = f"paceline-test-{os.getpid()}"
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    is_first = (first / "cgroup.procs").exists()
    group = (first if is_first else second) / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group may be made here: {error}")
    try:
        try:
            if is_first:
                (group / "cpu.cfs_quota_us").write_text("50000")
            else:
                (group / "cpu.max").write_text("50000 100000")
        except OSError as error:
            pytest.skip(f"no quota may be set here: {error}")
        yield group
    finally:
        group.rmdir()


def test_a_quota_of_half_a_processor(tmp_path):
    """If ranks spun while they wait, they would use up the processor time of the rank that they wait for."""
    with half_a_processor() as group:
        for report in trained(
            tmp_path, prepare=lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        ):
            assert report["threads"] == "1"
