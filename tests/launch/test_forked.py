"""Ranks that are forked from one process with torch imported behave like separately started ranks."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.forked import BY_OPTIMIZERS, makes_optimizers, modules_before_all, shared_start
from tests.launch.conftest import WITHIN_S, Launcher, read_pids, seconds_until_gone

# A fake torch, for tests that need no real one. It shows which process imported it.
TORCH = """
    import os, time
    time.sleep(float(os.environ.get("IMPORT_TAKES_S", "0")))
    if os.environ.get("IMPORT_FAILS"):
        raise ImportError("libtorch.so is not there")
    IMPORTED_BY = os.getpid()
    class default_generator:
        seed = staticmethod(lambda: None)
"""
SHOWN = """
    '''What a rank sees.'''
    import json, os, random, signal, sys, threading
    import numpy as np
    import torch

    class Own:
        pass

    lines = open("/proc/self/status").read().splitlines()
    status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
    differing = {"PACELINE_JOB_ID", "PADDLE_MASTER", "PACELINE_TRACE_DIR", "PACELINE_FORK_RANKS"}
    folder = "/proc/self/fd"
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "name": __name__, "file": __file__,
        "doc": __doc__, "spec": repr(__spec__), "loader": type(__loader__).__name__,
        "package": repr(__package__),
        "class": f"{Own.__module__} {sys.modules['__main__'].Own is Own}",
        "environment": {
            name: value for name, value in os.environ.items()
            if not ("PORT" in name or "ENDPOINT" in name or name in differing)
        },
        "cores": sorted(os.sched_getaffinity(0)), "group": os.getpgrp() == os.getpid(),
        "folder": os.getcwd(),
        "descriptors": sorted(
            os.readlink(f"{folder}/{fd}").split(":")[0] for fd in os.listdir(folder)
            if os.path.lexists(f"{folder}/{fd}")
        ),
        "streams": [os.isatty(fd) for fd in (0, 1, 2)], "input": sys.stdin.read(),
        "handlers": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "ignored": status["SigIgn"], "blocked": status["SigBlk"], "threads": threading.active_count(),
        "flags": str(sys.flags),
    }))
    print(json.dumps([np.random.rand(), random.random(), os.urandom(4).hex()]), file=sys.stderr)
    print("parent", os.getppid(), torch.IMPORTED_BY, os.getpid(), file=sys.stderr)
"""


@pytest.fixture
def fake_torch(launcher: Launcher) -> dict[str, str]:
    """The environment of a launcher whose Python finds the fake torch."""
    folder = launcher.folder / "found"
    folder.mkdir()
    (folder / "torch.py").write_text(textwrap.dedent(TORCH))
    return {**os.environ, "PYTHONPATH": str(folder)}


def launch(
    launcher: Launcher, script: str, environment: dict[str, str], *arguments: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Write a script without changes, and run it on two ranks."""
    (launcher.folder / "script.py").write_text(textwrap.dedent(script))
    process = launcher.start(
        "-n", "2", "--prefix", "never", "script.py", *arguments, env=environment, **options
    )
    out, err = process.communicate(timeout=WITHIN_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import torch", ("torch",)),
        ("'''Doc.'''\nfrom __future__ import annotations\nimport os, sys\nimport torch.nn as nn", ("torch",)),
        ("import numpy as np\nimport torch", ("torch",)),
        ("from torch import nn\nimport my_settings", ("torch",)),
        ("import torch\nfrom paceline.torch import DistributedDataParallel", ("torch", "paceline.torch")),
        ("from paceline import torch", ("paceline.torch",)),
        ("import torch\nx = 1\nimport paceline.torch", ("torch",)),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch", ()),
        ("import my_settings\nimport torch", ()),
        ("from . import torch", ()),
        ("if True:\n    import torch", ()),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ()),
        ("import torchvision", ()),
        ("import torch; (", ()),
        ("", ()),
    ],
)  # fmt: skip
def test_only_modules_that_the_script_imports_first_are_imported_for_all(tmp_path, script, found):
    path = tmp_path / "script.py"
    path.write_text(script)
    assert modules_before_all(path) == found
    assert modules_before_all(tmp_path / "missing.py") == ()


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import torch\ntorch.optim.SGD(p, 0.1)", True),
        ("import torch\nfrom torch.optim import Adam", True),
        ("import torch\nimport torch.optim as o", True),
        ("import torch\nstep = build_optimizer()", True),
        ("import torch\nprint('optim')", False),
        ("import os, torch\nos.environ['TORCH_LOGS'] = 'dynamo'\ntorch.optim.SGD(p, 0.1)", False),
        ("import os, torch\nos.environ.setdefault('TORCHDYNAMO_DISABLE', '1')\ntorch.optim.SGD(p)", False),
        ("import torch\n(", False),
    ],
)
def test_modules_of_optimizers_are_imported_for_all_if_ranks_share_cores(tmp_path, script, found):
    path = tmp_path / "script.py"
    path.write_text(script)
    assert makes_optimizers(path) == found
    for num_cores, is_shared in ((4, found), (5, False)):
        shared = shared_start([str(path)], 5, num_cores, {})
        assert shared is None or (BY_OPTIMIZERS in shared.modules) == is_shared
    assert (shared is None) == script.endswith("\n(")


