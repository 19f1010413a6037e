"""What this process may use of the machine: affinity mask, cgroup quota and memory, cores and NUMA nodes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.launch.placement import Cpu, Machine


def read_machine(root: Path = Path("/")) -> Machine:
    """`root` is the folder that contains proc/ and sys/."""
    nodes = _node_of_cpu(root)
    cpus = tuple(_read_cpu(root, cpu, nodes.get(cpu, 0)) for cpu in sorted(os.sched_getaffinity(0)))
    return Machine(cpus=cpus, quota=read_quota(root))


def read_processor(root: Path = Path("/")) -> str:
    for line in read_or_empty(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model"}:
            return value.strip()
    return f"{platform.machine()} processor"


def parse_cpu_list(text: str) -> set[int]:
    """CPUs in the kernel's list format ("0-3,8")."""
    cpus: set[int] = set()
    for begin, end in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(begin), int(end or begin) + 1))
    return cpus


def read_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's cgroup and those above it; None without a limit."""
    quotas = [quota for quota in _quotas(root) if quota is not None]
    return min(quotas, default=None)


def read_memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the cgroup of this process and those above it still allow; None without a limit."""
    left = []
    for folder, is_first_version in _control_groups(root, "memory"):
        names = ("limit_in_bytes", "usage_in_bytes") if is_first_version else ("max", "current")
        limit, used = (read_or_empty(folder / f"memory.{name}").strip() for name in names)
        if limit.isdigit() and used.isdigit():
            left.append(int(limit) - int(used))
    return min(left, default=None)


def _quotas(root: Path) -> Iterator[float | None]:
    for folder, is_first_version in _control_groups(root, "cpu"):
        if is_first_version:
            words = [read_or_empty(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        else:
            words = read_or_empty(folder / "cpu.max").split()
        yield _ratio(words)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """This process's cgroups with a controller, as folders, and whether they are of cgroup version 1."""
    mount = root / "sys/fs/cgroup"
    for line in read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((folder, False) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            yield from ((folder, True) for folder in _upwards(mount / controller, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and those above it. In a container, only the mount itself may exist."""
    folder = mount / path.strip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _ratio(words: list[str]) -> float | None:
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _node_of_cpu(root: Path) -> dict[int, int]:
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpu_list(read_or_empty(folder / "cpulist")):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    return nodes


def _read_cpu(root: Path, cpu: int, node: int) -> Cpu:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package = read_or_empty(folder / "physical_package_id").strip()
    core = read_or_empty(folder / "core_id").strip()
    return Cpu(
        node=node,
        package=int(package) if package.isdigit() else 0,
        core=int(core) if core.isdigit() else cpu,
        cpu=cpu,
    )


def read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
