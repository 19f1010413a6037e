"""`paceline run --nnodes 2 --rdzv HOST:PORT`: the ranks of several hosts, started by torch's elastic agent.

torch's agent on each host starts the ranks of that host, and the agents agree on the ranks of each. The
launcher passes each agent what it would have to guess (whether it serves the store, and at which address
other hosts reach it). It also reports what the agent waits for in silence: a rendezvous address that does not
exist yet, or other hosts. Two shells of one machine may be two hosts: the first launcher there serves.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.arguments import Arguments
from paceline.env import split_address
from paceline.errors import ConfigError
from paceline.launch import failure_report
from paceline.launch.dashboard_process import DashboardProcess, check_dashboard
from paceline.launch.output import say
from paceline.launch.ports import check_port_is_free, free_ports
from paceline.launch.process_tree import (
    adopt_orphans,
    children,
    descendants,
    die_with_parent,
    has_had_children,
    kill_descendants,
    pass_on,
    wait_readable,
)
from paceline.launch.rank_process import interpreter
from paceline.launch.trace_file import HostTrace, JobRecording, trace_variables
from paceline.rendezvous.addresses import Way, find_way, means_this_host, wait_for_listener
from paceline.trace import jobs
from paceline.trace.ring_file import FOLDER_VARIABLE

_LOOK_S = 0.5
_SAY_EVERY_S = 10.0


@dataclass(frozen=True)
class Elastic:
    """The user's options for a launch on several hosts, the same on each of them.

    Attributes:
        nnodes: Number of hosts.
        rdzv: Rendezvous address "host:port" of the agents: a host of the job, and a free port of it.
        nprocs: Number of ranks on this host.
        timeout_s: How long to wait for the other hosts.
        log_dir: A folder to which the output of each rank is also written.
        threads: OMP_NUM_THREADS of each rank.
        trace: A file for the timeline of this host's ranks; the host's name is added. None: none is written.
        dashboard: The port of the dashboard on this host; "0": a free one; None: no dashboard.
        node_rank: Which host this is; the ranks of host 0 come first. None: the agents decide.
    """

    nnodes: int
    rdzv: str
    nprocs: int
    timeout_s: float
    log_dir: str | None
    threads: int
    trace: str | None = None
    dashboard: str | None = None
    node_rank: int | None = None


def run_elastic(elastic: Elastic, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run torch's agent for this host, once the rendezvous address can be reached.

    Args:
        elastic: The user's options.
        command: The script or module, with `-m` before it, and its arguments.
        environment: What the ranks inherit.

    Raises:
        ConfigError: An option is wrong, torch is not installed, the host's name does not resolve here, or
            another program has the port.
        RendezvousError: No process listened at the rendezvous address in time.
    """
    checked = check(elastic)
    host, port = split_address(checked.rdzv, "--rdzv")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "--nnodes needs torch, whose elastic agent brings the hosts together.",
            hint="pip install torch; for Paddle, paddle.distributed.launch --nnodes 2 --master host:port",
        )
    way = find_way(host, "--rdzv")
    if way.is_loopback and not means_this_host(host) and checked.nnodes > 1:
        raise ConfigError(
            f"--rdzv {checked.rdzv} means this host on every host.",
            seen=way.describe(),
            likely="a name that /etc/hosts of this machine gives to 127.0.0.1 or 127.0.1.1",
            hint="the address of one of the hosts, as the others reach it: --rdzv 10.0.0.1:29400; "
            "if all are on this machine, --rdzv localhost:29400",
        )
    if checked.node_rank == 0 and not way.is_own:
        raise ConfigError(
            f"--node-rank 0 is not on the host of --rdzv {checked.rdzv}.",
            seen=way.describe(),
            hint="--node-rank 0 on that host, or an address of this one as --rdzv on all hosts",
        )
    decided = nullcontext(checked.node_rank == 0)
    with _claim_port(port) if checked.node_rank is None and way.is_own else decided as serves:
        if serves:
            rdzv = f"{host}:{free_ports(1)[0]}"
            check_port_is_free(
                way.address,
                port,
                likely="another program listens there, or a launcher that is not `paceline run`",
                hint=f"another free port, with the same --rdzv on all hosts: --rdzv {rdzv}",
            )
        else:
            wait_for_listener(
                way,
                port,
                checked.timeout_s,
                what="--rdzv",
                who=f"Host {socket.gethostname()}",
                likely=f"`paceline run` was not started on {way.name}",
                hint=f"on {way.name}: `paceline run` with the same --rdzv. --rdzv-timeout-s waits longer",
            )
        arguments = agent_command(checked, way, port, serves=serves)
        threads = environment.get("OMP_NUM_THREADS") or str(checked.threads)
        variables = {**environment, "OMP_NUM_THREADS": threads}
        words = [*interpreter(), *arguments, *command]
        sys.stdout.flush()
        sys.exit(
            _run_watched(words, variables, _watch_of(checked, command, variables), _RendezvousPoint(checked))
        )


