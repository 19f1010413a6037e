"""The built core as a library: what it exports, uses and holds; and the control groups that it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline import _core

CHECK = Path(__file__).parents[2] / "scripts" / "check-core"
GIB = 2**30

MOUNTS = {
    1: "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n",
    2: "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
}
OWN = {1: "9:memory:/job\n4:cpu,cpuacct:/job\n", 2: "0::/job\n"}
FILES = {
    1: {
        "memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{GIB}\n",
        "memory/job/memory.stat": "cache 5\ntotal_inactive_file 1000\ntotal_active_file 24\n",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    },
    2: {
        "job/memory.max": f"{4 * GIB}\n",
        "job/memory.current": f"{GIB}\n",
        "job/memory.stat": "anon 5\ninactive_file 1000\nactive_file 24\n",
        "job/cpu.max": "150000 100000\n",
        "memory.max": "max\n",
        "cpu.max": "max 100000\n",
    },
}


def simulate(root: Path, version: int) -> None:
    """Write what a machine shows whose control groups give this process 3 GiB and one and a half cores."""
    texts = {"proc/self/mountinfo": MOUNTS[version], "proc/self/cgroup": OWN[version]}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in FILES[version].items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


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
    assert _core.cgroup_limits(str(tmp_path)) == (3 * GIB + 1024, 1.5)


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert _core.cgroup_limits(str(tmp_path)) == (None, None)