def test_a_forked_rank_sees_the_same_as_a_separately_started_one(launcher, fake_torch):
    (launcher.folder / "input").write_text("typed")
    seen, parents = {}, {}
    for forks in ("1", "0"):
        with open(launcher.folder / "input") as typed:
            environment = {**fake_torch, "PACELINE_FORK_RANKS": forks}
            done = launch(launcher, SHOWN, environment, "--lr", "a b", stdin=typed)
        assert done.returncode == 0, done.stderr
        ranks = [json.loads(line) for line in done.stdout.splitlines()]
        seen[forks] = sorted(ranks, key=lambda each: each["environment"]["RANK"])
        drawn = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
        assert len(drawn) == 2 and not set(drawn[0]) & set(drawn[1])  # the ranks draw different numbers
        lines = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("parent")]
        assert len({parent for parent, _, _ in lines}) == 1  # the supervisor
        parents[forks] = [importer == own for _, importer, own in lines]
        importers = {importer for _, importer, _ in lines}
        assert len(importers) == (1 if forks == "1" else 2)
    assert parents == {"1": [False, False], "0": [True, True]}
    for forked, alone in zip(seen["1"], seen["0"], strict=True):
        assert {key: forked[key] for key in forked if forked[key] != alone[key]} == {}


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("def f():\n    raise ValueError('bad')\nf()", 1, "ValueError: bad"),
        ("raise ValueError('bad') from KeyError(1)", 1, "direct cause"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("import signal; signal.raise_signal(signal.SIGINT)", 130, "KeyboardInterrupt"),
        ("os.abort()", 134, "Fatal Python error: Aborted"),
        ("sys.excepthook = lambda *_: print('mine', file=sys.stderr)\nraise ValueError", 1, "mine"),
        ("compile('(', 'x.py', 'exec')", 1, "SyntaxError"),
        ("import atexit; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end"),
    ],
)
def test_a_forked_program_ends_as_a_separately_started_one(launcher, fake_torch, ending, status, said):
    # One rank fails, so that the report is about that one.
    script = (
        f"import os, sys\nimport torch\nif os.environ['RANK'] == '1':\n{textwrap.indent(ending, '    ')}\n"
    )
    found = []
    for forks in ("1", "0"):
        done = launch(launcher, script, {**fake_torch, "PACELINE_FORK_RANKS": forks})
        lines = [line for line in done.stderr.splitlines() if "pid" not in line and "0x" not in line]
        if "Fatal" in said:  # faulthandler writes these stacks in C, and cannot leave frames out
            lines = [line for line in lines if "fork_template.py" not in line]
        found.append((done.returncode, done.stdout, lines))
        assert done.returncode == status and said in done.stderr, done.stderr
        assert not any("template" in line for line in lines)
    assert found[0] == found[1]


