"""`paceline doctor`: checks whether this machine, and its settings, are fit for training on several ranks.

The last check is a self-test: two ranks average an array, one is killed, and the other must report that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.env import read_rank_environment
from paceline.errors import ConfigError, PacelineError
from paceline.launch.ports import check_port_is_free, free_ports
from paceline.launch.rank_process import python_command
from paceline.launch.topology import read_machine, read_memory_limit, read_or_empty
from paceline.launch.variables import MasterAddress, new_job_id, rank_variables
from paceline.rendezvous.resource_limits import explain
from paceline.versions import own_version

FINE, NOTE, WRONG = "fine", "note", "wrong"

_LEAST_MEMORY = 2**30
_LEAST_FILES = 256
_LEAST_SHM = 2**26
_TESTED = {
    "torch": ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"),
    "paddlepaddle": ("3.0", "3.1", "3.2", "3.3"),
}
_SELF_TEST_S = 60.0
_ELEMENTS = 1 << 16
_ISA_WORDS = {"portable": "any processor", "avx2": "AVX2", "avx512": "AVX-512", "neon": "NEON"}
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was checked: "open files".
        state: "fine"; "note" if something works but costs speed or comfort; "wrong" if a job would fail.
        seen: What was found, with figures and units.
        hint: What to do about it; "" if nothing needs to be done.
    """

    name: str
    state: str
    seen: str
    hint: str = ""


def examine(root: Path = Path("/"), *, is_testing: bool = True) -> Iterator[Finding]:
    """Run all checks, and yield their findings. The self-test blocks for a minute at most."""
    for check in _CHECKS:
        yield from check(root)
    if is_testing:
        yield _test_two_ranks()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline doctor",
        description="Look at this machine and at what is set here: is it fit for training on several ranks? "
        "The exit status is 1 if anything is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="write the findings as one JSON list")
    parser.add_argument("--no-self-test", action="store_true", help="start no ranks")
    parsed = parser.parse_args(arguments)
    findings = []
    for finding in examine(is_testing=not parsed.no_self_test):
        findings.append(finding)
        if not parsed.json:
            print(_as_text(finding), flush=True)
    wrong = sum(finding.state == WRONG for finding in findings)
    if parsed.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    elif wrong:
        print(f"\n{wrong} of {len(findings)} {'is' if wrong == 1 else 'are'} wrong.")
    else:
        print("\nThis machine is fit for training.")
    return 1 if wrong else 0


def _as_text(finding: Finding) -> str:
    width = max(shutil.get_terminal_size().columns, 40) - 28
    seen, *more = textwrap.wrap(finding.seen, width) or [""]
    lines = [
        f"{finding.state.upper() if finding.state == WRONG else finding.state:6}{finding.name:20}  {seen}"
    ]
    lines += [f"{'':28}{line}" for line in more]
    if finding.hint:
        first, *rest = textwrap.wrap(finding.hint, width - 3)
        lines += [f"{'':28}-> {first}", *(f"{'':31}{line}" for line in rest)]
    return "\n".join(lines)


# --- the machine ---


def _versions(root: Path) -> Iterator[Finding]:
    yield Finding("Python", FINE, f"{platform.python_version()}, {sys.executable}")
    try:
        from paceline import _core
    except ImportError as error:
        yield Finding("core", WRONG, f"the C++ core does not load: {error}", "install paceline again")
        return
    best = _core.best_isa()
    (isa,) = (name for name, number in _core.ISAS.items() if number == best)
    words = f"{own_version()}, kernels for {_ISA_WORDS.get(isa, isa)}"
    yield Finding("paceline", FINE, words)
    for package, tested in _TESTED.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if any(f"{version}.".startswith(f"{each}.") for each in tested):
                yield Finding(package, FINE, version)
            else:
                yield Finding(package, NOTE, f"{version}; Paceline is tested with {' and '.join(tested)}")


