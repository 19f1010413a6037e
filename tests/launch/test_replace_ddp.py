"""--replace-ddp: an unchanged script with a framework's own wrapper trains with Paceline's class."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import needs_paddle
from tests.harness.warm import warm_python
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
    dist.destroy_process_group()
"""
LIBRARY = """
    import torch
    from torch.nn.parallel.distributed import DistributedDataParallel as Wrapper
"""
BY_ITSELF = """
    import paceline.torch
    import torch
    paceline.torch.replace_ddp()
    print(torch.nn.parallel.DistributedDataParallel.__module__)
"""
CHILDREN = """
    import multiprocessing, subprocess

    CODE = "import script; script.child(0, 'subprocess')"

    def child(number, way):
        import torch
        print(way, torch.nn.parallel.DistributedDataParallel.__module__, end=" ")
        print(torch.utils.data.DistributedSampler.__module__, flush=True)

    if __name__ == "__main__":
        for way in sys.argv[1:]:
            if way == "torch":
                import torch.multiprocessing
                torch.multiprocessing.spawn(child, (way,))
            elif way == "subprocess":
                subprocess.run([sys.executable, "-c", CODE], check=True)
            else:
                process = multiprocessing.get_context(way).Process(target=child, args=(0, way))
                process.start()
                process.join()
"""
PADDLE = """
    import paddle
    from paddle.distributed import fleet
    fleet.init(is_collective=True)
    model = fleet.distributed_model(paddle.nn.Linear(1, 1))
    model(paddle.full([1, 1], rank + 1.0)).sum().backward()
    print(type(model).__module__, model.weight.grad.item())
"""


def test_a_torch_script_and_a_library_wrap_in_pacelines_class(launcher):
    launcher.write(LIBRARY, "library.py")
    done = launcher.run("-n", "2", "--replace-ddp", "--prefix", "never", "script.py", script=TORCH)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.9's
    assert printed == 4 * ["paceline.torch.ddp.distributed 1.5"]
    assert done.stderr.count("paceline: replaced torch.nn.parallel.DistributedDataParallel") == 1
    (shown,) = re.findall(r"^paceline: replaced .*$", TRAINERS.read_text(), re.M)
    assert re.search(re.sub(r"\d+", r"\\d+", re.escape(shown)), done.stderr)


@pytest.mark.parametrize(
    ("option", "command", "ways", "sampler"),
    [
        # "torch" spawns, and imports torch in the parent: a later fork inherits that import.
        ("", ["script.py"], ["torch", "fork", "forkserver", "subprocess"], "torch.utils.data.distributed"),
        # With -m, a spawned process finds the script in another way.
        ("=sampler", ["-m", "script"], ["spawn"], "paceline.data.distributed_sampler"),
    ],
)
def test_processes_that_a_script_starts_get_pacelines_class(launcher, option, command, ways, sampler):
    """Forks, children of multiprocessing and of torch.multiprocessing, and any other Python."""
    done = launcher.run("-n", "1", f"--replace-ddp{option}", *command, *ways, script=CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{way} paceline.torch.ddp.distributed {sampler}" for way in ways]


def test_torchrun_and_a_script_that_replaces_the_class_by_itself(launcher):
    """The script then wraps no model, which is reported once."""
    script = launcher.write(BY_ITSELF, "script.py")
    command = [warm_python("torch"), "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("paceline.torch.ddp.distributed") == 2
    assert done.stderr.count("paceline: replaced") == 1
    assert done.stderr.count("paceline: warning: no model was wrapped") == 1


def test_a_users_sitecustomize_still_runs_and_sys_path_does_not_change(launcher):
    """Python imports only the first module of this name, and Paceline's comes first on the path."""
    folder = launcher.folder / "own"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("marker = 'own'\n")
    script = "import sitecustomize; print(sitecustomize.marker, sys.path)"
    printed = []
    for option in ([], ["--replace-ddp"]):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = launcher.run("-n", "1", *option, "script.py", script=script, env=environment)
        assert done.returncode == 0 and not done.stderr, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith("own [")


def test_another_python_without_paceline_is_left_alone(launcher):
    """With -S, Python finds no installed package."""
    script = """
        import subprocess
        code = "import sitecustomize; print('started')"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    """
    done = launcher.run("-n", "1", "--replace-ddp", "script.py", script=script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_a_python_that_ignores_its_variables_is_refused(launcher):
    launcher.write("print('started')")
    done = subprocess.run(
        [sys.executable, "-E", "-m", "paceline", "run", "-n", "2", "--replace-ddp", "script.py"],
        cwd=launcher.folder,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 2 and not done.stdout
    assert "Python reads no PYTHONPATH" in done.stderr and "replace_ddp()" in done.stderr


def test_paceline_is_not_imported_in_processes_that_did_not_ask_for_it(tmp_path):
    """Neither in a Python of Paceline's environment nor in a rank without --replace-ddp."""
    code = "import sys; print([name for name in sys.modules if name.startswith(('paceline', '_paceline'))])"
    (tmp_path / "script.py").write_text(code)
    for command in ([], ["-m", "paceline", "run", "-n", "1"]):
        done = subprocess.run(
            [sys.executable, *command, str(tmp_path / "script.py")],
            env=os.environ | {"PACELINE_REPLACE_DDP": "1"},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@needs_paddle
def test_fleet_wraps_in_pacelines_class(launcher):
    done = launcher.run("-n", "2", "--replace-ddp", "--prefix", "never", "script.py", script=PADDLE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("paceline.paddle.ddp.parallel 1.5") == 2, done.stdout
    assert done.stderr.count("paceline: replaced paddle.DataParallel") == 1


def test_a_wrong_value_starts_nothing(launcher):
    done = launcher.run("-n", "2", "--replace-ddp=samplers", "script.py", script="print('started')")
    assert done.returncode == 2 and not done.stdout
    assert "--replace-ddp=samplers is not usable" in done.stderr
