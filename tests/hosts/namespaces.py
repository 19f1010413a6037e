"""Network namespaces as hosts: each has one link to a bridge, with a limited rate in both directions.

host 0 --eth0===port0-- bridge --port1===eth0-- host 1

The bridge has its own namespace, and no namespace has a route to the outside: no packet leaves them, and the
machine's own network is not touched. Each host has a name of its own, and resolves those of the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUBNET = "10.77.0."


@dataclass(frozen=True)
class Rate:
    """The rate of a link in each direction.

    Attributes:
        tbf: The rate as tc spells it.
        bits_per_s: The rate as a number.
        burst: Bytes that may pass at once, as tc spells them: at the host's end, and at the bridge's.
        limit: Bytes that may wait in the queue, likewise.
    """

    tbf: str
    bits_per_s: float
    burst: tuple[str, str]
    limit: tuple[str, str]


RATES = {
    # Like a link between two buildings: a full queue takes 16 s to drain.
    "1mbit": Rate("1mbit", 1e6, ("16kb", "16kb"), ("2mb", "2mb")),
    "100mbit": Rate("100mbit", 1e8, ("16kb", "64kb"), ("2mb", "8mb")),
    # Smaller bursts cut the large packets of segmentation offload, and lose them.
    "1gbit": Rate("1gbit", 1e9, ("70kb", "256kb"), ("4mb", "8mb")),
    "10gbit": Rate("10gbit", 1e10, ("1mb", "2mb"), ("8mb", "16mb")),
}


def why_not() -> str:
    """Return the reason why this process cannot make hosts, or "" if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    try:
        with Hosts(1, "1gbit"):
            return ""
    except HostsError as error:
        return str(error)


class HostsError(RuntimeError):
    """A command of the set-up failed."""