@dataclass(frozen=True)
class _Watch:
    """What the launcher records of the ranks of this host (and of all hosts, if rank 0 is here).

    Attributes:
        recording: The recording.
        dashboard: The dashboard that shows it; None if there is none.
        trace: The timeline; None if none is written.
        variables: Environment variables for the ranks.
    """

    recording: JobRecording
    dashboard: DashboardProcess | None
    trace: HostTrace | None
    variables: Mapping[str, str]


def _watch_of(elastic: Elastic, command: Sequence[str], inherited: Mapping[str, str]) -> _Watch:
    """Choose where the ranks record.

    Raises:
        ConfigError: Nothing can be written there, or the dashboard's port or token is invalid.
    """
    dashboard = None if elastic.dashboard is None else check_dashboard(elastic.dashboard, inherited)
    trace: HostTrace | None = None
    if elastic.trace is not None:
        trace = HostTrace(elastic.trace, socket.gethostname(), elastic.nprocs)
        variables, is_own = trace.begin(inherited), False
    else:
        variables = trace_variables(inherited, jobs.new_folder(), is_whole=False)
        is_own = FOLDER_VARIABLE in variables
    folder = Path({**inherited, **variables}[FOLDER_VARIABLE])
    name = next((word for word in command if word != "-m"), "")
    recording = JobRecording(
        folder, is_own=is_own, output=None, name=name, nprocs=elastic.nprocs, launcher=os.getpid(), say=say
    )
    page = None if dashboard is None else DashboardProcess(folder, *dashboard, say)
    return _Watch(recording, page, trace, variables)


class _RendezvousPoint:
    """Reports what the agent waits for in silence, until it has started a rank."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        self._began_s = time.monotonic()
        self._say_at_s = self._began_s + _SAY_EVERY_S
        self._is_over = elastic.nnodes == 1

    def seconds_to_look(self) -> float:
        """Seconds until the next call of `look`."""
        return math.inf if self._is_over else _LOOK_S

    def look(self, agent: int) -> None:
        """Report it if it is time to. The agent runs, or is an unreaped zombie."""
        if self._is_over or descendants(agent) or has_had_children(agent):
            self._is_over = True
        elif time.monotonic() >= self._say_at_s:
            self._say_at_s += _SAY_EVERY_S
            rdzv, nnodes = self._elastic.rdzv, self._elastic.nnodes
            alone = "; only processes of this machine reach it" * means_this_host(rdzv.rpartition(":")[0])
            say(
                f"paceline: {self._waited()} at --rdzv {rdzv} for the other hosts of --nnodes {nnodes}{alone}"
            )

    def end(self, status: int) -> None:
        """The agent has ended: report if it gave up before there was any rank."""
        # An agent whose rank failed at once may end before the time-out.
        has_given_up = time.monotonic() - self._began_s >= self._elastic.timeout_s
        if self._is_over or status == 0 or not has_given_up:
            return
        nnodes, rdzv = self._elastic.nnodes, self._elastic.rdzv
        say(
            f"paceline: {self._waited()} for the other hosts, and started no rank.\n"
            "  likely   another host was not started, has another --nnodes, or cannot reach this address\n"
            f"  hint     --nnodes {nnodes} and --rdzv {rdzv} on each host; --rdzv-timeout-s waits longer"
        )

    def _waited(self) -> str:
        return f"host {socket.gethostname()} has waited {time.monotonic() - self._began_s:.0f} s"


def _pass_on(agent: int, signum: int) -> None:
    """Send an agent's ranks a signal that schedulers send as a warning, except ranks that it would end."""
    ranks = children(agent)
    deaf = pass_on(ranks, signum)
    if not ranks:
        say(f"paceline: {signal.Signals(signum).name} came while no rank runs, and reaches none")
    elif deaf:
        say(failure_report.not_passed_on(signum, f"pid {', '.join(map(str, deaf))}"))


