"""Resolves host names: the address, the interface over which this host reaches it, and whether a process
listens there.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass

from paceline.errors import ConfigError, PacelineError, RendezvousError

_SIOCGIFADDR = 0x8915
_SAY_EVERY_S = 10.0
_RETRY_S = 0.1
_CONNECT_WITHIN_S = 3.0
_ANY_PORT = 9  # no packet is sent: connect() of a datagram socket only chooses the route


@dataclass(frozen=True)
class Way:
    """The route from this host to a name.

    Attributes:
        name: As it was asked for.
        address: The address that the name resolves to on this host.
        own_address: The source address of this host's packets to it; another host answers to it.
        interface: The network interface of that address; "" if it is not known (IPv6).
        is_own: Whether `address` is one of this host's.
    """

    name: str
    address: str
    own_address: str
    interface: str
    is_own: bool

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback

    def describe(self) -> str:
        own = "this host's own" if self.is_own else f"reached from {self.own_address}"
        stands = "" if self.name == self.address else f" stands for {self.address} here"
        return f"{self.name}{stands}, {own}{f' ({self.interface})' if self.interface else ''}"


def means_this_host(name: str) -> bool:
    """Whether a name or an address always means each host itself: "localhost", "127.0.0.1".

    Another name that resolves to such an address may be that of a host which others reach elsewhere.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def find_way(name: str, what: str) -> Way:
    """The route from this host to `name`. Raises ConfigError if there is none."""
    here = socket.gethostname()
    try:
        family, _, _, _, where = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(
            f"{what}={name} cannot be resolved on host {here}.",
            seen=error.strerror or str(error),
            likely="the name is known to other hosts only, or is misspelled",
            hint=f"an address in place of the name ({what}=10.0.0.1), or a line in /etc/hosts of {here}",
            host=here,
        ) from None
    address = str(where[0])
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            own_address = str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"There is no way from host {here} to {what}={name}.",
            seen=f"{name} stands for {address}: {error.strerror}",
            likely="the address is of a network that this host is not in",
            hint=f"`ip route get {address}` on {here}; {what} must be an address that all hosts reach",
            host=here,
        ) from None
    return Way(name, address, own_address, interface_of(own_address), _is_own(family, address))