class Hosts:
    """A context manager that makes hosts; at its end it kills the processes that run in them.

    A SIGTERM ends the block as an exception does, and then ends this process.

    Args:
        count: The number of hosts.
        rate: The rate of each link, a key of RATES.
        congestion: TCP's congestion control between them; "": the default of this machine.
    """

    def __init__(self, count: int, rate: str, congestion: str = "") -> None:
        self.count, self.rate, self._congestion = count, RATES[rate], congestion
        prefix = f"plc{os.getpid() % 1_000_000}"
        self._bridge = f"{prefix}b"
        self._names = [f"{prefix}h{host}" for host in range(count)]
        self._processes: list[subprocess.Popen[Any]] = []
        self._titles = [f"node{host}" for host in range(count)]
        self._handler_before: Any = None
        self._is_leaving = self._is_terminated = False

    def __enter__(self) -> Hosts:
        if threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _terminate(self, *_: object) -> None:
        self._is_terminated = True
        if not self._is_leaving:  # do not interrupt __exit__
            raise SystemExit("SIGTERM")

    def __exit__(self, *_: object) -> None:
        self._is_leaving = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in [*self._names, self._bridge]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)
        if self._is_terminated:
            os.kill(os.getpid(), signal.SIGTERM)

    def address(self, host: int) -> str:
        """The address of a host's link."""
        return f"{SUBNET}{host + 1}"

    def rename(self, host: int, title: str, stands_for: str = "") -> None:
        """Rename a host for later processes; they resolve the new name to `stands_for`, if that is given."""
        self._titles[host] = title
        if stands_for:
            with open(f"/etc/netns/{self._names[host]}/hosts", "a") as file:
                file.write(f"{stands_for} {title}\n")

    def sent_bytes(self, host: int) -> int:
        """Bytes that a host has sent over its link so far, headers included."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_run("ip", "netns", "exec", self._names[host], "cat", counter))

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host from now on, silently."""
        _run("ip", "-n", self._bridge, "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self._bridge, "link", "set", f"port{host}", "master", "bridge0")

    def switch_off(self, host: int) -> None:
        """Switch a host's interface off, so that its kernel reports that it has no route to the others."""
        _run("ip", "-n", self._names[host], "link", "set", "eth0", "down")

    def remove_address(self, host: int) -> None:
        """Remove the address from a host's interface, as when a lease ends; the interface stays up."""
        _run("ip", "-n", self._names[host], "addr", "del", f"{self.address(host)}/24", "dev", "eth0")

    def cut_one_way(self, source: int, destination: int) -> None:
        """Drop packets from one host to another from now on; those in the other direction arrive."""
        _run("ip", "-n", self._names[source], "route", "add", "blackhole", f"{self.address(destination)}/32")

    def add_dead_end(self, host: int, interface: str) -> str:
        """Give a host an interface that is up and leads to no other host; return its address."""
        address = f"10.88.{host}.1"
        name = self._names[host]
        _run("ip", "-n", name, "link", "add", interface, "type", "veth", "peer", "name", f"{interface}end")
        _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
        for end in (interface, f"{interface}end"):
            _run("ip", "-n", name, "link", "set", end, "up")
        return address

    def start_ranks(
        self, command: Sequence[str], layout: Sequence[int], environment: Mapping[str, str], **options: Any
    ) -> list[subprocess.Popen[Any]]:
        """Start a command once for each rank, with the environment variables of torchrun.

        Args:
            layout: The host of rank 0, 1, ...
            environment: Further variables.
            options: Options of Popen.
        """
        found = []
        for rank, host in enumerate(layout):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(layout),
                "LOCAL_RANK": list(layout[:rank]).count(host),
                "LOCAL_WORLD_SIZE": list(layout).count(host),
                "MASTER_ADDR": self.address(layout[0]),
                "MASTER_PORT": 29511,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": 1,
            }
            spelled = {name: str(value) for name, value in variables.items()}
            found.append(self.start(host, command, spelled | dict(environment), **options))
        return found

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host.

        Args:
            host: The number of the host.
            command: The command. The wrappers before it use exec, so the returned process is the command's.
            environment: Variables in addition to those of this process.
            options: Options of Popen.
        """
        enter = ["ip", "netns", "exec", self._names[host], "unshare", "--uts", "sh", "-c"]
        process = subprocess.Popen(
            [*enter, f'hostname {self._titles[host]}; exec "$@"', "sh", *command],
            env={**os.environ, **environment},
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def write_remote_shell(self, path: Path) -> Path:
        """Write a replacement for ssh between these hosts: `path [options] node1 command ...`.

        As with ssh, the command does not inherit the caller's variables, except HOME and PATH here.
        """
        prefix = self._names[0].removesuffix("0")
        path.write_text(
            "#!/bin/sh\n"
            'while case "$1" in -*) true;; *) false;; esac; do shift; done\n'
            'host="$1"; shift\n'
            f'exec ip netns exec "{prefix}${{host#node}}" env -i HOME="$HOME" PATH="$PATH" '
            'unshare --uts sh -c "hostname $host; $*"\n'
        )
        path.chmod(0o755)
        return path

    def _make(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge0", "up")
        known = "".join(f"{self.address(host)} node{host}\n" for host in range(self.count))
        for host, name in enumerate(self._names):
            port = f"port{host}"
            _run("ip", "netns", "add", name)
            ends = ["eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge]
            _run("ip", "link", "add", *ends)
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            if self._congestion:
                # Set for the route: a namespace may only choose a default that the machine allows to all.
                route = [f"{SUBNET}0/24", "dev", "eth0", "congctl", self._congestion]
                _run("ip", "-n", name, "route", "change", *route)
            # `ip netns exec` mounts this file over /etc/hosts.
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            for end, (where, device) in enumerate(((name, "eth0"), (self._bridge, port))):
                shape = ["rate", self.rate.tbf, "burst", self.rate.burst[end], "limit", self.rate.limit[end]]
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise HostsError(f"{' '.join(command)}: {ended.stderr.strip()}")
    return ended.stdout
