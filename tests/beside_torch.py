"""Tests a core beside torch in one process, however it was linked: `python -m tests.beside_torch FOLDER`.

Two ranks import torch, then the package in FOLDER (an unpacked wheel, for example). They read the control
groups of simulated machines and form a group. If a core has its own C++ runtime, the loader may merge some of
its symbols with those of torch's; streams and locales then crash (docs/design/core.md, The built library).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

GIB = 2**30
LIMITS = (3 * GIB + 1024, 1.5)
"""The limits of the machines that `simulate` makes."""
_WITHIN_S = 900
_MOUNTS = {
    1: "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n",
    2: "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
}
_OWN = {1: "9:memory:/job\n4:cpu,cpuacct:/job\n", 2: "0::/job\n"}
_FILES = {
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
_PROGRAM = """
import json, sys
paths, roots = json.loads(sys.argv[1])
sys.path[:0] = paths
import torch
import numpy as np
import paceline
from paceline import _core
assert not paths or _core.__file__.startswith(paths[0]), _core.__file__
limits = [_core.cgroup_limits(root) for root in roots]
with paceline.init(address="127.0.0.1:1", timeout_s=100) as group:
    values = np.full(1000, group.rank + 1.0)
    group.all_reduce(values)
print(json.dumps([limits, values.tolist()[::999]]))
"""


def simulate(root: Path, version: int) -> None:
    """Write the files of a machine whose control groups (version 1 or 2) give this process LIMITS."""
    texts = {"proc/self/mountinfo": _MOUNTS[version], "proc/self/cgroup": _OWN[version]}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in _FILES[version].items()}
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def faults_of(folder: Path | None) -> list[str]:
    """The failures of ranks that use the package of a folder; with None, the installed package."""
    import torch

    paths = [str(folder.resolve()), str(Path(torch.__file__).parents[1])] if folder else []
    with tempfile.TemporaryDirectory(prefix="paceline-beside-torch-") as place:
        roots = [f"{place}/{version}" for version in (1, 2)]
        for version in (1, 2):
            simulate(Path(roots[version - 1]), version)
        # Python reads no .pth file of this folder: such a file would add the installed package.
        command = [sys.executable, *(["-S"] if folder else []), "-X", "faulthandler", "-c", _PROGRAM]
        command.append(json.dumps([paths, roots]))
        variables = {**os.environ, "WORLD_SIZE": "2", "PACELINE_JOB_ID": place}
        ranks = [
            subprocess.Popen(
                command,
                env={**variables, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        faults = []
        for number, rank in enumerate(ranks):
            output, errors = rank.communicate(timeout=_WITHIN_S)
            if rank.returncode != 0:
                faults.append(f"rank {number} of 2 ended with status {rank.returncode}:\n{errors}")
            elif json.loads(output) != (expected := [[list(LIMITS)] * 2, [3.0, 3.0]]):
                faults.append(f"rank {number} of 2 printed {output.strip()} instead of {expected}")
        return faults


def main() -> int:
    """Print the faults; return the exit status."""
    faults = faults_of(Path(sys.argv[1]))
    for fault in faults:
        print(f"{sys.argv[1]}: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
