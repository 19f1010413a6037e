"""The control channel over real links: all ranks detect the failure of one.

The ranks import no framework. `tests/multiprocess/test_hosts.py` tests the same with one, without real links.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paceline.health.peer_errors import SILENCE_VARIABLE
from tests.hosts.listening import GUILTY
from tests.hosts.namespaces import Hosts, why_not
from tests.hosts.test_launchers import OPTIONS

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

LAYOUT = (0, 0, 1, 1)
WITHIN_S = 120
Ranks = list["subprocess.Popen[str]"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "1gbit") as hosts:
        yield hosts


def start(
    hosts: Hosts,
    folder: Path,
    what: str = "nothing",
    *,
    has_secret: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Start ranks, and wait until their channel has formed. With a secret, their messages are encrypted."""
    command = [sys.executable, "-m", "tests.hosts.listening", str(folder), what]
    variables = {"LAYOUT": ",".join(map(str, LAYOUT)), **(environment or {})}
    if has_secret:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        secret.chmod(0o600)
        variables["PACELINE_SECRET_FILE"] = str(secret)
    ranks = hosts.start_ranks(command, LAYOUT, variables, **OPTIONS)
    for rank in ranks:
        line = rank.stdout.readline()
        assert line.startswith("connected "), line + rank.stdout.read()
        line = rank.stdout.readline()
        assert line == ("encrypted\n" if has_secret and shutil.which("openssl") else "in clear\n")
    return ranks


def noticed(rank: subprocess.Popen[str]) -> tuple[float, str]:
    """The time at which a rank detected a failure, and its error."""
    output, _ = rank.communicate(timeout=WITHIN_S)
    assert rank.returncode == 0 and output.startswith("noticed "), output
    at, _, error = output.removeprefix("noticed ").partition("\n")
    return float(at), error


def guilty_at(rank: subprocess.Popen[str]) -> float:
    output, _ = rank.communicate(timeout=WITHIN_S)
    return float(output.removeprefix("guilty ").split()[0])


