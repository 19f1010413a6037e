"""The core with a C++ runtime of its own (-static-libstdc++), as Conda's and other toolchains link it.

The loader may give such a runtime the locales of another one in the same process, as that of torch; its own
streams crash then. So the core has none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.test_core_module import GIB, checked, simulate

ROOT = Path(__file__).parents[2]
WITHIN_S = 900
# The package that is under test here is not the one that this environment has: no .pth file is read.
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import torch
import numpy as np
import paceline
from paceline import _core
assert _core.__file__.startswith({paths!r}[0]), _core.__file__
limits = [_core.cgroup_limits(root) for root in {roots!r}]
with paceline.init(address="127.0.0.1:1", timeout_s=100) as group:
    values = np.full(1000, group.rank + 1.0)
    group.all_reduce(values)
import json
print(json.dumps([limits, values.tolist()[::999]]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package. Its symbols are kept; short to compile."""
    folder = tmp_path_factory.mktemp("static")
    options = {
        "cmake.build-type": "None",
        "cmake.define.CMAKE_MODULE_LINKER_FLAGS": "-static-libstdc++ -static-libgcc",
        "install.strip": "false",
    }
    command = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-build-isolation"]
    command += [f"--config-settings={name}={value}" for name, value in options.items()]
    environment = {
        **os.environ,
        "CXXFLAGS": "-O1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*command, "--target", str(folder), str(ROOT)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_it_exports_and_holds_no_more_than_the_other_form(built: Path) -> None:
    (core,) = (built / "paceline").glob("_core*.so")
    assert b"libstdc++.so" not in core.read_bytes()  # it has one of its own
    done = checked(core)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_forms_a_group_beside_torch(built: Path, tmp_path: Path) -> None:
    for version in (1, 2):
        simulate(tmp_path / str(version), version)
    roots = [str(tmp_path / "1"), str(tmp_path / "2")]
    program = PROGRAM.format(paths=[str(built), str(Path(torch.__file__).parents[1])], roots=roots)
    variables = {**os.environ, "WORLD_SIZE": "2", "PACELINE_JOB_ID": f"static-{tmp_path}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", program],
            env={**variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=WITHIN_S)
        assert rank.returncode == 0, errors
        assert json.loads(output) == [[[3 * GIB + 1024, 1.5]] * 2, [3.0, 3.0]]
