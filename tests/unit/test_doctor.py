"""`paceline doctor` on simulated machines, under real limits, and as a command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import doctor


def by_name(findings):
    return {finding.name: finding for finding in findings}


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def run(*arguments, limits="", **variables):
    """The command, after `ulimit`s, without a launcher's variables except the given ones."""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = f"{limits} exec {sys.executable} -m paceline doctor {' '.join(arguments)}"
    return subprocess.run(
        ["bash", "-c", command], env=environ | variables, capture_output=True, text=True, timeout=120
    )


def test_a_machine_that_is_fit():
    done = run("--json")
    findings = {each["name"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert findings["self-test"]["state"] == "fine"
    assert "one was killed, and the other knew after" in findings["self-test"]["seen"]
    assert {"Python", "cores", "memory", "shared memory", "launcher", "host name"} <= set(findings)
    for line in shown_lines():
        name, seen = line[6:26].strip(), line[28:]
        words = re.sub(
            r"[\d.]+( [KMG]iB)?", r"(unlimited|[\\d.]+)( [KMG]iB)?", seen.replace("no quota", "QUOTA")
        )
        words = words.replace("QUOTA", r"(no quota|a quota of [\d.]+ CPUs)")
        assert re.fullmatch(words, findings[name]["seen"]), line
        assert doctor._as_text(doctor.Finding(name, "fine", findings[name]["seen"])).startswith(line[:28])


def shown_lines() -> list[str]:
    """Lines of this command that docs/getting_started.md shows."""
    page = Path(__file__).resolve().parents[2] / "docs" / "getting_started.md"
    lines = re.findall(r"^fine .*$", page.read_text(), re.M)
    assert len(lines) == 5
    return lines


def test_a_module_in_the_current_folder_takes_no_part(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"selectors.py": "raise RuntimeError('an unknown peer')\n"}))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert by_name(doctor.examine())["self-test"].state == "fine"


def test_a_limit_is_named_where_it_is_seen_and_where_it_strikes():
    done = run(limits="ulimit -f 1000; ")
    assert done.returncode == 1
    assert "WRONG length of a file      at most 1000.0 KiB" in done.stdout
    assert "WRONG self-test             Rank 0 could not take the shared memory" in done.stdout
    assert "2 of " in done.stdout.splitlines()[-1]


def test_what_is_left_of_a_launcher_is_reported():
    done = run("--no-self-test", RANK="1")
    assert done.returncode == 1
    assert "WRONG launcher" in done.stdout and "WORLD_SIZE" in done.stdout
    assert "self-test" not in done.stdout


def test_the_instruction_set_in_use_is_reported():
    done = run("--no-self-test", PACELINE_ISA="portable")
    assert "kernels for any processor" in done.stdout


def test_an_unknown_option_is_refused():
    done = run("--fast")
    assert done.returncode == 2 and "--fast" in done.stderr


def test_a_port_that_is_taken_is_reported(monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            monkeypatch.setenv(name, str(value))
        findings = by_name(doctor.examine(is_testing=False))
    assert findings["launcher"].state == "fine"
    assert findings["port"].state == "wrong" and str(port) in findings["port"].seen


def test_memory_is_that_of_the_tightest_control_group_above(tmp_path):
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable:  4194304 kB\n",
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/memory.max": "max\n",
            "sys/fs/cgroup/slice/job/memory.current": "1000\n",
            "sys/fs/cgroup/slice/memory.max": f"{2**30}\n",
            "sys/fs/cgroup/slice/memory.current": f"{2**29}\n",
        },
    )
    findings = by_name(doctor.examine(root, is_testing=False))
    assert findings["memory"].state == "note"
    assert findings["memory"].seen == "512.0 MiB free, by the limit of the control group"
    assert findings["/dev/shm"].state == "note"  # there is none


@pytest.mark.parametrize(("quota", "state"), [("50000 100000", "note"), ("max 100000", "fine")])
def test_a_quota_below_one_cpu_is_noted(quota, state, tmp_path):
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    findings = by_name(doctor.examine(root, is_testing=False))
    cores = len(os.sched_getaffinity(0))
    assert findings["cores"].state == ("note" if cores == 1 else state)


def test_a_slow_clock_is_noted(tmp_path):
    name = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert (
        by_name(doctor.examine(write(tmp_path, {name: "hpet\n"}), is_testing=False))["clock"].state == "note"
    )
    assert "clock" not in by_name(doctor.examine(write(tmp_path, {name: "tsc\n"}), is_testing=False))


def test_a_host_name_without_an_address_is_noted(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    finding = by_name(doctor.examine(is_testing=False))["host name"]
    assert finding.state == "note" and "/etc/hosts" in finding.hint


def test_a_kernel_that_refuses_memory_files_is_wrong(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = by_name(doctor.examine(is_testing=False))["shared memory"]
    assert finding.state == "wrong" and "seccomp" in finding.hint


def test_lines_fit_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = doctor._as_text(doctor.Finding("memory", "note", "word " * 30, "hint " * 20)).splitlines()
    assert max(map(len, lines)) <= 40 and lines[0].startswith("note  memory")
