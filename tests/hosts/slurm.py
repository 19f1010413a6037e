"""A real Slurm on hosts of `namespaces`: slurmctld on host 0, and a slurmd on each.

Debian's packages are slurmctld, slurmd and slurm-client. There is no authentication (auth/none) and no
accounting, because the tests only start tasks.

python -m tests.hosts.slurm -N2 -n4 python train.py    passes its arguments to srun, on two hosts
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hosts.namespaces import Hosts, HostsError, why_not

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_READY_WITHIN_S = 30.0

_CONFIGURATION = """\
ClusterName=paceline
SlurmctldHost=node0({address})
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=node[0-{last}] Default=YES State=UP OverSubscribe=FORCE
"""


def why_no_slurm() -> str:
    """Return which programs of Slurm this machine lacks, or "" if it has all."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed (Debian: slurmctld, slurmd, slurm-client)"
    return ""


class Slurm:
    """A context manager that runs a Slurm cluster on hosts.

    Args:
        hosts: The hosts; end them after the cluster.
        folder: The folder of its configuration, state and logs.
        cpus: The number of CPUs that Slurm believes each host has.
    """

    def __init__(self, hosts: Hosts, folder: Path, cpus: int = 4) -> None:
        self._hosts = hosts
        self._folder = folder
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        nodes = [f"NodeName=node{h} NodeAddr={hosts.address(h)} CPUs={cpus}" for h in range(hosts.count)]
        text = _CONFIGURATION.format(
            address=hosts.address(0), folder=folder, nodes="\n".join(nodes), last=hosts.count - 1
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()
        self._daemons: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Slurm:
        try:
            self._daemons.append(self._start(0, ["slurmctld", "-D", "-c"]))
            for host in range(self._hosts.count):
                (self._folder / f"spool-node{host}").mkdir()
                self._daemons.append(self._start(host, ["slurmd", "-D", "-N", f"node{host}"]))
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)  # otherwise the hosts kill it

    def srun(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start srun on host 0. Ranks may share cores (--overcommit)."""
        environment = self._environment | {"OMP_NUM_THREADS": "1"}
        return self._hosts.start(0, ["srun", "--overcommit", *arguments], environment, **options)

    def run(self, command: Sequence[str]) -> str:
        """Run another program of Slurm on host 0, and return what it prints."""
        asked = self._hosts.start(
            0, command, self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output: str = asked.communicate(timeout=_READY_WITHIN_S)[0]
        return output

    def _start(self, host: int, command: Sequence[str]) -> subprocess.Popen[Any]:
        with open(self._folder / f"{command[0]}-{host}.out", "wb") as output:
            return self._hosts.start(
                host, command, self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_WITHIN_S
        state = ""
        while time.monotonic() < deadline:
            state = self.run(["sinfo", "--noheader", "--Node", "--format=%N %T"])
            if state.count(" idle") == self._hosts.count:
                return
            time.sleep(0.2)
        logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in self._folder.glob("*.log"))
        raise HostsError(f"Slurm was not ready after {_READY_WITHIN_S:g} s: {state}\n{logs}")


def main() -> int:
    if reason := why_no_slurm() or why_not():
        print(f"python -m tests.hosts.slurm: {reason}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        Hosts(2, "1gbit") as hosts,
        Slurm(hosts, Path(folder)) as slurm,
    ):
        return slurm.srun(sys.argv[1:], cwd=os.getcwd()).wait()


if __name__ == "__main__":
    sys.exit(main())
