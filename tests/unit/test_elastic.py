"""`paceline run --nnodes`: the options of torch's agent; real hosts: tests/hosts/test_launchers.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.errors import ConfigError
from paceline.launch import elastic
from paceline.launch.elastic import Elastic, agent_command
from paceline.launch.trace_file import HostTrace
from paceline.rendezvous.addresses import Way
from paceline.trace import ring_file
from paceline.trace.ring_file import CAPACITY_VARIABLE, FOLDER_VARIABLE, TRACE_RECORDS, RankHeader
from tests.traces import read_trace

ELASTIC = Elastic(nnodes=2, rdzv="node0:29400", nprocs=4, timeout_s=60.0, log_dir=None, threads=1)


def options_of(command: list[str]) -> dict[str, str]:
    assert command[:2] == ["-m", "paceline.torch.elastic_agent"]
    return dict(zip(command[2::2], command[3::2], strict=True))


def test_the_agent_gets_options_that_it_would_guess_from_names() -> None:
    way = Way("node0", "10.77.0.1", "10.77.0.2", "eth0", False)
    options = options_of(agent_command(ELASTIC, way, 29400, serves=False))
    assert options["--rdzv-endpoint"] == "10.77.0.1:29400"
    assert options["--local-addr"] == "10.77.0.2"
    assert "is_host=0" in options["--rdzv-conf"]
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "4")


def test_an_address_of_ipv6_is_bracketed() -> None:
    way = Way("node0", "fd00::1", "fd00::1", "", True)
    options = options_of(agent_command(ELASTIC, way, 29400, serves=True))
    assert options["--rdzv-endpoint"] == "[fd00::1]:29400"
    assert "is_host=1" in options["--rdzv-conf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--rdzv is missing"),
        (["--rdzv", "node0:29400"], "--nnodes is missing"),
        (["--nnodes", "2", "--rdzv", "node0"], "--rdzv='node0'"),
        (["--nnodes", "0", "--rdzv", "node0:1"], "nnodes=0"),
        (["--nnodes", "2", "--node-rank", "0"], "--rdzv is missing"),
        (["--nnodes", "2", "--rdzv", "node0:1", "--node-rank", "2"], "node_rank=2"),
        (
            ["--nnodes", "2", "--rdzv", "h:1", "--bind", "cores", "--timeout-s", "3"],
            "--bind, --timeout-s are for",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(arguments, message, tmp_path, capsys) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)")
    assert main(["run", *arguments, str(script)]) == 2
    assert message in capsys.readouterr().err


def test_a_name_of_a_host_that_means_each_host_itself_is_refused(tmp_path, monkeypatch, capsys) -> None:
    """Debian's installer writes this into /etc/hosts: others reach that host at another address."""
    way = Way("node0", "127.0.1.1", "127.0.0.1", "lo", True)
    monkeypatch.setattr(elastic, "find_way", lambda *_: way)
    (tmp_path / "script.py").touch()
    assert main(["run", "--nnodes", "2", "--rdzv", "node0:29400", str(tmp_path / "script.py")]) == 2
    message = capsys.readouterr().err
    assert (
        "--rdzv node0:29400 means this host on every host" in message and "--rdzv localhost:29400" in message
    )


def test_host_0_has_the_address_that_all_connect_to(tmp_path, monkeypatch, capsys) -> None:
    way = Way("node0", "10.77.0.1", "10.77.0.2", "eth0", False)
    monkeypatch.setattr(elastic, "find_way", lambda *_: way)
    (tmp_path / "script.py").touch()
    where = ["--nnodes", "2", "--rdzv", "node0:29400"]
    assert main(["run", *where, "--node-rank", "0", str(tmp_path / "script.py")]) == 2
    assert "--node-rank 0 is not on the host of --rdzv node0:29400" in capsys.readouterr().err


