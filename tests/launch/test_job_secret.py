"""The secret that a launcher makes: all ranks have it, but no other program, environment or command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline import spawn
from paceline.errors import ConfigError
from paceline.rendezvous.secret import MEMORY_VARIABLE, NO_SECRET, find_secret, make_secret
from tests.launch.conftest import Launcher
from tests.launch.programs import write_secret

SCRIPT = """
import pathlib, subprocess
from paceline.rendezvous.secret import find_secret

own = find_secret()
shown = b"".join(pathlib.Path("/proc/self", name).read_bytes() for name in ("environ", "cmdline"))
supervisor = os.getppid()
guardian = pathlib.Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1]
for pid in (supervisor, guardian):
    shown += b"".join(pathlib.Path("/proc", str(pid), name).read_bytes() for name in ("environ", "cmdline"))
assert len(own.key) == 64 and own.key not in shown and own.key.decode() not in repr(os.environ)
child = "from paceline.rendezvous.secret import find_secret; print(find_secret().source)"
childs = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, close_fds=False)
pathlib.Path(f"{rank}").write_text(f"{own.source} {own.key.decode()} {childs.stdout}{childs.stderr}")
"""


def words(folder: Path) -> list[list[str]]:
    return [(folder / f"{rank}").read_text().split() for rank in range(2)]


def test_ranks_of_run_share_a_secret_that_their_child_processes_lack(launcher: Launcher) -> None:
    ended = launcher.run("-n", "2", "script.py", script=SCRIPT)
    assert ended.returncode == 0, ended.stderr
    first, second = words(launcher.folder)
    assert first == second and first[0] == MEMORY_VARIABLE
    assert first[2:] == ["no", "secret"]
    assert launcher.run("-n", "2", "script.py").returncode == 0
    assert words(launcher.folder)[0][1] != first[1]  # another job, another secret


def test_ranks_of_spawn_share_a_secret(tmp_path: Path) -> None:
    spawn(write_secret, (tmp_path,), nprocs=2)
    first, second = words(tmp_path)
    assert first == second and first[0] == MEMORY_VARIABLE and len(first[1]) == 64


def test_a_users_own_secret_comes_first(launcher: Launcher) -> None:
    path = launcher.folder / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    script = SCRIPT.replace("len(own.key) == 64 and ", "")
    environment = {**os.environ, "PACELINE_SECRET_FILE": str(path)}
    assert launcher.run("-n", "2", "script.py", script=script, env=environment).returncode == 0
    assert [row[:2] for row in words(launcher.folder)] == [
        [f"PACELINE_SECRET_FILE={path}", "0123456789abcdef"]
    ] * 2
    path.chmod(0o644)
    refused = launcher.run("-n", "2", "script.py", env=environment)
    assert refused.returncode and "not this user's alone" in refused.stderr


def test_a_process_that_knows_the_job_id_cannot_take_the_rendezvous_address(launcher: Launcher) -> None:
    """Rank 0 takes the addresses that the environment alone determines; the group forms all the same."""
    ended = launcher.run(
        "-n",
        "2",
        "script.py",
        script="""
        import socket
        import paceline
        from paceline.env import job_secret_from_environment
        from paceline.rendezvous.rendezvous_address import hub_address

        job, taken = os.environ["PACELINE_JOB_ID"], []
        for secret in ("", job_secret_from_environment()):
            taken.append(socket.socket(socket.AF_UNIX))
            if rank == 0:
                taken[-1].bind(chr(0) + hub_address(job, "world", secret))
        paceline.init(forming_timeout_s=60).barrier()
        """,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_secret_cannot_be_changed() -> None:
    fd = make_secret()
    try:
        assert not os.get_inheritable(fd) and os.fstat(fd).st_mode & 0o077 == 0
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
        found = find_secret({MEMORY_VARIABLE: str(fd)})
        assert found.key == os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def test_a_descriptor_of_another_file_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 64)
    with open(tmp_path / "file", "rb") as file:
        for text in (str(file.fileno()), "1000000", "99999999999999999999", "-1", "x", ""):
            assert find_secret({MEMORY_VARIABLE: text}) is NO_SECRET
    fd = os.memfd_create("paceline-call")
    os.write(fd, b"x" * 64)
    assert find_secret({MEMORY_VARIABLE: str(fd)}) is NO_SECRET
    os.close(fd)


def test_without_a_memory_file_a_job_has_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "seccomp")

    monkeypatch.setattr("paceline.launch.job_secret.make_secret", refuse)
    spawn(write_secret, (tmp_path,), nprocs=2)
    assert words(tmp_path) == [["no", "secret"]] * 2


def test_a_secret_that_cannot_be_used_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "short")
    with pytest.raises(ConfigError, match="too short"):
        spawn(write_secret, (tmp_path,), nprocs=2)
    assert not list(tmp_path.iterdir())
