"""The mpirun of Open MPI and of MPICH starts ranks on this machine, without a framework."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.launch.conftest import WITHIN_S
from tests.launch.mpi import KINDS, command, find_mpirun

SCRIPT = """
    import numpy as np
    import paceline
    from paceline.env import read_rank_environment

    with paceline.init(timeout_s=60) as group:
        array = np.full(3, group.rank + 1.0)
        group.all_reduce(array)
    place = read_rank_environment()
    assert group.world_size == place.local_world_size, place
    assert place.local_rank == group.rank, place
    assert place.master_addr == "127.0.0.1" and place.master_port, place
    print(f"rank {group.rank}: {array[0]:g} in {place.job_id}\\n", end="", flush=True)
"""


def run(kind, folder, **environment):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return subprocess.Popen(
        [*command(kind, 4), sys.executable, str(path)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_jobs_of_mpirun_at_once_find_their_own_ranks(kind, tmp_path):
    if find_mpirun(kind) is None:
        pytest.skip(f"the mpirun of {kind} is not installed (Debian: openmpi-bin, mpich)")
    jobs = [run(kind, tmp_path) for _ in range(2)]
    outputs = [job.communicate(timeout=WITHIN_S)[0] for job in jobs]
    ids = set()
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, output
        lines = sorted(line for line in output.splitlines() if line.startswith("rank"))
        assert [line.partition(" in ")[0] for line in lines] == [f"rank {rank}: 10" for rank in range(4)]
        own = {line.partition(" in ")[2] for line in lines}
        assert len(own) == 1, output
        ids |= own
    assert len(ids) == 2, outputs
