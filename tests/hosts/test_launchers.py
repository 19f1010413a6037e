"""Real launchers start ranks on two hosts: each rank finds its place, and averaged gradients are right."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from tests.hosts.namespaces import Hosts, why_not
from tests.hosts.slurm import Slurm, why_no_slurm
from tests.launch.mpi import KINDS, MPICH, command, find_mpirun
from tests.multiprocess import preempted
from tests.traces import read_trace

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
    """The output of the ranks, by rank; the mean of 2, 4, 6 and 8 is 5."""
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


BATCH = """\
#!/bin/sh
#SBATCH -N1 -n2 --overcommit
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append --output={folder}/output

export OMP_NUM_THREADS=1
cd {root}
srun --overcommit {python} -m tests.multiprocess.preempted {folder}/checkpoints train torch
status=$?
[ $status -eq 75 ] && scontrol requeue $SLURM_JOB_ID
exit $status
"""


def test_a_job_that_slurm_preempts_is_requeued_and_resumes(hosts: Hosts, tmp_path: Path) -> None:
    """The batch script is that of docs/preemption.md, but scancel sends the signal, not a time limit."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    undisturbed = preempted.launch(tmp_path / "undisturbed", "torch", "paceline", None)
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(BATCH.format(folder=tmp_path, root=ROOT, python=sys.executable))

    def job() -> preempted.Launch:
        return preempted.Launch(lines=output.read_text().splitlines() if output.exists() else [])

    def wait_for(word: str) -> dict[int, list[str]]:
        until = time.monotonic() + 2 * WITHIN_S
        while len(found := job().reported(word)) < preempted.RANKS:
            assert time.monotonic() < until, (word, job().lines[-20:], slurm.run(["scontrol", "show", "job"]))
            time.sleep(0.05)
        return found

    with Slurm(hosts, tmp_path) as slurm:
        number = slurm.run(["sbatch", "--parsable", str(script)]).strip()
        wait_for("made")
        slurm.run(["scancel", "--signal=USR1", number])
        stopped = wait_for("stopped")
        assert stopped[0] == stopped[1] and stopped[0][1] == str(preempted.PREEMPTED), stopped
        assert wait_for("over") == undisturbed.reported("over")
        until = time.monotonic() + WITHIN_S
        while slurm.run(["squeue", "--noheader"]).strip() and time.monotonic() < until:
            time.sleep(0.2)  # srun would outlive the daemons
    assert job().reported("resumed") == dict.fromkeys(range(preempted.RANKS), stopped[0][:1])


