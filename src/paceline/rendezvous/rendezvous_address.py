"""The abstract socket name that is a job's rendezvous address on a host, and which process holds it if not
rank 0.

An abstract name has no owner: the first process that binds it has it. So it is made from a secret if the
launcher has given the job one. If another process holds it, all ranks report which one, and how to go on.
"""

from __future__ import annotations

import hashlib
import os

from paceline.errors import RendezvousError
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import Frame, connect_local, peer_credentials, receive_frame, send_frame

_PATIENCE_S = 2.0
_LONGEST_COMMAND = 80

_HOW_TO_GO_ON = (
    "give the job an id that no other user can guess: PACELINE_JOB_ID=$(openssl rand -hex 16), the same for "
    "all ranks, before the launcher (`paceline run` and `paceline.spawn` do so themselves); and tell the "
    "administrator of the machine"
)


def hub_address(key: str, name: str, secret: str = "") -> str:
    """Abstract socket name for the group `name` of the job whose ranks share `key`.

    Example:
        >>> hub_address("127.0.0.1:29500", "world") != hub_address("127.0.0.1:29500", "world", "5f0c")
        True
    """
    # surrogatepass: an environment variable may hold bytes that are not UTF-8.
    words = "\0".join((key, name, secret)).encode(errors="surrogatepass")
    digest = hashlib.sha256(words).hexdigest()[:32]
    return f"paceline-{os.getuid()}-{digest}"


def taken_error(error: OSError, world_size: int, where: str, address: str, hello: bytes) -> RendezvousError:
    holder, is_of_this_user, answer = _ask_holder(address, hello)
    return RendezvousError(
        f"Rank 0 of {world_size} can't open the rendezvous address of this job.",
        where=where,
        seen=f"{error}. It is held by {holder}.{answer}",
        likely="another job, or another process with rank 0, uses the same address"
        if is_of_this_user
        else "another user has taken the name, which can be computed from the address of the job",
        hint="give each job its own address or job id: `paceline run` does; else set MASTER_PORT"
        if is_of_this_user
        else _HOW_TO_GO_ON,
    )


def unknown_peer_error(pid: int, uid: int, rank: int, world_size: int, where: str) -> RendezvousError:
    return RendezvousError(
        f"Rank {rank} of {world_size} met a process of another user at the rendezvous address of this job.",
        where=where,
        expected=f"rank 0, of uid {os.getuid()}",
        got=f"pid {pid} of uid {uid}",
        likely="that user has taken the name on purpose (it can be computed from the address of the job), "
        "or the ranks were started as different users",
        hint=f"start all ranks as the same user; else {_HOW_TO_GO_ON}",
        missing=(0,),
    )


def _ask_holder(address: str, hello: bytes) -> tuple[str, bool, str]:
    try:
        hub = connect_local(address, _PATIENCE_S)
    except OSError as error:
        return f"a process that lets nobody connect ({error.strerror or error})", False, ""
    with hub:
        pid, uid = peer_credentials(hub)
        if uid != os.getuid():
            return f"a process of another user (uid {uid}, pid {pid})", False, ""
        try:
            send_frame(hub, Frame.HELLO, hello, Deadline(_PATIENCE_S))
            kind, answer = receive_frame(hub, Deadline(_PATIENCE_S))
        except OSError:
            kind, answer = Frame.FAILED, b""
    says = f" It says: {answer.decode(errors='replace')}" if kind is Frame.REFUSED else ""
    return f"pid {pid} of this user{_command_of(pid)}", True, says


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return f" ({command[:_LONGEST_COMMAND]})" if command else ""
