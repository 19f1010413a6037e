"""After a fault on one of two hosts, all other ranks raise soon, and name rank, host and reason.

torch and Paddle share all code that detects and reports a fault. Each framework has its own connections,
which must be closed, or must survive a pause. So Paddle runs each fault once, on the path through the memory
of each host, where the connections are Paceline's. Over Paddle's process group alone all ranks raise as well,
but a process in which a call of Paddle is still open may abort at exit (docs/design/hosts.md, what is not
there yet). Reports from a rank without a shard do not depend on the framework.

The ranks of most tests are forks of a process that has imported the framework, and skip the interpreter's
shutdown. Tests that kill a whole host use real processes, so that the survivors end as a user's would.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.health.peer_errors import SILENCE_VARIABLE
from tests.harness.warm import warm_python
from tests.hosts.failing import GUILTY, NOTICED
from tests.hosts.namespaces import Hosts, why_not
from tests.hosts.test_launchers import OPTIONS

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

TWO_AND_TWO = (0, 0, 1, 1)
ONE_AND_THREE = (0, 1, 1, 1)
"""The host of each rank. In the second, rank GUILTY has no shard, and only the control channel to others."""
Layout = tuple[int, ...]
WITHIN_S = 120
PATHS = pytest.mark.parametrize(
    "framework, path", [("torch", "auto"), ("torch", "group"), ("paddle", "auto")]
)
EACH = (
    ("torch", "auto", TWO_AND_TWO),
    ("torch", "auto", ONE_AND_THREE),
    ("torch", "group", TWO_AND_TWO),
    ("paddle", "auto", TWO_AND_TWO),
)
LAYOUTS = pytest.mark.parametrize("framework, path, layout", EACH)
FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "paddle"])
AT_ONCE_S = 30.0
"""The deadline is 60 s. `delays` measures the real time, on an idle machine."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "1gbit") as hosts:
        yield hosts


@dataclass(frozen=True)
class Rank:
    """A rank that is training.

    Attributes:
        process: A process that ends as the rank does.
        pid: The process id of the rank, which may be a fork behind `process`.
    """

    process: subprocess.Popen[str]
    pid: int

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def output(self) -> str:
        """Its whole output, once it has ended."""
        return self.process.communicate(timeout=WITHIN_S)[0]