def test_each_rank_reports_that_torch_cannot_be_imported(launcher, fake_torch):
    done = launch(launcher, "import torch", {**fake_torch, "IMPORT_FAILS": "1"})
    assert done.returncode == 1
    assert "ImportError: libtorch.so is not there" in done.stderr and "template" not in done.stderr


def test_ranks_start_separately_if_forks_are_not_the_supervisors_children(launcher, fake_torch):
    """As with the Python of a test server, the forked ranks do not become children of the supervisor."""
    elsewhere = """
        import ctypes, subprocess, sys, types
        import paceline.launch.forked as forked
        from paceline.cli import main

        def popen(*arguments, **options):
            ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans go elsewhere
            return subprocess.Popen(*arguments, **options)

        forked.subprocess = types.SimpleNamespace(Popen=popen)
        sys.exit(main(["run", "-n", "2", "--prefix", "never", "script.py"]))
    """
    (launcher.folder / "elsewhere.py").write_text(textwrap.dedent(elsewhere))
    (launcher.folder / "script.py").write_text(
        "import os\nimport torch\nprint(torch.IMPORTED_BY == os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, "elsewhere.py"],
        cwd=launcher.folder,
        env=fake_torch,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_is_stopped_while_torch_is_imported(launcher, fake_torch, signum):
    (launcher.folder / "script.py").write_text("import torch\nprint('not reached')")
    process = launcher.start("-n", "2", "script.py", env={**fake_torch, "IMPORT_TAKES_S": "1000"})
    supervisor = child_of(process.pid)
    template = child_of(supervisor)
    process.send_signal(signum)
    out, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[signum]
    assert out == "" and seconds_until_gone([supervisor, template]) < 30


def child_of(pid: int) -> int:
    """The child of a process, once it has one that runs a program."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            return int(children[0])


def test_a_rank_that_is_killed_ends_the_job(launcher, fake_torch):
    script = "import os, time\nimport torch\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)"
    (launcher.folder / "script.py").write_text(script)
    process = launcher.start("-n", "2", "script.py", env=fake_torch)
    pids = read_pids(process, 2)
    os.kill(pids[0], signal.SIGKILL)
    _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 137 and "SIGKILL" in err
    assert seconds_until_gone(pids) < 30


@pytest.mark.parametrize("which", ["launcher", "supervisor"])
def test_ranks_end_with_their_launcher_or_supervisor(launcher, fake_torch, which):
    script = "import os, time\nimport torch\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)"
    (launcher.folder / "script.py").write_text(script)
    process = launcher.start("-n", "2", "script.py", env=fake_torch)
    pids = read_pids(process, 2)
    os.kill({"launcher": process.pid, "supervisor": child_of(process.pid)}[which], signal.SIGKILL)
    assert seconds_until_gone(pids) < 30


def test_with_torch_itself(launcher):
    script = """
        import os
        import torch
        from torch.utils.data import DataLoader, Dataset
        from paceline.torch import DistributedDataParallel

        class Numbers(Dataset):  # its workers find it in the script
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return torch.tensor([float(index)])

        if __name__ == "__main__":
            seed = torch.initial_seed()
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(1, 1))
            spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
            loader = DataLoader(Numbers(), **(spawned if os.environ["RANK"] == "1" else {}))
            total = sum(float(batch) for batch in loader)
            model(torch.tensor([[total]])).sum().backward()
            print("seed", seed)
            print("gradient", model.module.weight.grad.item())
    """
    done = launch(launcher, script, dict(os.environ))
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[:2] == ["gradient 6.0"] * 2
    assert lines[2] != lines[3]  # torch draws a seed for each process that sets none


def test_ranks_are_forked_under_a_limit_of_address_space(launcher, fake_torch):
    """The template process reads its instructions in chunks, without a buffer of 1 GiB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))

    script = "import torch\nimport os\nprint(torch.IMPORTED_BY, os.getpid())"
    done = launch(launcher, script, fake_torch, preexec_fn=limit)
    assert done.returncode == 0 and not done.stderr, done.stderr
    importers = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(importers) == 2 and len(set(importers)) == 1  # one process, so the ranks were forked