@pytest.mark.parametrize("kind", KINDS)
def test_mpirun(hosts: Hosts, kind: str, tmp_path: Path) -> None:
    if find_mpirun(kind) is None:
        pytest.skip(f"the mpirun of {kind} is not installed (Debian: openmpi-bin, mpich)")
    shell = str(hosts.write_remote_shell(tmp_path / "remote_shell"))
    starter, *arguments = command(kind, 4)
    if kind == MPICH:
        arguments += ["-launcher", "ssh", "-launcher-exec", shell, "-hosts", "node0:2,node1:2"]
    else:
        # Open MPI passes no other variables of the user to the second host.
        arguments += ["-x", "PACELINE_SECRET_FILE", "-x", "OMP_NUM_THREADS"]
        arguments += ["--mca", "plm_rsh_agent", shell, "--host", "node0:2,node1:2"]
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    variables = {"OMP_NUM_THREADS": "1", "PACELINE_SECRET_FILE": str(secret)}
    check(hosts.start(0, [starter, *arguments, *PROGRAM], variables, **OPTIONS))


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize("host", ["node0", "localhost"])
def test_pods_of_a_pytorchjob(hosts: Hosts, framework: str, host: str) -> None:
    """Kubeflow sets four variables, and does not declare which ranks share a host.

    In the pod of rank 0, MASTER_ADDR is its own name or, in many releases, localhost.
    """
    common = {"WORLD_SIZE": "2", "MASTER_PORT": "23456", "OMP_NUM_THREADS": "1"}
    common["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    own = {"RANK": "0", "MASTER_ADDR": host}, {"RANK": "1", "MASTER_ADDR": "node0"}
    ranks = [
        hosts.start(number, [*PROGRAM, framework], common | variables, **OPTIONS)
        for number, variables in enumerate(own)
    ]
    outputs = [rank.communicate(timeout=WITHIN_S)[0] for rank in ranks]
    place = "place 0 of 1" if framework == "torch" else "place"
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {number} of 2 on node{number}, {place}" in output and "3 by hosts" in output, output


def test_four_variables_by_hand(hosts: Hosts) -> None:
    """No variable declares which ranks share a host: the ranks find it by the host's name."""
    ranks = []
    for rank, host in enumerate(HOST_OF["in turn"]):
        variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29501"}
        ranks.append(hosts.start(host, PROGRAM, variables | {"OMP_NUM_THREADS": "1"}, **OPTIONS))
    outputs = [rank.communicate(timeout=WITHIN_S)[0] for rank in ranks]
    found = sorted(
        line[line.index("rank") :] for o in outputs for line in o.splitlines() if "by hosts" in line
    )
    assert found == expected_lines("in turn"), outputs


@pytest.mark.parametrize("how", ["torchrun, c10d", "torchrun, static", "Paddle's launch"])
def test_the_frameworks_own_launchers(hosts: Hosts, how: str, tmp_path: Path) -> None:
    launch, framework = ["-m", "torch.distributed.run"], "torch"
    launch += ["--nnodes", "2", "--nproc-per-node", "2"]
    own: list[list[str]] = [[], []]
    if how == "torchrun, c10d":
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29420"]
    elif how == "torchrun, static":
        launch += ["--master-addr", "node0", "--master-port", "29421"]
        own = [["--node-rank", str(host)] for host in range(2)]
    else:
        launch, framework = ["-m", "paddle.distributed.launch", "--nnodes", "2"], "paddle"
        launch += ["--nproc_per_node", "2", "--master", f"{hosts.address(0)}:29422"]
        launch += ["--log_dir", str(tmp_path / "logs")]
    script = tmp_path / "launched.py"
    script.write_text("from tests.hosts.launched import main\n\nmain()\n")
    launchers = []
    for host in range(2):
        command = [sys.executable, *launch, *own[host], str(script), framework]
        launchers.append(
            hosts.start(host, command, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, **OPTIONS)
        )
    outputs = [launcher.communicate(timeout=WITHIN_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)
    logs = [path.read_text() for path in (tmp_path / "logs").glob("workerlog.*")]
    text = "\n".join([*outputs, *logs])
    found = {line[line.index("rank") :] for line in text.splitlines() if "by hosts" in line}
    # The agents may choose which host is the first.
    found_places = {re.sub(r"node\d", "node", line) for line in found}
    place = "{} of 2" if framework == "torch" else "? of ?"  # Paddle's launcher sets its own variables
    places = {f"rank {rank} of 4 on node, place {place.format(rank % 2)}: 5 by hosts" for rank in range(4)}
    assert len(found) == 4 and found_places == places, text


def run_on(hosts: Hosts, host: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "run", "--nnodes", "2", "-n", "2", *options]
    return hosts.start(host, [*command, "-m", PROGRAM[-1]], {"OMP_NUM_THREADS": "1"}, **OPTIONS)


def test_paceline_run_on_two_hosts_that_do_not_know_their_own_names(hosts: Hosts, tmp_path: Path) -> None:
    for host in range(2):  # torch's agent would wait forever for a host of that name
        hosts.rename(host, f"unknown{host}")
    options = ("--rdzv", f"{hosts.address(0)}:29411", "--trace", str(tmp_path / "out.json"))
    launchers = [run_on(hosts, host, *options) for host in (1, 0)]
    outputs = [launcher.communicate(timeout=WITHIN_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)
    text = re.sub("unknown[01]", "unknown", "".join(outputs))
    lines = [line[line.index("rank") :] for line in text.splitlines() if "by hosts" in line]
    # The agents choose which host is the first.
    places = [f"rank {rank} of 4 on unknown, place {rank % 2} of 2: 5 by hosts" for rank in range(4)]
    assert sorted(lines) == places, "\n".join(outputs)
    each = [list(read_trace(tmp_path / f"out.unknown{host}.json")) for host in range(2)]
    assert sorted(each) == [["rank 0", "rank 1"], ["rank 2", "rank 3"]]
    folders = [str(tmp_path / f"out.unknown{host}.rings") for host in range(2)]
    assert main(["trace", *folders, "--output", str(tmp_path / "all.json")]) == 0
    assert sorted(read_trace(tmp_path / "all.json")) == [f"rank {rank}" for rank in range(4)]


def test_ranks_end_with_an_agent_that_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    """Otherwise the ranks would train on, on all hosts, without a launcher that watches them."""
    (tmp_path / "script.py").write_text(
        "import os, pathlib, time\n"
        "path = pathlib.Path(__file__).with_name('pid' + os.environ['RANK'])\n"
        "path.write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "paceline", "run", "--nnodes", "1", "-n", "2"]
    command += ["--rdzv", f"{hosts.address(0)}:29413", str(tmp_path / "script.py")]
    launcher = hosts.start(0, command, {}, **OPTIONS)
    deadline = time.monotonic() + WITHIN_S
    pids: list[str] = []
    while len(pids) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        pids = [text for path in tmp_path.glob("pid?") if (text := path.read_text())]
    (agent,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    os.kill(agent, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 128 + signal.SIGKILL, output
    assert "torch's agent on host node0 was ended by SIGKILL, and its ranks are ended with it" in output
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_paceline_run_names_the_address_where_it_finds_no_host(hosts: Hosts) -> None:
    launcher = run_on(hosts, 1, "--rdzv", "node0:29412", "--rdzv-timeout-s", "1")
    output, _ = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 2, output
    assert "Host node1 found nobody at --rdzv node0:29412 within 1.0 s" in output
    assert f"node0 stands for {hosts.address(0)} here, reached from {hosts.address(1)} (eth0)" in output


def test_paceline_run_names_the_hosts_that_the_first_host_waits_for(hosts: Hosts) -> None:
    """torch's agent itself waits without a message until its timeout."""
    launcher = run_on(hosts, 0, "--rdzv", "node0:29414", "--rdzv-timeout-s", "12")
    output, _ = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode not in (0, 2), output
    assert re.search(
        r"host node0 has waited \d+ s at --rdzv node0:29414 for the other hosts of --nnodes 2", output
    )
    assert re.search(r"host node0 has waited \d+ s for the other hosts, and started no rank\.", output), (
        output
    )
    assert "--nnodes 2 and --rdzv node0:29414 on each host" in output


def test_paceline_run_does_not_report_missing_hosts_if_ranks_fail_at_once(
    hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    command = [sys.executable, "-m", "paceline", "run", "--nnodes", "2", "-n", "1"]
    command += ["--rdzv", f"{hosts.address(0)}:29415", str(tmp_path / "script.py")]
    launchers = [hosts.start(host, command, {}, **OPTIONS) for host in range(2)]
    outputs = [launcher.communicate(timeout=WITHIN_S)[0] for launcher in launchers]
    for launcher, output in zip(launchers, outputs, strict=True):
        assert launcher.returncode == 1, output
        assert "started no rank" not in output, output


def test_paceline_run_refuses_a_name_that_cannot_be_resolved(hosts: Hosts) -> None:
    launcher = run_on(hosts, 1, "--rdzv", "node7:29412")
    output, _ = launcher.communicate(timeout=WITHIN_S)
    assert launcher.returncode == 2, output
    assert "--rdzv=node7 cannot be resolved on host node1" in output