def _run_watched(
    words: Sequence[str], environment: Mapping[str, str], watch: _Watch, rendezvous: _RendezvousPoint
) -> int:
    """Run the agent as a child, and report what its ranks record. Returns its exit status.

    A Ctrl-C reaches the agent from the terminal; other signals are passed on. If this process is killed, the
    agent gets a SIGTERM. If the agent is killed, its ranks become children of this process, which kills them.
    """
    own_pid = os.getpid()
    adopt_orphans()
    watch.recording.begin()
    if watch.dashboard is not None:
        watch.dashboard.begin()
    warnings = (signal.SIGUSR1, signal.SIGUSR2)  # blocked until here

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, warnings)
        die_with_parent(own_pid, signal.SIGTERM)

    agent = subprocess.Popen(words, env={**environment, **watch.variables}, preexec_fn=prepare)
    ended = os.pidfd_open(agent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda received, _: agent.send_signal(received))
    for signum in warnings:  # they would end the agent
        signal.signal(signum, lambda received, _: _pass_on(agent.pid, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, warnings)
    while not wait_readable([ended], min(watch.recording.seconds_to_look(), rendezvous.seconds_to_look())):
        watch.recording.look()
        rendezvous.look(agent.pid)
    rendezvous.look(agent.pid)
    os.close(ended)
    found = agent.wait()
    status = found if found >= 0 else 128 - found
    rendezvous.end(status)
    if watch.dashboard is not None:
        watch.dashboard.end(status)
    if found < 0:
        say(
            f"paceline: torch's agent on host {socket.gethostname()} was ended by "
            f"{signal.Signals(-found).name}, and its ranks are ended with it"
        )
        kill_descendants()
    watch.recording.end(status)
    if watch.trace is not None:
        watch.trace.end(say)
    return status


def check(elastic: Elastic) -> Elastic:
    """Raise unless the numbers and the address are valid.

    Raises:
        ConfigError: One of them is not.
    """
    arguments = Arguments("")
    hint = "--nnodes 2 --rdzv node0:29400 on both hosts"
    arguments.whole("nnodes", elastic.nnodes, least=1, hint=hint)
    arguments.whole("nprocs", elastic.nprocs, least=1, hint="-n 4: ranks on this host")
    if elastic.node_rank is not None:
        most = elastic.nnodes - 1
        arguments.whole("node_rank", elastic.node_rank, least=0, most=most, hint="another one on each host")
    arguments.seconds("rdzv_timeout_s", elastic.timeout_s, is_finite=True)
    split_address(elastic.rdzv, "--rdzv")
    return elastic


def agent_command(elastic: Elastic, way: Way, port: int, *, serves: bool) -> list[str]:
    """The arguments of torch's agent on this host.

    Example:
        On node1, of two hosts that meet at node0:29400: ["-m", "paceline.torch.elastic_agent", "--nnodes",
        "2", "--nproc-per-node", "2", ..., "--rdzv-conf", "is_host=0,...", "--local-addr", "10.77.0.2"].
    """
    seconds = max(1, round(elastic.timeout_s))
    address = f"[{way.address}]" if ":" in way.address else way.address
    options = {
        "--nnodes": str(elastic.nnodes),
        "--nproc-per-node": str(elastic.nprocs),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{address}:{port}",
        "--rdzv-conf": f"is_host={int(serves)},join_timeout={seconds},last_call_timeout=1",
        "--local-addr": way.own_address,
    }
    if elastic.node_rank is not None:
        options |= {"--rdzv-backend": "static", "--node-rank": str(elastic.node_rank)}
        options["--rdzv-conf"] = f"timeout={seconds}"
    if elastic.log_dir is not None:
        options |= {"--log-dir": elastic.log_dir, "--tee": "3"}
    return ["-m", "paceline.torch.elastic_agent", *(word for pair in options.items() for word in pair)]


@contextmanager
def _claim_port(port: int) -> Iterator[bool]:
    """Reserve a port among the launchers of this machine; yields whether no other launcher has reserved it.

    Binding the port itself would not do: the agent takes seconds until it listens, and the launcher of
    another shell may start meanwhile. So this binds an abstract socket name, which ends with its process.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0paceline-rdzv-{port}")
        except OSError:
            yield False
            return
        yield True
