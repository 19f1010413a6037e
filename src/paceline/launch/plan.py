"""The plan of a launch: one frozen value that is made before anything is started.

All errors in the options are found here, while there is nothing to clean up.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.launch.dashboard_process import check_dashboard
from paceline.launch.forked import Shared, shared_start
from paceline.launch.placement import Machine, assign_cores, assign_nodes, threads_per_rank
from paceline.launch.ports import check_port_is_free, free_ports
from paceline.launch.topology import read_machine
from paceline.launch.trace_file import check_output, trace_variables
from paceline.launch.variables import MasterAddress, new_job_id, rank_environment
from paceline.rendezvous.resource_limits import explain
from paceline.trace import jobs
from paceline.trace.ring_file import FOLDER_VARIABLE

MAX_NPROCS = 128  # same as _core.MAX_RANKS; a launcher does not load the core, which imports numpy

# What the launcher opens. For each rank: two streams, the log, the file for exceptions. For itself: pipes, an
# epoll, the secret, the call and the plan of `spawn`, and descriptors of the rank that is just being started.
_DESCRIPTORS_PER_RANK = 4
_OWN_DESCRIPTORS = 19

# A user who places threads by hand does not want a second placement on top.
_PLACEMENT_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class Options:
    """The user's options for the launcher, the same for `paceline run` and `spawn`."""

    nprocs: int | None = None  # None: as many as there are cores
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: a free one
    threads: int | None = None  # None: cores divided by ranks, unless OMP_NUM_THREADS is set
    bind: str = "auto"  # "auto", "cores", "none"
    prefix: str = "auto"  # "auto", "always", "never"
    log_dir: str | None = None
    timeout_s: float | None = None
    grace_s: float = 5.0
    preempt_s: float = 30.0  # from a SIGTERM for the job to SIGKILL
    exit_timeout_s: float = 1800.0  # how long the last ranks may be idle; like a process group's time-out
    trace: str | None = None  # a file for the timeline of all ranks
    dashboard: str | None = None  # the port of a page about the job; "0": a free one


@dataclass(frozen=True)
class Plan:
    """One launch, ready to start. Pickles."""

    name: str  # the name in messages: "train.py"
    command: tuple[str, ...]  # the same for every rank
    environments: tuple[Mapping[str, str], ...]  # one per rank
    cores: tuple[frozenset[int] | None, ...]  # one per rank; None: not bound
    options: Options
    passes_stdin: bool = True  # to rank 0
    inherited_fds: tuple[int, ...] = ()
    # Set by spawn: where each rank writes the exception that ended it, and where the launcher reports.
    error_fds: tuple[int, ...] = ()
    report_fd: int | None = None
    recording: Path = Path()  # the folder in which ranks record
    owns_recording: bool = False  # else the folder is the user's
    dashboard: tuple[int, str] | None = None  # port and token of the page
    shared: Shared | None = None  # what one process imports for all ranks; None: each starts by itself

    @property
    def nprocs(self) -> int:
        return len(self.environments)


def make_plan(
    name: str,
    command: tuple[str, ...],
    options: Options,
    *,
    inherited: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    script: Sequence[str] | None = None,
) -> Plan:
    """Check the options, and choose everything that they leave open.

    Args:
        name: The name of the job in messages.
        command: The command line of every rank.
        options: The user's options.
        inherited: The environment that ranks inherit; None: this process's.
        machine: What the ranks may use; None: read from the machine.
        script: The script with its arguments, if that is what the command runs.

    Raises:
        ConfigError: An option is invalid, or the port is taken.
    """
    _check_descriptors(options.nprocs)  # first: the machine is read from files
    machine = read_machine() if machine is None else machine
    options = _checked_options(options)
    nprocs = min(machine.num_cores, MAX_NPROCS) if options.nprocs is None else options.nprocs
    if options.log_dir is not None:
        _make_log_dir(options.log_dir, nprocs)
    inherited = os.environ if inherited is None else inherited
    if options.trace is not None:
        check_output(options.trace, nprocs)
    folder = jobs.new_folder()
    recorded = trace_variables(inherited, folder, is_whole=options.trace is not None)
    master_address = _choose_master(options, nprocs)
    has_gpu = Path("/dev/nvidiactl").exists()
    environments = tuple(
        rank_environment(
            rank,
            nprocs,
            master_address,
            {**inherited, **recorded},
            num_threads=options.threads or threads_per_rank(machine.num_cores, nprocs),
            is_threads_given=options.threads is not None,
            has_gpu=has_gpu,
        )
        for rank in range(nprocs)
    )
    return Plan(
        name=name,
        command=command,
        environments=environments,
        cores=_choose_cores(options, machine, nprocs, inherited),
        options=options,
        recording=Path({**inherited, **recorded}[FOLDER_VARIABLE]),
        owns_recording=FOLDER_VARIABLE in recorded,
        dashboard=None if options.dashboard is None else check_dashboard(options.dashboard, inherited),
        # Processes that have loaded GPU drivers must not be forked.
        shared=shared_start(script, nprocs, machine.num_cores, inherited) if script and not has_gpu else None,
    )