def test_a_port_of_another_program_is_reported_with_its_holder(tmp_path, capsys) -> None:
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["run", "--nnodes", "2", "--rdzv", f"localhost:{port}", str(tmp_path / "script.py")]) == 2
    message = capsys.readouterr().err
    assert f"Port {port} is in use" in message and f"held by pid {os.getpid()} (" in message
    assert "--rdzv localhost:" in message  # with another port


def test_a_host_with_a_number_serves_if_it_is_the_first() -> None:
    way = Way("node0", "10.77.0.1", "10.77.0.1", "eth0", True)
    options = options_of(agent_command(replace(ELASTIC, node_rank=1), way, 29400, serves=False))
    assert (options["--rdzv-backend"], options["--node-rank"]) == ("static", "1")


def test_each_host_records_under_its_own_name(tmp_path: Path) -> None:
    trace = HostTrace(str(tmp_path / "out.json"), "node1", 2)
    assert trace.begin({FOLDER_VARIABLE: "elsewhere"}) == {
        FOLDER_VARIABLE: str(tmp_path / "out.node1.rings"),
        CAPACITY_VARIABLE: str(TRACE_RECORDS),
    }
    stale = ring_file.path_of(trace.folder, 7)
    stale.touch()
    assert trace.begin({CAPACITY_VARIABLE: "64"}) == {FOLDER_VARIABLE: str(trace.folder)}
    assert not stale.exists() and not trace.output.exists()
    said: list[str] = []
    trace.end(said.append)
    assert len(said) == 1 and "No rank of this job has recorded a backward" in said[0]
    memory = ring_file.create(ring_file.path_of(trace.folder, 2), 64)
    ring_file.write_header(memory, RankHeader(2, 4, 1, "node1", "boot", 0, 0, 64))
    trace.end(said.append)
    assert list(read_trace(tmp_path / "out.node1.json")) == ["rank 2"]
    assert f"`paceline trace` with {trace.folder} and those of the others" in said[1]


def test_a_trace_of_a_host_that_cannot_be_written_is_reported_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The trace can't be written to"):
        HostTrace(str(tmp_path / "none" / "out.json"), "node1", 2).begin({})
    (tmp_path / "out.node1.rings").touch()
    with pytest.raises(ConfigError, match="There is no folder in which the ranks can record"):
        HostTrace(str(tmp_path / "out.json"), "node1", 2).begin({})


@pytest.mark.parametrize(
    ("ends", "status", "message"),
    [
        ("sys.exit(3)", 3, ""),
        (
            "os.kill(os.getpid(), 9)",
            137,
            f"paceline: torch's agent on host {socket.gethostname()} was ended by SIGKILL, and its ranks are "
            "ended with it\n",
        ),
    ],
    ids=["exit", "SIGKILL"],
)
def test_what_is_seen_of_the_ranks_is_reported_when_the_agent_has_ended(
    tmp_path: Path, ends: str, status: int, message: str
) -> None:
    """In a separate process, because it sets that process's signal handlers."""
    program = f"""
import os, sys
from paceline.launch.elastic import Elastic, _RendezvousPoint, _run_watched, _Watch
from paceline.launch.output import say
from paceline.launch.trace_file import JobRecording
from pathlib import Path
class Trace:
    def end(self, say): say("the trace of " + os.environ["WHO"])
folder = Path({str(tmp_path / "folder")!r})
recording = JobRecording(folder, is_own=True, output=None, name="x", nprocs=1, launcher=os.getpid(), say=say)
agent = [sys.executable, "-c", {"import os, sys; print(os.environ['WHO']); sys.stdout.flush(); " + ends!r}]
watch = _Watch(recording, None, Trace(), {{"WHO": "agent"}})
master_address = _RendezvousPoint(Elastic(1, "node0:29400", 1, 60.0, None, 1))
sys.exit(_run_watched(agent, os.environ, watch, master_address))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "WHO": "us"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "agent\n", f"{message}the trace of us\n")
    assert not (tmp_path / "folder").exists()  # no process has recorded anything
