"""Which cores and how many threads each rank gets. Pure; topology.py reads the machine.

Its one idea: cut the list of usable CPUs, ordered so that neighbours share caches and memory, into one run of
neighbours per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


@dataclass(frozen=True, order=True)
class Cpu:
    """One logical CPU; the order of the fields is the order of nearness."""

    node: int  # NUMA node
    package: int
    core: int  # the hyper-threads of a core share it
    cpu: int  # what sched_setaffinity takes


@dataclass(frozen=True)
class Machine:
    """What this process may use of the machine."""

    cpus: tuple[Cpu, ...]  # of the affinity mask
    quota: float | None  # CPUs that the cgroup pays for; None: all

    @property
    def num_cores(self) -> int:
        """Usable cores: the affinity mask or the quota, whichever is less, and at least one."""
        quota = len(self.cpus) if self.quota is None else int(self.quota)
        return max(1, min(len(self.cpus), quota))

    @property
    def is_cut_by_quota(self) -> bool:
        """The quota gives less than the mask shows: other jobs are on the same CPUs."""
        return self.num_cores < len(self.cpus)


def threads_per_rank(num_cores: int, nprocs: int) -> int:
    """Threads for each rank so that all of them together fit the cores.

    Example:
        >>> threads_per_rank(8, 3), threads_per_rank(2, 8)
        (2, 1)
    """
    return max(1, num_cores // nprocs)


def assign_cores(cpus: Iterable[Cpu], nprocs: int) -> list[frozenset[int]] | None:
    """Disjoint sets of CPUs, one per rank, that cover all CPUs; None when there are more ranks than CPUs.

    Hyper-threads of one core go to one rank where there are enough cores. Sizes differ by one core at most.

    Example:
        4 cores, 2 ranks: rank 0 gets {0, 1}, rank 1 gets {2, 3}.
    """
    ordered = sorted(cpus)
    if nprocs > len(ordered):
        return None
    cores = [list(group) for _, group in groupby(ordered, key=lambda cpu: (cpu.node, cpu.package, cpu.core))]
    units = cores if nprocs <= len(cores) else [[cpu] for cpu in ordered]
    return [frozenset(cpu.cpu for unit in run for cpu in unit) for run in _cut(units, nprocs)]


def _cut(units: Sequence[list[Cpu]], num_runs: int) -> list[Sequence[list[Cpu]]]:
    """Consecutive runs whose lengths differ by one at most."""
    bounds = [len(units) * run // num_runs for run in range(num_runs + 1)]
    return [units[begin:end] for begin, end in pairwise(bounds)]
