"""`paceline run --nnodes`: what torch's agent is told; real hosts: tests/hosts/test_launchers.py."""

from __future__ import annotations

import pytest

from paceline.cli import main
from paceline.launch.elastic import Elastic, agent_command
from paceline.rendezvous.addresses import Way

ELASTIC = Elastic(nnodes=2, rdzv="node0:29400", nprocs=4, timeout_s=60.0, log_dir=None, threads=1)


def options_of(command: list[str]) -> dict[str, str]:
    assert command[:2] == ["-m", "torch.distributed.run"]
    return dict(zip(command[2::2], command[3::2], strict=True))


def test_the_agent_is_told_what_it_would_guess_from_names() -> None:
    way = Way("node0", "10.77.0.1", "10.77.0.2", "eth0", False)
    told = options_of(agent_command(ELASTIC, way, 29400, serves=False))
    assert told["--rdzv-endpoint"] == "10.77.0.1:29400"
    assert told["--local-addr"] == "10.77.0.2"
    assert "is_host=0" in told["--rdzv-conf"]
    assert (told["--nnodes"], told["--nproc-per-node"]) == ("2", "4")


def test_an_address_of_ipv6_is_bracketed() -> None:
    way = Way("node0", "fd00::1", "fd00::1", "", True)
    told = options_of(agent_command(ELASTIC, way, 29400, serves=True))
    assert told["--rdzv-endpoint"] == "[fd00::1]:29400"
    assert "is_host=1" in told["--rdzv-conf"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nnodes", "2"], "--rdzv is missing"),
        (["--rdzv", "node0:29400"], "--nnodes is missing"),
        (["--nnodes", "2", "--rdzv", "node0"], "--rdzv='node0'"),
        (["--nnodes", "0", "--rdzv", "node0:1"], "nnodes=0"),
        (["--nnodes", "2", "--rdzv", "localhost:29400"], "means this host on every host"),
        (
            ["--nnodes", "2", "--rdzv", "h:1", "--bind", "cores", "--timeout-s", "3"],
            "--bind, --timeout-s is for",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(arguments, told, tmp_path, capsys) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(9)")
    assert main(["run", *arguments, str(script)]) == 2
    assert told in capsys.readouterr().err