def _cores(root: Path) -> Iterator[Finding]:
    machine = read_machine(root)
    quota = "no quota" if machine.quota is None else f"a quota of {machine.quota:g} CPUs"
    seen = f"{machine.num_cores} usable: {len(machine.cpus)} in the affinity mask, {quota}"
    if machine.quota is not None and machine.quota < 1:
        yield Finding(
            "cores", NOTE, seen, "less than one CPU: every rank is halted for a part of each period"
        )
    elif machine.num_cores == 1:
        yield Finding("cores", NOTE, seen, "several ranks take turns on one core, and are no faster than one")
    else:
        yield Finding("cores", FINE, seen)
    load = os.getloadavg()[0]
    if load > machine.num_cores:
        seen = f"a load of {load:.1f} on {machine.num_cores} cores before anything has started"
        yield Finding("load", NOTE, seen, "other programs run here: ranks will wait for each other")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > machine.num_cores:
        seen = f"OMP_NUM_THREADS={threads} for each rank, and {machine.num_cores} cores for all"
        yield Finding("threads", NOTE, seen, "unset it: `paceline run` divides the cores among the ranks")
    clock = read_or_empty(root / "sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    if clock in _SLOW_CLOCKS:
        hint = "reading the time takes microseconds; the tsc or kvm-clock is fast, where it is reliable"
        yield Finding("clock", NOTE, f"the kernel's clock is {clock}", hint)


def _memory(root: Path) -> Iterator[Finding]:
    available = _available_memory(root)
    limit = read_memory_limit(root)
    free = min(each for each in (available, limit) if each is not None) if available or limit else None
    if free is None:
        yield Finding("memory", NOTE, "unknown: /proc/meminfo cannot be read", "mount /proc")
        return
    seen = f"{_size(free)} free" + (", by the limit of the control group" if limit == free else "")
    hint = "a model takes its size for each rank several times over: gradients and optimizer state"
    yield Finding("memory", NOTE, seen, hint) if free < _LEAST_MEMORY else Finding("memory", FINE, seen)
    shm = root / "dev/shm"
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    if size < _LEAST_SHM:
        hint = "Paceline needs none; data loaders with workers do: `docker run --shm-size=1g`"
        yield Finding("/dev/shm", NOTE, _size(size), hint)
    else:
        yield Finding("/dev/shm", FINE, f"{_size(size)} (for data loaders; Paceline needs none)")


def _limits(root: Path) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _LEAST_FILES:
        hint = f"`ulimit -n {_LEAST_FILES}` or more: each rank holds some 30, and data loaders many"
        yield Finding("open files", WRONG if files < 64 else NOTE, f"{files} for each process", hint)
    else:
        yield Finding("open files", FINE, f"{'unlimited' if files < 0 else files} for each process")
    for name, which, option in (
        ("length of a file", resource.RLIMIT_FSIZE, "-f"),
        ("addresses", resource.RLIMIT_AS, "-v"),
    ):
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY:
            hint = f"`ulimit {option} unlimited`: the memory that ranks share counts"
            yield Finding(name, NOTE if soft > 2**32 else WRONG, f"at most {_size(soft)}", hint)


def _kernel(root: Path) -> Iterator[Finding]:
    yield _try_memory_file()
    with contextlib.suppress(ImportError):
        from paceline import _core

        if _core.has_futex_waitv():
            yield Finding("futex_waitv", FINE, f"Linux {platform.release()} has it")
        else:
            seen = f"not in this kernel ({platform.release()}; Linux 5.16 has it), or refused by a sandbox"
            yield Finding(
                "futex_waitv", NOTE, seen, "ranks look for the dead a little later; nothing is to be done"
            )
        if _core.has_robust_list():
            yield Finding("robust lists", FINE, "the kernel marks what a dead rank leaves")
        else:
            hint = "deaths are found through pidfds instead; nothing is to be done"
            yield Finding("robust lists", NOTE, "refused, by a sandbox as gVisor", hint)


def _try_memory_file() -> Finding:
    """Make shared memory as the ranks do: one page with two mappings."""
    try:
        fd = os.memfd_create("paceline-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as first, mmap.mmap(fd, mmap.PAGESIZE) as second:
                first[:4] = b"seen"
                is_shared = second[:4] == b"seen"
        finally:
            os.close(fd)
    except OSError as error:
        likely, hint = explain(error.errno or 0, "memfd_create")
        return Finding("shared memory", WRONG, f"{error}; {likely or 'the kernel refuses it'}", hint)
    if not is_shared:
        return Finding("shared memory", WRONG, "two mappings of one file differ", "is this kernel emulated?")
    return Finding("shared memory", FINE, "memory files can be made, and are shared")


# --- settings ---


def _launcher(root: Path) -> Iterator[Finding]:
    try:
        place = read_rank_environment()
    except ConfigError as error:
        if "No launcher" in error.summary:
            yield Finding("launcher", FINE, "no launcher's variables are set here, as in a plain shell")
        else:
            hint = f"expected: {error.expected}; unset what an earlier job has left here"
            yield Finding("launcher", WRONG, " ".join(error.summary.split()), hint)
        return
    seen = f"rank {place.rank} of {place.world_size}, rank 0 at {place.master_addr}:{place.master_port}"
    yield Finding("launcher", FINE, seen)
    if place.rank == 0 and place.master_port:
        try:
            check_port_is_free(place.master_addr, place.master_port)
        except PacelineError as error:
            yield Finding("port", WRONG, error.summary, "stop what listens there, or choose another port")
    elif place.rank:
        yield _resolve("rank 0's address", place.master_addr)


def _network(root: Path) -> Iterator[Finding]:
    yield _resolve("host name", socket.gethostname())
    names = [name for _, name in socket.if_nameindex()]
    yield Finding("interfaces", FINE if names else NOTE, ", ".join(names) or "none, not even lo")
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        hint = "the ranks of torch and Paddle connect to a port of this host"
        yield Finding("ports", WRONG, f"none can be opened at 127.0.0.1: {error}", hint)


def _resolve(name: str, host: str) -> Finding:
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        hint = (
            f"add a line for {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME: Gloo looks its own address up"
        )
        return Finding(name, NOTE, f"{host} has no address: {error}", hint)
    return Finding(name, FINE, f"{host} is {', '.join(addresses)}")


_CHECKS: tuple[Callable[[Path], Iterable[Finding]], ...] = (
    _versions,
    _cores,
    _memory,
    _limits,
    _kernel,
    _launcher,
    _network,
)


# --- the self-test ---


def _test_two_ranks() -> Finding:
    ports = free_ports(3)
    master_address = MasterAddress("127.0.0.1", ports[0], tuple(ports[1:]), new_job_id())
    ranks = [
        subprocess.Popen(
            python_command("from paceline.doctor import run_rank; run_rank()"),
            env={**os.environ, **rank_variables(rank, 2, master_address)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, err = ranks[0].communicate(timeout=_SELF_TEST_S)
    except subprocess.TimeoutExpired:
        return Finding("self-test", WRONG, f"two ranks were not done after {_SELF_TEST_S:.0f} s", _REPORT)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    try:
        reported = dict(json.loads(out))
    except ValueError:
        return Finding("self-test", WRONG, " ".join(err.split()[-60:]) or "rank 0 said nothing", _REPORT)
    if "raised" in reported:
        return Finding("self-test", WRONG, reported["raised"], reported["hint"] or _REPORT)
    if reported["mean"] != 1.5:
        return Finding("self-test", WRONG, f"the mean of 1 and 2 was {reported['mean']}", _REPORT)
    if reported["lost"] != [1]:
        return Finding("self-test", WRONG, f"rank 1 was killed, and rank 0 saw: {reported['error']}", _REPORT)
    return Finding(
        "self-test",
        FINE,
        f"two ranks averaged {_ELEMENTS * 4 // 1024} KiB in {reported['reduce_us']:.0f} us; "
        f"one was killed, and the other knew after {reported['noticed_ms']:.1f} ms",
    )


_REPORT = "please report this, with all that `paceline doctor --json` writes"


def run_rank() -> None:
    """The program of one rank of the self-test. Prints what the rank saw, as JSON."""
    try:
        reported = _average_and_strike()
    except PacelineError as error:
        seen = " ".join(filter(None, (error.summary, *error.seen.split(), error.likely)))
        reported = {"raised": seen, "hint": error.hint}
    print(json.dumps(reported), flush=True)


def _average_and_strike() -> dict[str, Any]:
    import numpy as np

    from paceline.collectives.init import init

    reported: dict[str, Any] = {"lost": [], "error": "nothing"}
    with init(timeout_s=_SELF_TEST_S / 2) as group:
        times = []
        for _ in range(20):
            array = np.full(_ELEMENTS, group.rank + 1.0, np.float32)
            group.barrier()
            begun = time.perf_counter()
            group.all_reduce(array, op="mean")
            times.append(time.perf_counter() - begun)
        reported |= {"mean": float(array[0]), "reduce_us": sorted(times)[len(times) // 2] * 1e6}
        pids = group.all_gather(np.array([os.getpid()]))
        if group.rank == 1:
            time.sleep(_SELF_TEST_S)
        struck = time.perf_counter()
        os.kill(int(pids[1, 0]), signal.SIGKILL)
        try:
            group.barrier()
        except PacelineError as error:
            reported["noticed_ms"] = (time.perf_counter() - struck) * 1e3
            reported["lost"], reported["error"] = list(getattr(error, "lost", ())), error.summary
    return reported


def _available_memory(root: Path) -> int | None:
    for line in read_or_empty(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