def _check_descriptors(nprocs: int | None) -> None:
    """Raise unless the launcher may open as many files as the ranks need.

    Raises:
        ConfigError: It may not. Raised now, because a launch would fail half-way.
    """
    if nprocs is None or nprocs not in range(1, MAX_NPROCS + 1):  # an invalid number is reported later
        nprocs = min(len(os.sched_getaffinity(0)), MAX_NPROCS)
    may, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        has = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError as error:
        likely, hint = explain(errno.ENOENT)
        raise ConfigError(
            "The launcher cannot see its own process.", seen=str(error), likely=likely, hint=hint
        ) from error
    except OSError:  # not even one more file
        has = may
    needs = has + _OWN_DESCRIPTORS + _DESCRIPTORS_PER_RANK * nprocs
    if needs > may:
        raise ConfigError(
            f"The launcher may not open as many files as it needs for {nprocs} ranks.",
            expected=f"at least {needs} (RLIMIT_NOFILE), of which {has} are open already",
            got=str(may),
            hint=f"`ulimit -n {needs}` before the launcher; a service manager calls it LimitNOFILE",
        )


def _checked_options(options: Options) -> Options:
    check = Arguments("")
    numbers: dict[str, Any] = {
        name: check.whole(name, value, least=1, most=most, hint=hint)
        for name, value, most, hint in (
            ("nprocs", options.nprocs, MAX_NPROCS, "of one machine; leave -n or nprocs out for one per core"),
            ("threads", options.threads, None, "leave --threads or threads out for cores divided by ranks"),
            (
                "master_port",
                options.master_port,
                65535,
                "leave --master-port or master_port out for a free one",
            ),
        )
        if value is not None
    }
    return replace(
        options,
        **numbers,
        timeout_s=None
        if options.timeout_s is None
        else launch_seconds(check, "timeout_s", options.timeout_s),
        grace_s=launch_seconds(check, "grace_s", options.grace_s),
        preempt_s=launch_seconds(check, "preempt_s", options.preempt_s),
        exit_timeout_s=launch_seconds(check, "exit_timeout_s", options.exit_timeout_s),
        bind=check.choice("bind", options.bind, ("auto", "cores", "none")),
        prefix=check.choice("prefix", options.prefix, ("auto", "always", "never")),
    )


def launch_seconds(check: Arguments, name: str, value: float | timedelta) -> float:
    """Check a number of seconds for the launcher: 0 means at once; no limit means leaving it out."""
    return check.seconds(name, value, may_be_zero=True, is_finite=True)


def _make_log_dir(path: str, nprocs: int) -> None:
    hint = 'a folder, new or old, that gets a file for each rank: log_dir="logs", --log-dir logs'
    if not isinstance(path, str) or not path:
        raise Arguments("").refuse("log_dir", path, "the name of a folder", hint)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a null character is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise Arguments("").refuse("log_dir", path, "a folder that can be made", hint, seen=reason) from None
    for rank in range(nprocs):
        log = folder / f"rank{rank}.log"
        if found := _what_is_no_log(log):
            raise ConfigError(
                f"The log of rank {rank} can't be written where {found.partition(' to ')[0]} is.",
                where=str(log),
                expected="no file of that name, or one of an earlier run",
                got=found,
                hint="remove it, or pass another folder as --log-dir",
            )


def _what_is_no_log(path: Path) -> str:
    """What another user may have put in the place of a log; "" if nothing is wrong."""
    try:
        mode = path.lstat().st_mode
    except OSError:  # there is nothing, or opening it will report what is wrong
        return ""
    if stat.S_ISLNK(mode):
        return f"a link to {os.readlink(path)}"
    kinds = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISDIR: "a folder"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "")


def _choose_master(options: Options, nprocs: int) -> MasterAddress:
    if options.master_port is None:
        if options.master_addr != Options.master_addr:
            check_port_is_free(options.master_addr, 0)
        master_port, *paddle_ports = free_ports(nprocs + 1)
    else:
        master_port = options.master_port
        check_port_is_free(options.master_addr, master_port)
        paddle_ports = free_ports(nprocs)
    return MasterAddress(options.master_addr, master_port, tuple(paddle_ports), new_job_id())


def _choose_cores(
    options: Options, machine: Machine, nprocs: int, inherited: Mapping[str, str]
) -> tuple[frozenset[int] | None, ...]:
    unbound = (None,) * nprocs
    if options.bind == "none":
        return unbound
    if options.bind == "auto":
        is_placed_by_user = any(inherited.get(name) for name in _PLACEMENT_VARIABLES)
        # Under a quota, every container on the machine would bind to the same first cores.
        if nprocs == 1 or is_placed_by_user or machine.is_cut_by_quota:
            return unbound
    cores = assign_cores(machine.cpus, nprocs)
    if cores is None and options.bind == "cores":
        raise ConfigError(
            f"--bind cores needs a core for each rank, and {nprocs} ranks share {len(machine.cpus)} cores.",
            hint="--bind none, or fewer ranks",
            nprocs=nprocs,
        )
    if cores is None:
        cores = assign_nodes(machine.cpus, nprocs)
    return unbound if cores is None else tuple(cores)
