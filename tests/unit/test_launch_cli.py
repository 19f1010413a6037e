"""The command line of `paceline run`, up to the point where it would start a process."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.launch import cli, tune_answers
from paceline.launch.plan import Plan
from paceline.launch.topology import read_machine, read_processor
from paceline.launch.tune_answers import Layout, Place, Tuned


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """The plans that would have been started, in a folder with script.py."""
    plans: list[Plan] = []
    monkeypatch.setattr(cli, "run_guarded", lambda plan: plans.append(plan) or 0)
    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    return plans


@pytest.mark.parametrize(
    ("arguments", "options", "command"),
    [
        (["train.py", "-n", "7"], [], ["train.py", "-n", "7"]),
        (["-n", "2", "train.py", "-n", "7"], ["-n", "2"], ["train.py", "-n", "7"]),
        (["-n2", "--bind=none", "train.py"], ["-n2", "--bind=none"], ["train.py"]),
        (["-n", "2", "--", "-odd.py", "--"], ["-n", "2"], ["-odd.py", "--"]),
        (["-n", "2", "-m", "pkg.mod", "-m"], ["-n", "2", "-m"], ["pkg.mod", "-m"]),
        (["-m", "--", "pkg"], ["-m"], ["pkg"]),
        (["--help"], ["--help"], []),
        (["-n"], ["-n"], []),
    ],
)
def test_split_command(arguments: list[str], options: list[str], command: list[str]) -> None:
    assert cli.split_command(arguments) == (options, command)


def test_the_plan_of_a_script(planned: list[Plan]) -> None:
    assert main(["run", "-n", "2", "--grace-s", "1", "script.py", "--lr", "1"]) == 0
    (plan,) = planned
    assert plan.nprocs == 2
    assert plan.command[-4:] == ("-u", "script.py", "--lr", "1")
    assert plan.options.grace_s == 1


@pytest.mark.parametrize(
    "option", [["-np", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node=3"], ["-n3"], ["--nprocs", "3"]]
)
def test_mpiruns_and_torchruns_names_of_n(planned: list[Plan], option: list[str]) -> None:
    assert main(["run", *option, "script.py", "-n", "7"]) == 0
    assert planned[0].nprocs == 3
    assert planned[0].command[-3:] == ("script.py", "-n", "7")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["-n", "7"], "-n 7"),
        (["--lr", "1", "--nproc-per-node=2"], "--nproc-per-node=2"),
        (["-np", "auto", "x"], "-np auto"),
        (["-n", "name"], ""),
        (["-n"], ""),
        ([], ""),
    ],
)
def test_a_number_of_ranks_behind_the_script_is_reported(
    planned: list[Plan], capfd: pytest.CaptureFixture[str], arguments: list[str], given: str
) -> None:
    """It belongs to the script, which is not the intention of most users who write it there."""
    assert main(["run", "script.py", *arguments]) == 0
    said = capfd.readouterr().err
    assert said.count("\n") == bool(given)
    assert (f"`paceline run {given} script.py`" in said) == bool(given)
    assert main(["run", "-n", "1", "script.py", *arguments]) == 0
    assert capfd.readouterr().err == ""


def test_as_many_ranks_as_cores(planned: list[Plan]) -> None:
    assert main(["run", "script.py"]) == 0
    assert 1 <= planned[0].nprocs <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["No script to run", "paceline run --help"]),
        (("-n", "2"), ["No script to run"]),
        (("-n", "2", "-m"), ["No module to run"]),
        (("scrip.py",), ["no script 'scrip.py'", "did you mean script.py?"]),
        (("python", "script.py"), ["starts python itself", "`paceline run script.py`"]),
        (("-m", "no_such_module"), ["no module 'no_such_module'"]),
        (("-m", "script.py"), ["leave -m out"]),
        (("json.tool",), ["paceline run -m json.tool"]),
        (("-n", "0", "script.py"), ["nprocs=0", "1 to 128", "-n"]),
        (("-n", "-1", "script.py"), ["nprocs=-1"]),
        (("-n", "1000", "script.py"), ["nprocs=1000"]),
        (("-n", "two", "script.py"), ["-n two is not a number of ranks"]),
        (("--threads", "0", "script.py"), ["threads=0"]),
        (("--master-port", "70000", "script.py"), ["master_port=70000"]),
        (("--master-addr", "nowhere.invalid", "--master-port", "4000", "script.py"), ["nowhere.invalid"]),
        (("--master-addr", "nowhere.invalid", "script.py"), ["nowhere.invalid", "leave it out"]),
        (("--master-addr", "192.0.2.1", "--master-port", "4000", "script.py"), ["not an address of this"]),
        (("-n", "128", "--bind", "cores", "script.py"), ["--bind cores needs a core for each rank"]),
        (("--log-dir", "script.py", "script.py"), ["log_dir='script.py'", "File exists"]),
        (("--timeout-s", "-1", "script.py"), ["timeout_s=-1.0"]),
        (("--timeout-s", "nan", "script.py"), ["timeout_s=nan"]),
        (("--no-such-option", "script.py"), ["--no-such-option"]),
        (("--np", "2", "script.py"), ["--np"]),
        (("--replace-dpp", "script.py"), ["no option --replace-dpp", "did you mean --replace-ddp?"]),
        (("--nproc-per-nod=2", "script.py"), ["no option --nproc-per-nod.", "mean --nproc-per-node?"]),
        (("-nnodes", "2", "script.py"), ["no option -nnodes", "did you mean --nnodes?"]),
        (("--nnodes", "2", "--rdzv", "node0", "script.py"), ["--rdzv='node0'", "--rdzv node0:29400"]),
        (("--nnodes", "2", "script.py"), ["--rdzv is missing", "--rdzv node0:29400"]),
        (
            ("--nnodes", "2", "--rdzv", "a:1", "--bind", "none", "--grace-s", "1", "script.py"),
            ["--bind, --grace-s are for a launch on one host only", "leave --bind, --grace-s out\n"],
        ),
        (
            ("--nnodes", "2", "--rdzv", "a:1", "--master-port", "1", "script.py"),
            ["--master-port is for", "leave --master-port out; --rdzv says where the hosts meet"],
        ),
        (("--bind", "all", "script.py"), ["--bind"]),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    planned: list[Plan], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: list[str]
) -> None:
    try:
        status = main(["run", *arguments])
    except SystemExit as exit_of_argparse:
        status = int(exit_of_argparse.code or 0)
    assert (status, planned) == (2, [])
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_a_port_in_use_is_reported_with_its_holder(
    planned: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["run", "--master-port", str(port), "script.py"]) == 2
    error = capsys.readouterr().err
    assert f"Port {port} is in use" in error
    assert f"held by pid {os.getpid()}" in error
    assert planned == []


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [(["--version"], 0, "paceline 0"), (["--help"], 0, "stacks"), (["run", "--help"], 0, "--grace-s")],
)
def test_version_and_help(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, word: str
) -> None:
    try:
        assert main(arguments) == status
    except SystemExit as exit_of_argparse:
        assert exit_of_argparse.code == status
    assert word in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["rum"], ["--no-such-option"]])
def test_an_unknown_command_is_reported(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    try:
        assert main(arguments) == 2
    except SystemExit as exit_of_argparse:
        assert exit_of_argparse.code == 2
    error = capsys.readouterr().err
    assert "usage: paceline" in error
    assert ("did you mean `paceline run`?" in error) == (arguments == ["rum"])


def test_the_help_lists_the_commands_and_nothing_else_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "usage: paceline [-h] [--version] command ..." in said
    assert "commands:\n    run " in said


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """As in `paceline doctor | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        assert main(arguments) == 128 + signal.SIGPIPE


def test_auto_takes_the_last_answer_of_tune(
    planned: list[Plan], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["run", "-n", "auto", "script.py", "--lr", "1"]) == 2
    said = capfd.readouterr().err
    assert "there is none for this script" in said and "`paceline tune script.py --lr 1`" in said
    place = Place(read_processor(), read_machine().num_cores)
    script = str(tmp_path / "script.py")
    answer = Tuned(Layout(3, 5), place, script, ("--lr", "1"), 1_700_000_000.0, 1.25, "the machine was busy")
    tune_answers.keep(answer, os.environ)
    assert main(["run", "-n", "auto", "script.py", "--batch", "{12/ranks}"]) == 0
    (plan,) = planned
    assert plan.nprocs == 3
    assert {each["OMP_NUM_THREADS"] for each in plan.environments} == {"5"}
    assert plan.command[-3:] == ("script.py", "--batch", "4")
    said = capfd.readouterr().err
    assert "-n auto: 3 ranks x 5 threads, 1.25x of one rank, by `paceline tune` of 2023-11-1" in said
    assert (
        "it was measured with other arguments: --lr 1; not sure: the machine was busy; `paceline tune" in said
    )
    assert main(["run", "-n", "auto", "--threads", "2", "script.py"]) == 0
    assert {each["OMP_NUM_THREADS"] for each in planned[-1].environments} == {"2"}
    assert main(["run", "-n", "auto", "script.py", "{7/ranks}"]) == 2
    assert "can't be divided by 3 ranks" in capfd.readouterr().err
    assert main(["run", "-n", "auto", "--nnodes", "2", "--rdzv", "a:1", "script.py"]) == 2
    assert "-n auto is for a launch on one host only." in capfd.readouterr().err
    assert len(planned) == 2
