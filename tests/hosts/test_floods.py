"""Jobs form while foreign processes connect to each of their listening sockets, in separate namespaces.

Their results have the same bits, over the same paths, as without a flood.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts import test_control
from tests.hosts.namespaces import Hosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

WITHIN_S = 240
ANOTHER, THIS = 65534, 0
FOLDER = Path(__file__).parent
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@contextlib.contextmanager
def flooded_by(hosts: Hosts, users: Sequence[int]) -> Iterator[None]:
    """A context in which processes of these users connect to every listening socket on the first host."""
    with contextlib.ExitStack() as stack:
        for user in users:
            flood = hosts.start(0, [sys.executable, str(FOLDER / "flood.py"), str(user)], {}, **PIPES)
            stack.enter_context(flood.stdout)
            assert flood.stdout.readline() == "ready\n"
        yield


def found(users: Sequence[int], command: Sequence[str], variables: dict[str, str]) -> list[str]:
    """Run a job during a flood by these users, and return the lines of its ranks."""
    with Hosts(1, "1gbit") as host, flooded_by(host, users):
        job = host.start(0, [sys.executable, "-m", *command], variables, **PIPES)
        output, _ = job.communicate(timeout=WITHIN_S)
    assert job.returncode == 0, output
    return sorted(re.findall(r"found .*", output))


def test_a_flood_changes_no_result_of_ranks_on_one_host() -> None:
    command = ["paceline", "run", "-n", "4", "-m", "tests.hosts.flooded"]
    variables = {}
    in_peace = found([], command, variables)
    assert len(in_peace) == 4 and all("['memory world']" in line for line in in_peace), in_peace
    assert found([ANOTHER, THIS], command, variables) == in_peace


def test_the_control_channel_of_two_hosts_forms_in_a_flood(tmp_path: Path) -> None:
    with Hosts(2, "1gbit") as hosts, flooded_by(hosts, [ANOTHER, ANOTHER]):
        for rank in test_control.start(hosts, tmp_path):  # waits until the channel has formed
            test_control.kill(rank)
