"""Assigns CPUs to ranks.

The usable CPUs are ordered so that neighbours share caches and memory, and cut into one range of neighbours
for each rank. Unless it costs a rank a CPU, no range crosses a NUMA node: the kernel gives a rank memory of
the node on which it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise


@dataclass(frozen=True, order=True)
class Cpu:
    """One logical CPU; sorting by these fields puts near CPUs beside each other."""

    node: int  # NUMA node
    package: int
    core: int  # shared by the hyper-threads of a core
    cpu: int  # the number for sched_setaffinity


@dataclass(frozen=True)
class Machine:
    """What this process may use of the machine."""

    cpus: tuple[Cpu, ...]  # of the affinity mask
    quota: float | None  # the cgroup's CPU quota; None: no limit

    @property
    def num_cores(self) -> int:
        quota = len(self.cpus) if self.quota is None else int(self.quota)
        return max(1, min(len(self.cpus), quota))

    @property
    def is_cut_by_quota(self) -> bool:
        """The quota is smaller than the mask: other jobs run on the same CPUs."""
        return self.num_cores < len(self.cpus)


def threads_per_rank(num_cores: int, nprocs: int) -> int:
    """Threads for each rank, so that all of them together fit the cores.

    Example:
        >>> threads_per_rank(8, 3), threads_per_rank(2, 8)
        (2, 1)
    """
    return max(1, num_cores // nprocs)


def assign_cores(cpus: Iterable[Cpu], nprocs: int) -> list[frozenset[int]] | None:
    """Disjoint sets of CPUs, one per rank, that cover all CPUs; None if there are more ranks than CPUs.

    Hyper-threads of one core go to one rank if there are enough cores. Sizes differ by one core at most,
    unless ranks with larger sets can each stay in one NUMA node while the smallest set stays as large.
    """
    ordered = sorted(cpus)
    if nprocs > len(ordered):
        return None
    cores = [list(group) for _, group in groupby(ordered, key=lambda cpu: (cpu.node, cpu.package, cpu.core))]
    units = cores if nprocs <= len(cores) else [[cpu] for cpu in ordered]
    even = _numbers(_cut(units, nprocs))
    nodes = [list(group) for _, group in groupby(units, key=lambda unit: unit[0].node)]
    if nprocs < len(nodes):
        return even
    runs: list[Sequence[list[Cpu]]] = []
    for node, seats in zip(nodes, _seats([len(node) for node in nodes], nprocs), strict=True):
        runs += _cut(node, seats)
    within = _numbers(runs)
    return within if min(map(len, within)) >= min(map(len, even)) else even


def assign_nodes(cpus: Iterable[Cpu], nprocs: int) -> list[frozenset[int]] | None:
    """For more ranks than CPUs: all CPUs of one NUMA node for each rank; None if there is only one node.

    Otherwise the kernel would move such a rank between nodes, away from its memory.
    """
    nodes = [
        frozenset(cpu.cpu for cpu in node) for _, node in groupby(sorted(cpus), key=lambda cpu: cpu.node)
    ]
    if len(nodes) < 2:
        return None
    seats = _seats([len(node) for node in nodes], nprocs)
    return [node for node, count in zip(nodes, seats, strict=True) for _ in range(count)]


def _seats(sizes: Sequence[int], nprocs: int) -> list[int]:
    """The number of ranks on each node, at least one; maximizes the CPUs of the rank with the fewest.

    Source: the method of highest averages, D'Hondt 1882.
    """
    seats = [1] * len(sizes)
    for _ in range(nprocs - len(sizes)):
        # Of equal nodes the first one: ranks are numbered node by node.
        seats[max(range(len(sizes)), key=lambda node: sizes[node] / (seats[node] + 1))] += 1
    return seats


def _numbers(runs: Iterable[Sequence[list[Cpu]]]) -> list[frozenset[int]]:
    return [frozenset(cpu.cpu for unit in run for cpu in unit) for run in runs]


def _cut(units: Sequence[list[Cpu]], num_runs: int) -> list[Sequence[list[Cpu]]]:
    bounds = [len(units) * run // num_runs for run in range(num_runs + 1)]
    return [units[begin:end] for begin, end in pairwise(bounds)]
