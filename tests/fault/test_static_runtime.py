"""The core with its own C++ runtime (-static-libstdc++), as Conda's and other toolchains link it.

The loader may give such a runtime the locales of another one in the same process, such as torch's; its own
streams then crash. So the core uses no streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beside_torch import faults_of
from tests.unit.test_core_module import checked

ROOT = Path(__file__).parents[2]
WITHIN_S = 900


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
    assert b"libstdc++.so" not in core.read_bytes()  # it has its own
    done = checked(core)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_forms_a_group_beside_torch(built: Path) -> None:
    assert not faults_of(built)
