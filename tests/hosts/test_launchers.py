"""Two hosts of two ranks, started by real launchers: each rank knows its place, and the means are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.namespaces import Hosts, why_not
from tests.hosts.slurm import Slurm, why_no_slurm
from tests.launch.mpi import KINDS, MPICH, command, find_mpirun

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

PROGRAM = [sys.executable, "-m", "tests.hosts.launched"]
ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 150
OPTIONS: dict[str, Any] = {
    "cwd": ROOT,
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
    "text": True,
}
HOST_OF = {"in blocks": (0, 0, 1, 1), "in turn": (0, 1, 0, 1)}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "1gbit") as hosts:
        yield hosts


def expected_lines(placement: str) -> list[str]:
    """What the ranks print, by rank; the mean of 2, 4, 6 and 8 is 5."""
    layout = HOST_OF[placement]
    return [
        f"rank {rank} of 4 on node{host}, place {layout[:rank].count(host)} of 2: 5 by hosts"
        for rank, host in enumerate(layout)
    ]


def check(launcher: subprocess.Popen[str], placement: str = "in blocks") -> None:
    output, _ = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 0, output
    found = sorted(line[line.index("rank") :] for line in output.splitlines() if "by hosts" in line)
    assert found == expected_lines(placement), output


@pytest.mark.parametrize("placement", HOST_OF)
def test_srun(hosts: Hosts, placement: str, tmp_path: Path) -> None:
    if reason := why_no_slurm():
        pytest.skip(reason)
    order = {"in blocks": "block", "in turn": "cyclic"}[placement]
    with Slurm(hosts, tmp_path) as slurm:
        check(slurm.srun(["-N2", "-n4", "-m", order, *PROGRAM], **OPTIONS), placement)


@pytest.mark.parametrize("kind", KINDS)
def test_mpirun(hosts: Hosts, kind: str, tmp_path: Path) -> None:
    if find_mpirun(kind) is None:
        pytest.skip(f"the mpirun of {kind} is not installed (Debian: openmpi-bin, mpich)")
    shell = str(hosts.write_remote_shell(tmp_path / "remote_shell"))
    starter, *arguments = command(kind, 4)
    if kind == MPICH:
        arguments += ["-launcher", "ssh", "-launcher-exec", shell, "-hosts", "node0:2,node1:2"]
    else:
        arguments += ["--mca", "plm_rsh_agent", shell, "--host", "node0:2,node1:2"]
    # The option that places ranks comes last: what follows it is the program.
    check(hosts.start(0, [starter, *arguments, *PROGRAM], {"OMP_NUM_THREADS": "1"}, **OPTIONS))
