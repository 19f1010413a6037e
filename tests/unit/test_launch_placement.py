"""Cores and threads of each rank, and reading them from a machine."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.launch.placement import Cpu, Machine, assign_cores, assign_nodes, threads_per_rank
from paceline.launch.plan import Options, make_plan
from paceline.launch.topology import parse_cpu_list, read_machine, read_quota


@st.composite
def machines(draw: st.DrawFn) -> list[Cpu]:
    """Nodes of cores of hyper-threads, some of which the affinity mask leaves out."""
    num_nodes, cores, threads = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 2))
    cpus = [
        Cpu(node=node, package=node, core=core, cpu=(thread * num_nodes + node) * cores + core)
        for node in range(num_nodes)
        for core in range(cores)
        for thread in range(threads)
    ]
    return draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))


@given(machines(), st.integers(1, 40))
def test_ranks_share_no_core_and_none_is_idle(cpus: list[Cpu], nprocs: int) -> None:
    sets = assign_cores(cpus, nprocs)
    if nprocs > len(cpus):
        assert sets is None
        return
    assert sets is not None
    assert len(sets) == nprocs
    assert all(sets)
    assert sum(len(cores) for cores in sets) == len(cpus)
    assert frozenset().union(*sets) == {cpu.cpu for cpu in cpus}


@given(machines(), st.integers(1, 40))
def test_hyper_threads_of_a_core_stay_together(cpus: list[Cpu], nprocs: int) -> None:
    cores = {(cpu.node, cpu.core) for cpu in cpus}
    sets = assign_cores(cpus, nprocs)
    if sets is None or nprocs > len(cores):
        return
    by_number = {cpu.cpu: (cpu.node, cpu.core) for cpu in cpus}
    owned = [{by_number[cpu] for cpu in numbers} for numbers in sets]
    assert sum(len(part) for part in owned) == len(cores)
    if len({node for node, _ in cores}) == 1:
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_ranks_stay_in_their_numa_node() -> None:
    # Linux often numbers nodes in turns: even CPUs on node 0, odd ones on node 1.
    cpus = [Cpu(node=cpu % 2, package=cpu % 2, core=cpu // 2, cpu=cpu) for cpu in range(8)]
    assert assign_cores(cpus, 2) == [frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})]
    assert assign_cores(cpus, 4) == [frozenset(pair) for pair in ({0, 2}, {4, 6}, {1, 3}, {5, 7})]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 12))
def test_a_rank_is_on_two_nodes_only_where_another_would_have_less(sizes: list[int], nprocs: int) -> None:
    cpus = [
        Cpu(node, node, core, 10 * node + core) for node, size in enumerate(sizes) for core in range(size)
    ]
    sets = assign_cores(cpus, nprocs)
    if sets is None:
        return
    least = len(cpus) // nprocs  # the result of an even cut
    assert min(map(len, sets)) == least or all(len(each) >= least for each in sets)
    all_seats = itertools.product(range(1, nprocs + 1), repeat=len(sizes))
    fits = any(
        sum(seats) == nprocs and all(size // seat >= least for size, seat in zip(sizes, seats, strict=True))
        for seats in all_seats
    )
    assert all(len({cpu // 10 for cpu in each}) == 1 for each in sets) == fits


def test_more_ranks_than_cpus_are_bound_to_nodes() -> None:
    cpus = [Cpu(node=cpu % 2, package=cpu % 2, core=cpu // 2, cpu=cpu) for cpu in range(6)]
    even, odd = frozenset({0, 2, 4}), frozenset({1, 3, 5})
    assert assign_cores(cpus, 7) is None
    assert assign_nodes(cpus, 7) == [even] * 4 + [odd] * 3
    assert assign_nodes(cpus[:4] + cpus[5:], 128) == [frozenset({0, 2})] * 51 + [odd] * 77
    assert assign_nodes(cpus[::2], 7) is None
    machine = Machine(tuple(cpus), quota=None)
    assert plan_on(machine, nprocs=7)[2] == (even,) * 4 + (odd,) * 3
    assert plan_on(machine, nprocs=7, bind="none")[2] == (None,) * 7
    with pytest.raises(ConfigError, match="7 ranks share 6 cores"):
        plan_on(machine, nprocs=7, bind="cores")


@given(st.integers(1, 200), st.integers(1, 128))
def test_threads_fill_the_cores_and_no_more(num_cores: int, nprocs: int) -> None:
    threads = threads_per_rank(num_cores, nprocs)
    assert threads >= 1
    assert threads * nprocs <= max(num_cores, nprocs) < (threads + 1) * nprocs + nprocs


@given(st.sets(st.integers(0, 300)))
def test_parse_cpu_list(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus))) + "\n") == cpus


def test_parse_cpu_ranges() -> None:
    assert parse_cpu_list("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/../gone\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "3:cpuset:/\n2:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_read_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_quota(tmp_path) == quota


def test_this_machine() -> None:
    machine = read_machine()
    assert {cpu.cpu for cpu in machine.cpus} == os.sched_getaffinity(0)
    assert 1 <= machine.num_cores <= len(machine.cpus)


FOUR_CORES = tuple(Cpu(node=0, package=0, core=core, cpu=core) for core in range(4))


def plan_on(
    machine: Machine, inherited: dict[str, str] | None = None, **options: object
) -> tuple[object, ...]:
    plan = make_plan("x", ("x",), Options(**options), inherited=inherited or {}, machine=machine)  # type: ignore[arg-type]
    return plan.nprocs, plan.environments[0]["OMP_NUM_THREADS"], plan.cores


def test_ranks_are_bound_only_where_the_cores_are_theirs() -> None:
    machine = Machine(FOUR_CORES, quota=None)
    halves = (frozenset({0, 1}), frozenset({2, 3}))
    assert plan_on(machine, nprocs=2) == (2, "2", halves)
    assert plan_on(machine, nprocs=2, bind="none") == (2, "2", (None, None))
    assert plan_on(machine, nprocs=8)[2] == (None,) * 8
    assert plan_on(machine, {"OMP_PROC_BIND": "true"}, nprocs=2)[2] == (None, None)
    limited = Machine(FOUR_CORES, quota=2.5)
    assert plan_on(limited) == (2, "1", (None, None))
    assert plan_on(limited, bind="cores")[2] == halves


def test_threads_that_the_user_set_stay() -> None:
    machine = Machine(FOUR_CORES, quota=None)
    assert plan_on(machine, {"OMP_NUM_THREADS": "7"}, nprocs=2)[1] == "7"
    assert plan_on(machine, {"OMP_NUM_THREADS": "7"}, nprocs=2, threads=3)[1] == "3"
