"""If the settings of two hosts contradict each other, every rank raises at once and names ranks and hosts.

Before a framework forms its group, both front ends compare settings through the framework's own store. So
each test runs with both stores, and with each framework's variable for the address of rank 0. Further cases
of the same kind run with torch only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.warm import warm_python
from tests.hosts.namespaces import Hosts, why_not
from tests.hosts.test_launchers import OPTIONS, PROGRAM

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "paddle"])
ADDRESS = {"torch": "MASTER_ADDR", "paddle": "PADDLE_MASTER"}
"""The variable of each framework that has the address of rank 0."""
WITHIN_S = 150  # longer than the timeout of 90 s, whose error would then be in the output


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, "1gbit") as hosts:
        yield hosts


def start(
    hosts: Hosts, *variables: dict[str, str], framework: str, python: str | None = None
) -> list[subprocess.Popen[str]]:
    """Start one rank on each host. `python` runs them; None: a process that has imported the framework."""
    program = [python or warm_python(framework), *PROGRAM[1:], framework]
    common = {"MASTER_ADDR": "node0", "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "0"}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    return [
        hosts.start(host, program, common | {"RANK": str(host)} | own, **OPTIONS)
        for host, own in enumerate(variables)
    ]


def outputs_of(
    hosts: Hosts, *variables: dict[str, str], framework: str = "torch", python: str | None = None
) -> list[str]:
    """Start one rank on each host and return their outputs; all ranks must fail."""
    ranks = start(hosts, *variables, framework=framework, python=python)
    deadline = time.monotonic() + WITHIN_S
    outputs = [rank.communicate(timeout=max(1, deadline - time.monotonic()))[0] for rank in ranks]
    assert all(rank.returncode for rank in ranks), outputs
    return outputs


@FRAMEWORKS
def test_hosts_that_disagree_about_the_world_size(hosts: Hosts, framework: str) -> None:
    for output in outputs_of(hosts, {}, {"WORLD_SIZE": "3"}, framework=framework):
        assert "Ranks disagree about the world size." in output
        assert "rank 0 on host node0" in output and "rank 1 on host node1" in output
        assert "expects 2" in output and "expects 3" in output


@FRAMEWORKS
def test_one_rank_on_two_hosts(hosts: Hosts, framework: str) -> None:
    three = {"WORLD_SIZE": "3"}
    for output in outputs_of(hosts, three, three, three | {"RANK": "1"}, framework=framework):
        assert "Two processes claim rank 1 of 3." in output
        assert "rank 1 on host node1" in output and "rank 1 on host node2" in output


@FRAMEWORKS
def test_two_jobs_at_one_address(hosts: Hosts, framework: str) -> None:
    jobs = {"PACELINE_JOB_ID": "one-of-the-jobs"}, {"PACELINE_JOB_ID": "another-job"}
    for output in outputs_of(hosts, *jobs, framework=framework):
        assert "Two jobs meet at one address." in output
        assert "rank 0 on host node0" in output and "rank 1 on host node1" in output


@FRAMEWORKS
def test_an_address_that_is_not_rank_0s(hosts: Hosts, framework: str) -> None:
    (output,) = outputs_of(hosts, {"MASTER_ADDR": "node1"}, framework=framework)
    assert f"Rank 0 of 2 is on host node0, but {ADDRESS[framework]}=node1 is not." in output
    assert f"the addresses of node0: {hosts.address(0)} (eth0)" in output


@FRAMEWORKS
def test_localhost(hosts: Hosts, framework: str) -> None:
    wrong = {"MASTER_ADDR": "localhost"}
    for output in outputs_of(hosts, wrong, wrong, framework=framework):
        assert f"{ADDRESS[framework]}=localhost means this host on every host" in output


@FRAMEWORKS
def test_a_wrong_interface(hosts: Hosts, framework: str) -> None:
    for output in outputs_of(hosts, {}, {"GLOO_SOCKET_IFNAME": "lo"}, framework=framework):
        assert "Rank 1 of 2 cannot join." in output
        assert "rank 1 on host node1" in output and f"eth0 ({hosts.address(1)})" in output
        assert "GLOO_SOCKET_IFNAME=lo (127.0.0.1) is reached by no other host" in output


@pytest.mark.parametrize("host", [0, 1])
def test_an_interface_that_leads_to_no_other_host(hosts: Hosts, host: int) -> None:
    address = hosts.add_dead_end(host, "eth1")
    variables: list[dict[str, str]] = [{"GLOO_SOCKET_IFNAME": "eth0"}, {}]
    variables[host] = {"GLOO_SOCKET_IFNAME": "eth1"}
    for output in outputs_of(hosts, *variables):
        assert f"Rank {1 - host} of 2 cannot join." in output
        assert f"there is no way to rank {host} on host node{host}" in output
        assert f"GLOO_SOCKET_IFNAME=eth1 ({address}), on a host that has eth0" in output
        assert "Network is unreachable" in output and "eth0 (10.77.0." in output


@pytest.mark.parametrize(
    "framework, other", [("torch", "none"), ("torch", "one that others can read"), ("paddle", "none")]
)
def test_a_secret_that_is_not_the_same(hosts: Hosts, tmp_path: Path, framework: str, other: str) -> None:
    variables: list[dict[str, str]] = [{}, {}]
    for host in range(1 if other == "none" else 2):
        path = tmp_path / f"secret{host}"
        path.write_text(f"{host}" * 32)
        path.chmod(0o644 if host and other == "one that others can read" else 0o600)
        variables[host] = {"PACELINE_SECRET_FILE": str(path)}
    for rank, output in enumerate(outputs_of(hosts, *variables, framework=framework)):
        assert "The ranks of this job do not have the same secret." in output
        assert "rank 0 on host node0" in output and "rank 1 on host node1" in output
        if other == "one that others can read" and rank == 0:
            assert "is not this user's alone" in output and "mode 0644" in output


@FRAMEWORKS
def test_other_versions(hosts: Hosts, tmp_path: Path, framework: str) -> None:
    """The framework of the second host has another version."""
    other = {"torch": "2.12.1+cpu", "paddle": "3.2.9"}[framework]
    change = f"import {framework}\n{framework}.__version__ = {other!r}\n"
    (tmp_path / "sitecustomize.py").write_text(change)
    changed = {"PYTHONPATH": str(tmp_path)}
    for output in outputs_of(hosts, {}, changed, framework=framework, python=sys.executable):
        assert "Ranks have different versions." in output
        assert "rank 1 on host node1" in output and f"has {framework} {other.partition('+')[0]}" in output


@FRAMEWORKS
def test_a_host_that_cannot_be_reached(hosts: Hosts, framework: str) -> None:
    """Both ranks print which rank they wait for, long before their deadline."""
    hosts.cut(1)
    ranks = start(hosts, {}, {}, framework=framework)
    said = [said_by(rank, word) for rank, word in zip(ranks, ("has waited", "waits for"), strict=True)]
    for rank in ranks:
        rank.kill()
        rank.communicate(timeout=WITHIN_S)
    assert "rank 0 on host node0" in said[0] and "for rank 1 of 2; 1 came, of node0" in said[0]
    assert "Rank 1 of 2 on host node1" in said[1] and f"node0 stands for {hosts.address(0)} here" in said[1]


def said_by(rank: subprocess.Popen[str], word: str) -> str:
    """The output of a rank up to the line with this word."""
    said = ""
    while word not in said:
        line = rank.stdout.readline()
        assert line, said
        said += line
    return said
