"""Two hosts of two ranks under `paceline run --nnodes`: the host of rank 0 shows all four ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.trace.remote_ranks import State, remote_ranks
from tests.hosts.namespaces import Hosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 150


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "1gbit") as hosts:
        yield hosts


class Job:
    """A job with a dashboard on each host, whose launchers write their output to files."""

    def __init__(self, hosts: Hosts, folder: Path, slow_rank: int) -> None:
        self.folder = folder
        self.hosts = hosts
        command = [sys.executable, "-m", "paceline", "run", "--nnodes", "2", "-n", "2", "--dashboard"]
        command += ["--rdzv", f"{hosts.address(0)}:29421", "-m", "tests.hosts.watched"]
        command += [str(folder), str(slow_rank)]
        self.temporary = [folder / f"host{host}" for host in range(2)]
        self.outputs = [folder / f"output{host}" for host in range(2)]
        self.launchers = []
        for host in range(2):
            self.temporary[host].mkdir()
            with self.outputs[host].open("w") as output:
                self.launchers.append(
                    hosts.start(
                        host,
                        command,
                        {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary[host])},
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def said(self) -> str:
        return "".join(output.read_text() for output in self.outputs)

    def look(self, host: int) -> dict[str, Any]:
        """The result of `paceline top --json` on a host; no ranks, if there are none yet."""
        done = self.run(host, "top", "--json")
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"ranks": []}
        return found

    def run(self, host: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.hosts.start(
            host,
            [sys.executable, "-m", "paceline", *arguments],
            {"TMPDIR": str(self.temporary[host]), "COLUMNS": "100"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stdout, stderr = process.communicate(timeout=WITHIN_S)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def wait(self) -> list[int]:
        return [launcher.wait(WITHIN_S) for launcher in self.launchers]


def until(find: Callable[[], Any], what: Callable[[], object]) -> Any:
    ends = time.monotonic() + WITHIN_S
    while time.monotonic() < ends:
        if found := find():
            return found
        time.sleep(0.2)
    pytest.fail(f"nothing found within {WITHIN_S} s: {what()}")


def host_of_rank_0(job: Job) -> int:
    """The host of rank 0, which the agents choose; all four ranks are visible there."""

    def find() -> int | None:
        for host in range(2):
            ranks = job.look(host)["ranks"]
            if len(ranks) == 4 and all((each["step"] or 0) > 20 and each["values"] for each in ranks):
                return host + 1
        return None

    return int(until(find, job.said)) - 1


def is_slow(found: dict[str, Any], rank: int) -> bool:
    """True if this rank is reported as slow, and all others as waiting for it."""
    others = [each for each in found["ranks"] if each["rank"] != rank]
    waits = [each["waits_for"] == rank and each["waiting"] > 0.3 for each in others]
    return found.get("slow_rank") == rank and all(waits)


def test_the_host_of_rank_0_shows_the_ranks_of_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, slow_rank=3)
    first = host_of_rank_0(job)
    names = [f"node{first}"] * 2 + [f"node{1 - first}"] * 2
    # In the first seconds, the start hides which rank the others wait for.
    now = until(lambda: is_slow(found := job.look(first), 3) and found, job.said)
    assert [each["host"] for each in now["ranks"]] == names
    assert [each["is_far"] for each in now["ranks"]] == [False, False, True, True]
    assert all((each["memory_bytes"] or 0) > 1 << 20 for each in now["ranks"])
    assert [each["rank"] for each in job.look(1 - first)["ranks"]] == [2, 3]
    drawn = job.run(first, "top", "--once").stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in drawn if line.split()[:1] and line.split()[0] in "0123"}
    assert [rows[str(rank)][1] for rank in range(4)] == names, drawn
    page = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", job.outputs[first].read_text())
    assert page
    address = f"http://127.0.0.1:{page[1]}/metrics?token={page[2]}"
    ask = f"import urllib.request as u; print(u.urlopen({address!r}).read().decode())"
    asking = hosts.start(first, [sys.executable, "-c", ask], {}, stdout=subprocess.PIPE, text=True)
    metrics = asking.communicate(timeout=WITHIN_S)[0]
    assert re.search(rf'paceline_up{{job_id="\w+",rank="3",host="node{1 - first}"}} 1', metrics), metrics
    until(lambda: job.look(first)["step"] > 200, job.said)  # the others waited over a second
    (tmp_path / "stop").touch()
    assert job.wait() == [0, 0], job.said()
    output = job.outputs[first].read_text()
    sentence = rf"the others waited for rank 3 of 4 \(host node{1 - first}\) in \d+ % of \d+ steps"
    assert re.search(sentence, output), output
    assert "the others waited for" not in job.outputs[1 - first].read_text()
    assert [list(folder.rglob("rank*")) for folder in job.temporary] == [[], []]  # all recordings are removed


def test_a_killed_rank_of_another_host_is_shown_as_lost(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, slow_rank=-1)
    first = host_of_rank_0(job)
    (tmp_path / "die-3").touch()
    assert all(job.wait())
    assert "PeerLostError" in job.said()
    done = job.run(first, "trace")  # lists the failed job, whose last backwards are kept
    assert done.returncode == 0 and "watched" in done.stdout, done
    (folder,) = (job.temporary[first] / "paceline-0").iterdir()
    states = {each.recording.header.rank: each.state for each in remote_ranks(folder)}
    assert states[3] == State.LOST and set(states) == {2, 3}
