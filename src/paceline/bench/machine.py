"""What a measurement was made on: processor, cores, load and versions.

Imports the launcher's view of the cores.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from paceline.launch.topology import read_machine, read_processor

_PACKAGES = ("paceline", "numpy", "torch", "paddlepaddle", "mpi4py")


@dataclass(frozen=True)
class Machine:
    """Where and when a bench ran.

    Attributes:
        processor: The processor's own name for itself.
        cores: Cores that this process may use: affinity and cgroup quota counted.
        memory_gib: Memory of the machine.
        load: Load average over a minute, before the bench started.
        kernel: Operating system and its release.
        versions: The versions of Python and of the packages that matter.
        date: UTC, as in ISO 8601.
    """

    processor: str
    cores: int
    memory_gib: int
    load: float
    kernel: str
    versions: dict[str, str]
    date: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            processor=read_processor(),
            cores=usable_cores(),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            load=round(os.getloadavg()[0], 2),
            kernel=f"{platform.system()} {platform.release()}",
            versions=_versions(),
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    @property
    def slug(self) -> str:
        """Short name for file names, as `xeon-2.50ghz-2c`."""
        words = re.sub(r"\((R|TM)\)|@", " ", self.processor).lower().split()
        kept = [word for word in words if word not in {"intel", "amd", "cpu", "processor", "with"}]
        return re.sub(r"[^a-z0-9.-]+", "-", "-".join(kept[:4]) or "machine") + f"-{self.cores}c"

    def describe(self) -> str:
        """Two lines for people."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.processor}, {self.cores} cores usable, {self.memory_gib} GiB, {self.kernel}\n"
            f"{versions}; load before: {self.load}; {self.date}"
        )

    def as_json(self) -> dict[str, object]:
        """All of it as plain values."""
        return asdict(self)


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the cgroup's quota."""
    return read_machine().num_cores


def _versions() -> dict[str, str]:
    installed = {name: _version(name) for name in _PACKAGES}
    found = {name: version for name, version in installed.items() if version}
    return {"Python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