def kill(rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.communicate(timeout=WITHIN_S)


def is_of_a_death(error: str) -> bool:
    """True if it names a rank of the second host, all of whose ranks have ended.

    A process that ends with unread data resets its connection. If no rank of its host is left, the network
    may have caused the reset as well, and the error says so.
    """
    died, reset = "Rank [23] of 4 on host node1 died", "ranks? [23](-3)? of 4 on host node1 was reset"
    return re.search(f"{died}|{reset}", error) is not None


@pytest.mark.parametrize("has_secret", [True, False], ids=["encrypted", "in clear"])
def test_a_killed_rank(hosts: Hosts, tmp_path: Path, has_secret: bool) -> None:
    ranks = start(hosts, tmp_path, "kill", has_secret=has_secret)
    guilty_at(ranks[GUILTY])
    for rank in ranks[:GUILTY]:
        error = noticed(rank)[1]
        assert f"Rank {GUILTY} of 4 on host node1 died." in error
        assert f"pid {ranks[GUILTY].pid}" in error


def test_an_exception(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, tmp_path, "raise")
    guilty_at(ranks[GUILTY])
    for rank in ranks[:GUILTY]:
        error = noticed(rank)[1]
        assert "ValueError: the cause" in error
        assert f"told by rank {GUILTY} on host node1 (pid {ranks[GUILTY].pid})" in error


def test_the_end_of_a_program_is_no_failure(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, tmp_path, "leave")
    guilty_at(ranks[GUILTY])
    assert ranks[GUILTY].returncode == 0
    kill(ranks[2])  # a real failure
    for rank in ranks[:2]:
        assert is_of_a_death(noticed(rank)[1])


def test_a_killed_host(hosts: Hosts, tmp_path: Path) -> None:
    ranks = start(hosts, tmp_path)
    for rank in ranks[2:]:
        kill(rank)
    for rank in ranks[:2]:
        assert is_of_a_death(noticed(rank)[1])


def test_a_cut_link(hosts: Hosts, tmp_path: Path) -> None:
    """The ranks of each host report that the other host cannot be reached."""
    ranks = start(hosts, tmp_path)
    at = time.monotonic()
    hosts.cut(1)
    for summary, own in (
        ("Ranks 2-3 of 4 on host node1 cannot be reached any more.", ranks[:2]),
        ("Ranks 0-1 of 4 on host node0 cannot be reached any more.", ranks[2:]),
    ):
        for rank in own:
            when, error = noticed(rank)
            assert when - at > 1.5  # a short interruption is no failure
            assert summary in error


@pytest.mark.parametrize("fault", ["the hub is stopped", "cut from 0", "cut from 1", "cut"])
def test_a_question_that_does_not_arrive_blames_no_process(hosts: Hosts, tmp_path: Path, fault: str) -> None:
    """Ranks ask before the allowed silence has passed, when no rank knows whether the host is lost."""
    ranks = start(hosts, tmp_path, "ask", environment={SILENCE_VARIABLE: "600"})
    if fault == "cut":
        hosts.cut(1)
    elif fault == "the hub is stopped":
        ranks[0].send_signal(signal.SIGSTOP)
    else:
        source = int(fault[-1])
        hosts.cut_one_way(source, 1 - source)
    (tmp_path / "ask").touch()
    answers = []
    for rank in ranks[fault == "the hub is stopped" :]:
        line = rank.stdout.readline()
        assert line.startswith("asked "), line + rank.stdout.read()
        answers.append(rank.stdout.readline())
    ranks[0].send_signal(signal.SIGCONT)
    (tmp_path / "end").touch()
    for rank in ranks:
        output, _ = rank.communicate(timeout=WITHIN_S)
        assert rank.returncode == 0, output
    if fault == "the hub is stopped":
        assert all("rank 0 on host node0" in each and "is stopped" in each for each in answers), answers
        assert not any("was cut" in each for each in answers), answers
        return
    for each, host in zip(answers, LAYOUT, strict=True):
        others = [rank for rank in range(4) if LAYOUT[rank] != host]
        if f"ranks=({LAYOUT.index(host)},)" in each and "asked for" in each:
            continue  # on a busy machine the rank that answers for its host may itself take too long
        assert f"ranks=({', '.join(map(str, others))})" in each or (host and "ranks=(0,)" in each), answers
        assert "its host acknowledges nothing" in each and f"the network to node{1 - host} was cut" in each
        assert "SIGSTOP" not in each and "kill -CONT" not in each, answers


def test_a_pause_is_no_failure(hosts: Hosts, tmp_path: Path) -> None:
    """The hub and another rank are paused for longer than the allowed silence, but their kernels answer."""
    ranks = start(hosts, tmp_path)
    for rank in (ranks[0], ranks[3]):
        rank.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    for rank in (ranks[0], ranks[3]):
        rank.send_signal(signal.SIGCONT)
    time.sleep(1.0)  # for messages that were sent meanwhile
    assert [rank.poll() for rank in ranks] == [None] * 4
    kill(ranks[3])
    for rank in ranks[:3]:
        _, error = noticed(rank)
        assert "Rank 3 of 4 on host node1 died." in error


@pytest.mark.parametrize("others", ["another", "none"])
def test_a_wrong_secret(hosts: Hosts, tmp_path: Path, others: str) -> None:
    """The ranks of both hosts raise at once, with the reason."""
    ranks = []
    for rank in (0, 1):
        secret = tmp_path / f"secret{rank}"
        secret.write_text(f"{rank}" * 32)
        secret.chmod(0o600)
        variables = {"RANK": str(rank), "LAYOUT": "0,1"}
        if rank == 0 or others == "another":
            variables["PACELINE_SECRET_FILE"] = str(secret)
        command = [sys.executable, "-m", "tests.hosts.listening", str(tmp_path), "nothing"]
        ranks.append(hosts.start(rank, command, variables, **OPTIONS))
    started = time.monotonic()
    for each in ranks:
        output, _ = each.communicate(timeout=WITHIN_S)
        assert each.returncode == 1, output
        assert "The ranks of this job do not fit together." in output
        assert "rank 0 on host node0" in output and "rank 1 on host node1" in output
        assert ("have secrets that differ" if others == "another" else "has none") in output
    assert time.monotonic() - started < 40.0  # a rank that waits for the other does so for a minute
