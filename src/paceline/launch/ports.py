"""Finds free ports for a job, and reports which process holds a taken one.

A port below the range that the kernel uses for outgoing connections stays free between this check and the
moment when rank 0 listens on it, unless another process asks for exactly that number.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.process_tree import describe

_LOWEST = 15000


def free_ports(count: int) -> list[int]:
    """Different ports on which no process listens now, on any interface."""
    span = range(_LOWEST, _first_ephemeral_port())
    ports: list[int] = []
    with ExitStack() as held:  # keeps each one bound, so that none is found twice
        for _ in range(100 * count):
            # Not the global generator: if users set a seed, two jobs must not choose the same ports.
            port = span[int.from_bytes(os.urandom(4), "big") % len(span)]
            listener = held.enter_context(socket.socket())
            if _binds(listener, port):
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ConfigError(
        f"Found {len(ports)} of {count} free ports.",
        where=f"ports {span[0]} to {span[-1]}",
        hint="choose one with --master-port",
    )


def _binds(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("", port))
    except OSError:
        return False
    return True


def check_port_is_free(
    address: str,
    port: int,
    *,
    likely: str = "another job runs with the same --master-port",
    hint: str = "leave --master-port out: each launch then finds a free port",
) -> None:
    """Raise unless rank 0, or torch's agent, can listen on `port` of `address`.

    Args:
        address: A name or an address of this machine.
        port: The port; 0: only the address is checked.
        likely: The likely cause if it is taken.
        hint: The hint in that case.

    Raises:
        ConfigError: The port is taken (by which process, if visible), or `address` is not this host's.
    """
    try:
        infos = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--master-addr {address} cannot be resolved: {error.strerror}.",
            hint="leave it out: the ranks of `paceline run` are all on this machine",
            address=address,
        ) from None
    family, kind, protocol, _, where = infos[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a job may have just used the port
        try:
            listener.bind(where)
            listener.listen()
        except PermissionError:
            raise ConfigError(
                f"Port {port} needs the rights of root.", expected="a port from 1024 on", port=port
            ) from None
        except OSError as error:
            raise _taken(address, port, error, likely, hint) from None


def _taken(address: str, port: int, error: OSError, likely: str, hint: str) -> ConfigError:
    owner = who_listens(port)
    if owner is None and "assign" in str(error):
        return ConfigError(
            f"--master-addr {address} is not an address of this machine.",
            hint="leave it out: the ranks of `paceline run` are all on this machine",
            address=address,
        )
    return ConfigError(
        f"Port {port} is in use.",
        where=f"{address}:{port}",
        seen=f"held by {owner}" if owner else "held by a process of another user, or of another container",
        likely=likely,
        hint=hint,
        port=port,
    )


def who_listens(port: int) -> str | None:
    """The process that listens on `port`, as "pid 123 (python train.py)"; None if it is not visible."""
    inodes = _listening_inodes(port)
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        if not inodes.isdisjoint(_links(folder / "fd")):
            return describe(int(folder.name))
    return None


def _links(folder: Path) -> set[str]:
    """Targets of a process's file descriptors; those that can't be read are left out."""
    links = set()
    with suppress(OSError):  # the process has ended, or is another user's
        for fd in folder.iterdir():
            with suppress(OSError):  # closed meanwhile
                links.add(os.readlink(fd))
    return links


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            local, state, inode = (row.split()[column] for column in (1, 3, 9))
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:  # 0A: TCP_LISTEN
                inodes.add(f"socket:[{inode}]")
    return inodes


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
    return first if first > _LOWEST + 1000 else 65536