def start(
    hosts: Hosts,
    what: str,
    path: str,
    layout: Layout = TWO_AND_TWO,
    framework: str = "torch",
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Start ranks, and wait until they train. `python` runs them; None: one with the framework imported."""
    program = [python or warm_python(framework), "-m", "tests.hosts.failing", framework, what, path]
    ranks = []
    for process in hosts.start_ranks(program, layout, environment or {}, **OPTIONS):
        said = []
        while not (said and said[-1].startswith("warm ")):
            line = process.stdout.readline()
            assert line, said
            said.append(line)
        ranks.append(Rank(process, int(process.stdout.readline())))
    return ranks


def noticed(rank: Rank) -> tuple[float, str]:
    """The time at which a rank raised because of a failure elsewhere, and its error."""
    output = rank.output()
    assert rank.process.returncode == NOTICED, output
    before, _, after = output.partition("noticed ")
    assert after, before
    at, _, error = after.partition("\n")
    return float(at), error


def guilty_at(rank: Rank) -> float:
    return float(rank.output().partition("guilty ")[2].split()[0])


def assert_of_the_link(error: str, host: int) -> None:
    """Check that the error names a host and the link to it, and blames no process there.

    A rank may detect by itself that no packets arrive, or that the other end, which detected the same, reset
    the connection. If another rank of its own host raised first and closed its connections, the rank asks
    which ranks answer, and gets no reply. Each of these reports is true.
    """
    words = (
        f"on host node{host} cannot be reached any more",
        rf"he connection to ranks? \S+ of 4 on host node{host} was reset",
        rf"on host node{host} \(pid \d+\) does not answer, and its host acknowledges nothing",
    )
    assert any(re.search(each, error) for each in words), error
    assert "killed" not in error and "SIGSTOP" not in error, error


@LAYOUTS
def test_a_killed_rank(hosts: Hosts, framework: str, path: str, layout: Layout) -> None:
    ranks = start(hosts, "kill", path, layout, framework)
    at = guilty_at(ranks[GUILTY])
    for rank in ranks[:GUILTY]:
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert f"Rank {GUILTY} of 4" in error and "died" in error, error
        # Ranks of its own host see its death in the host's memory; other hosts receive a report.
        assert f"pid {ranks[GUILTY].pid}" in error and "on host node1" in error, error


@LAYOUTS
def test_an_exception(hosts: Hosts, framework: str, path: str, layout: Layout) -> None:
    ranks = start(hosts, "raise", path, layout, framework)
    at = guilty_at(ranks[GUILTY])
    for rank, host in zip(ranks[:GUILTY], layout):
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert "ValueError: the cause" in error and f"ank {GUILTY} " in error, error
        if host != layout[GUILTY]:
            assert f"rank {GUILTY} on host node1 (pid {ranks[GUILTY].pid})" in error, error


@PATHS
def test_a_killed_host(hosts: Hosts, framework: str, path: str) -> None:
    ranks = start(hosts, "host", path, TWO_AND_TWO, framework, sys.executable)
    at = time.monotonic()
    for rank in ranks[2:]:
        rank.send_signal(signal.SIGKILL)
    for rank in ranks[:2]:
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert "host node1" in error, error
    for rank in ranks[2:]:
        rank.output()


@PATHS
def test_a_cut_link(hosts: Hosts, framework: str, path: str) -> None:
    ranks = start(hosts, "cut", path, TWO_AND_TWO, framework)
    at = time.monotonic()
    hosts.cut(1)
    for rank, host in zip(ranks, TWO_AND_TWO):
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert_of_the_link(error, 1 - host)


@pytest.mark.parametrize("host, path", [(0, "auto"), (1, "auto"), (1, "group")])
def test_an_interface_that_is_switched_off(hosts: Hosts, host: int, path: str) -> None:
    """An error of a host's own kernel, like "no route", does not show that the other host is alive."""
    ranks = start(hosts, "cut", path)
    at = time.monotonic()
    hosts.switch_off(host)
    for rank, its_host in zip(ranks, TWO_AND_TWO):
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert_of_the_link(error, 1 - its_host)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("path", ["auto", "group"])
def test_an_interface_that_loses_its_address(hosts: Hosts, host: int, path: str) -> None:
    ranks = start(hosts, "cut", path)
    at = time.monotonic()
    hosts.remove_address(host)
    for rank, its_host in zip(ranks, TWO_AND_TWO):
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        # The ranks of rank 0's host use that address too. A rank reports the first silence that it detects.
        is_within = "on host node0 cannot reach each other over the network any more" in error
        if not (is_within and its_host == 0 == host):
            assert_of_the_link(error, 1 - its_host)


ONE_WAY = pytest.mark.parametrize("source", [0, 1])


@ONE_WAY
@pytest.mark.parametrize("path", ["auto", "group", "local_sgd"])
@pytest.mark.parametrize("layout", [TWO_AND_TWO, ONE_AND_THREE])
def test_a_link_that_is_cut_in_one_direction(hosts: Hosts, source: int, path: str, layout: Layout) -> None:
    """The end that receives nothing raises, and the other end raises as soon."""
    ranks = start(hosts, "cut", path, layout)
    at = time.monotonic()
    hosts.cut_one_way(source, 1 - source)
    for rank, host in zip(ranks, layout):
        when, error = noticed(rank)
        assert when - at < AT_ONCE_S, error
        assert_of_the_link(error, 1 - host)


@pytest.mark.parametrize("path", ["auto", "group"])
def test_a_short_cut_is_survived(hosts: Hosts, path: str) -> None:
    """12 s of silence are allowed, and the cut takes 7 s. TCP alone resends after 6.2 s and after 12.6 s."""
    ranks = start(hosts, "pause", path, environment={SILENCE_VARIABLE: "12"})
    hosts.cut(1)
    time.sleep(7.0)
    hosts.mend(1)
    for rank in ranks:
        output = rank.output()
        assert rank.process.returncode == 0 and "done" in output, output


@pytest.mark.parametrize("layout", [TWO_AND_TWO, ONE_AND_THREE])
def test_a_slow_link_with_a_deep_queue_is_no_lost_host(layout: Layout) -> None:
    """The channel's messages queue for seconds behind gradients, which show that the host is alive."""
    with Hosts(2, "1mbit") as hosts:
        for rank in start(hosts, "slow", "auto", layout):
            output = rank.output()
            assert rank.process.returncode == 0 and "done" in output, output


@LAYOUTS
def test_a_pause_is_survived(hosts: Hosts, framework: str, path: str, layout: Layout) -> None:
    """A rank may pause for 4 s, longer than the allowed silence, because its kernel answers meanwhile."""
    ranks = start(hosts, "pause", path, layout, framework)
    for paused in (ranks[0], ranks[3]):
        paused.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        paused.send_signal(signal.SIGCONT)
    for rank in ranks:
        output = rank.output()
        assert rank.process.returncode == 0 and "done" in output, output


@FRAMEWORKS
def test_a_wrong_secret(hosts: Hosts, framework: str, tmp_path: Path) -> None:
    """Wrapping the model raises at once on both hosts. The framework's own call compares no secrets."""
    ranks = []
    for rank, host in enumerate((0, 1)):
        secret = tmp_path / f"secret{rank}"
        secret.write_text(f"{rank}" * 32)
        secret.chmod(0o600)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29511",
            "PACELINE_SECRET_FILE": str(secret),
        }
        command = [
            warm_python(framework),
            "-m",
            "tests.hosts.failing",
            framework,
            "the framework forms the group",
            "auto",
        ]
        ranks.append(hosts.start(host, command, variables, **OPTIONS))
    for each in ranks:
        output, _ = each.communicate(timeout=WITHIN_S)
        assert each.returncode == 1, output
        assert "The ranks of this job do not fit together." in output
        assert "rank 0 on host node0" in output and "rank 1 on host node1" in output
        assert "secrets that differ" in output
