"""Its one idea: cut the list of usable CPUs, ordered so that neighbours share caches and memory, into one run
of neighbours per rank. Where it costs no rank a CPU, no run goes beyond a NUMA node: the kernel gives a rank
memory of the node that it runs on.
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

    Hyper-threads of one core go to one rank where there are enough cores. Sizes differ by one core at most,
    unless ranks of larger sets can each stay in one NUMA node while the smallest set is as large as before.
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
    """For more ranks than CPUs: all CPUs of one NUMA node for each rank; None where there is one node only.

    Unbound, such a rank would be moved between nodes, away from its memory.
    """
    nodes = [
        frozenset(cpu.cpu for cpu in node) for _, node in groupby(sorted(cpus), key=lambda cpu: cpu.node)
    ]
    if len(nodes) < 2:
        return None
    seats = _seats([len(node) for node in nodes], nprocs)
    return [node for node, count in zip(nodes, seats, strict=True) for _ in range(count)]


def _seats(sizes: Sequence[int], nprocs: int) -> list[int]:
    """How many ranks each node gets, at least one, so that the rank with the least has as much as it can.

    Source: the method of highest averages, D'Hondt 1882.
    """
    seats = [1] * len(sizes)
    for _ in range(nprocs - len(sizes)):
        # Of equals the first: ranks are numbered node by node.
        seats[max(range(len(sizes)), key=lambda node: sizes[node] / (seats[node] + 1))] += 1
    return seats


def _numbers(runs: Iterable[Sequence[list[Cpu]]]) -> list[frozenset[int]]:
    return [frozenset(cpu.cpu for unit in run for cpu in unit) for run in runs]


def _cut(units: Sequence[list[Cpu]], num_runs: int) -> list[Sequence[list[Cpu]]]:
    bounds = [len(units) * run // num_runs for run in range(num_runs + 1)]
    return [units[begin:end] for begin, end in pairwise(bounds)]
