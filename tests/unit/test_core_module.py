"""The built core as a library: its exports, imports and size; and the control groups that it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import _core
from tests.beside_torch import LIMITS, faults_of, simulate

CHECK = Path(__file__).parents[2] / "scripts" / "check-core"


def checked(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True)


def test_the_core_exports_its_init_function_and_uses_no_streams() -> None:
    done = checked(Path(_core.__file__))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_with_streams_is_found() -> None:
    done = checked(Path(torch.__file__).parent / "lib" / "libc10.so")
    assert done.returncode == 1
    assert "it must export PyInit__core alone" in done.stderr
    assert "it uses locales or streams: " in done.stderr


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups(tmp_path: Path, version: int) -> None:
    simulate(tmp_path, version)
    assert _core.cgroup_limits(str(tmp_path)) == LIMITS


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert _core.cgroup_limits(str(tmp_path)) == (None, None)


def test_it_forms_a_group_beside_torch() -> None:
    assert not faults_of(None)