def wait_for_listener(
    way: Way, port: int, timeout_s: float, *, what: str, who: str, likely: str, hint: str
) -> None:
    """Wait until a process listens at a port; every 10 s, print to standard error what it waits for."""
    begun = printed_at = time.monotonic()
    while True:
        try:
            socket.create_connection((way.address, port), timeout=_CONNECT_WITHIN_S).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        now = time.monotonic()
        if now - begun > timeout_s:
            raise RendezvousError(
                f"{who} found nobody at {what} {way.name}:{port} within {timeout_s:.1f} s.",
                seen=f"{way.describe()}; {reason}",
                likely=f"{likely}, the name stands for another address there, or a firewall closes the port",
                hint=f"{hint}; `ip addr` on {way.name} shows its addresses",
                host=socket.gethostname(),
            )
        if now - printed_at >= _SAY_EVERY_S:
            printed_at = now
            elsewhere = f"; if that is on another host, {what} has to be its address" * way.is_loopback
            print(
                f"paceline: {who} waits for {what} {way.name}:{port} since {now - begun:.0f} s: "
                f"{way.describe()}; {reason}{elsewhere}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_RETRY_S)


def check_rendezvous_address(
    way: Way,
    rank: int,
    world_size: int,
    *,
    local_world_size: int,
    serves: bool,
    what: str = "MASTER_ADDR",
) -> None:
    """Raise unless the ranks of this host can reach the others at the address of rank 0."""
    here = socket.gethostname()
    others = {name: own for name, own in own_addresses().items() if not own.startswith("127.")}
    has = ", ".join(f"{own} ({name})" for name, own in others.items()) or "none but 127.0.0.1"
    if serves and not way.is_own:
        raise ConfigError(
            f"Rank {rank} of {world_size} is on host {here}, but {what}={way.name} is not.",
            seen=f"{way.describe()}; the addresses of {here}: {has}",
            likely=f"rank 0 was started on another host than the launcher is on, or {what} was set for "
            "another job",
            hint=f"set {what} to an address of {here} for all ranks",
            host=here,
        )
    if local_world_size < world_size and way.is_loopback and way.name != here:
        raise ConfigError(
            f"{what}={way.name} means this host on every host, and {world_size - local_world_size} of "
            f"{world_size} ranks are on others.",
            seen=f"rank {rank} is on host {here}, where {way.name} is {way.address}; its addresses: {has}; "
            f"the launcher says that {local_world_size} of {world_size} ranks are on it",
            likely=f"{what} was set for a job on one host, or /etc/hosts gives the name to this host",
            hint=f"set {what} to the address of rank 0's host, as the others reach it; if all ranks are on "
            f"this host, set LOCAL_WORLD_SIZE={world_size}",
            host=here,
        )


def interface_for_gloo(way: Way) -> tuple[str, str]:
    """The interface to configure for Gloo, and the reason; ("", "") if Gloo finds the right one itself.

    Gloo listens at the address of this host's name, and silently at 127.0.0.1 if the name does not resolve.
    """
    problem = _own_name_problem(way)
    if not problem:
        return "", ""
    if way.interface and not way.is_loopback:
        return way.interface, f"{problem}; {way.describe()}"
    others = {name: own for name, own in own_addresses().items() if not own.startswith("127.")}
    if len(others) == 1:
        ((name, own),) = others.items()
        return name, f"{problem}; its only address is {own}"
    raise ConfigError(
        f"Gloo does not know at which address of host {socket.gethostname()} it should listen.",
        seen=f"{problem}; " + (", ".join(f"{own} ({name})" for name, own in others.items()) or "no address"),
        hint="GLOO_SOCKET_IFNAME=eth0, the interface that leads to the other hosts",
        host=socket.gethostname(),
    )


def interface_problems(names: str) -> tuple[str, str]:
    """Problems of the interfaces configured for Gloo: first for this host, then for hosts that connect to it.

    Example:
        interface_problems("lo") is ("", "GLOO_SOCKET_IFNAME=lo (127.0.0.1) is reached by no other host").
    """
    addresses = own_addresses()
    known = {name for _, name in socket.if_nameindex()}
    own = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    for name in filter(None, names.split(",")):
        if name not in known:
            return f"GLOO_SOCKET_IFNAME={names} names no interface of this host, which has {own}", ""
        if addresses.get(name, "").startswith("127."):
            here = f"GLOO_SOCKET_IFNAME={names} ({addresses[name]})"
            return "", f"{here} is reached by no other host; this one has {own}"
    return "", ""


def configured_interface(names: str) -> tuple[str, str]:
    """The address at which Gloo will listen because an interface is configured, and a description of it.

    Example:
        On a host of two interfaces, configured_interface("eth1") is ("10.88.0.2", "GLOO_SOCKET_IFNAME=eth1
        (10.88.0.2), on a host that has eth0 (10.77.0.2), eth1 (10.88.0.2)"). Without the variable: ("", "").
    """
    addresses = own_addresses()
    address = addresses.get(names.partition(",")[0], "")
    if not address:
        return "", ""
    own = ", ".join(f"{name} ({own})" for name, own in addresses.items() if not own.startswith("127."))
    return address, f"GLOO_SOCKET_IFNAME={names} ({address}), on a host that has {own}"


def no_way_to(address: str) -> str:
    """Why this host cannot reach another one at an IPv4 address, as far as its kernel knows; "" if it may."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))
    except OSError as error:
        return error.strerror or str(error)
    return "it is an address of this host, too" if _is_own(socket.AF_INET, address) else ""


def _own_name_problem(way: Way) -> str:
    """Why other hosts could not reach the address of this host's own name; empty if they could.

    Gloo listens there, unless an interface is configured.
    """
    here = socket.gethostname()
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(here, _ANY_PORT, type=socket.SOCK_DGRAM)]
    except OSError:
        return f"the name of this host, {here}, cannot be resolved"
    first = found[0]
    if first == way.own_address:
        return ""
    if ipaddress.ip_address(first.partition("%")[0]).is_loopback:
        return f"the name of this host, {here}, stands for {first}, where no other host reaches it"
    if not interface_of(first) and ":" not in first:
        return f"the name of this host, {here}, stands for {first}, which is not an address of it"
    return ""


def interface_of(address: str) -> str:
    """The interface that has an IPv4 address of this host; "" if none has."""
    return next((name for name, own in own_addresses().items() if own == address), "")


def own_addresses() -> dict[str, str]:
    """The IPv4 address of each interface of this host that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_own(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((address, 0))
    except OSError:
        return False
    return True


def addresses_for_others() -> list[str]:
    """Addresses at which other hosts may reach this one; the likeliest first."""
    interfaces = own_addresses()
    found = [interfaces[_gloo_interface()]] if _gloo_interface() in interfaces else []
    for name in filter(None, (os.environ.get("MASTER_ADDR"), socket.gethostname())):
        with contextlib.suppress(PacelineError):  # the name does not resolve here
            found.append(find_way(name, "").own_address)
    found += interfaces.values()
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda address: address.startswith("127."))  # loopback works on this host only


def _gloo_interface() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "")
