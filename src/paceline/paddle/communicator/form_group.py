"""Forms the group of paddle.distributed for ranks on several hosts or on GPUs, after all ranks have arrived.

Paddle's store waits without any message for ranks that do not fit together, and ends the process that opens
it if another process listens at its port. So all ranks connect to a membership store first, at the address
from the launcher, and check there which ranks have arrived. Rank 0 then publishes the port of Paddle's store
there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import paddle
import paddle.distributed as dist

from paceline import _core
from paceline.collectives.group import Group
from paceline.env import may_span_hosts, read_rank_environment, split_address
from paceline.errors import ConfigError, RendezvousError
from paceline.launch.ports import free_ports, who_listens
from paceline.launch.variables import MasterAddress, rank_variables
from paceline.paddle import internals
from paceline.paddle.internals import GLOO_LIMIT_S
from paceline.rendezvous.addresses import wait_for_listener
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.membership import Membership
from paceline.rendezvous.membership_store import MembershipClient, MembershipServer
from paceline.rendezvous.preflight import Preflight, prepare
from paceline.rendezvous.signatures import LOSSLESS, ForeignValueError

_ANSWER_WITHIN_S = 30.0  # time-out of one call of the membership store
_NAP_S = 0.005
_LINGER_S = 2.0  # for ranks that still read why the job cannot start
_LONGEST_PROBLEM = 500  # characters
_WHAT = "PADDLE_MASTER"
_PREFIX = "paceline/start"
_GLOO = ("", "auto", "gloo")
_Found = TypeVar("_Found")

_server: MembershipServer | None = None  # lives as long as this process, for ranks that arrive later
_starts = itertools.count()  # the same on all ranks of a job
_has_formed = False
_membership: Membership | None = None


def needs_paddles_group() -> bool:
    try:
        place = read_rank_environment(needs_address=False)
    except ConfigError:
        return False
    address = _paddles_address() or os.environ.get("MASTER_ADDR", "")
    host = address.rpartition(":")[0].strip("[]") if address.count(":") == 1 or "]" in address else address
    spans_hosts = may_span_hosts(replace(place, master_addr=host))
    return place.world_size > 1 and (spans_hosts or paddle.get_device() != "cpu")


def form_paddles_group(timeout_s: float) -> None:
    """Call paddle.distributed.init_parallel_env(), if the ranks fit together.

    Collective; blocks until all ranks have arrived.

    Raises:
        ConfigError: The address of rank 0 is not valid, or a variable is missing; or the group was formed and
            destroyed before, because Paddle forms its group only once.
        RendezvousError: The ranks do not fit together, one cannot go on, or not all have arrived in time.
            Raised on all ranks, with ranks and hosts.
    """
    global _membership, _has_formed
    if dist.is_initialized():
        return
    if _has_formed:
        raise ConfigError(
            "paddle.distributed forms its group once in a process, and this one was destroyed.",
            likely="paddle.distributed.destroy_process_group(), and then a model is wrapped",
            hint="destroy the group at the end of the program; or train in a new process",
        )
    _core.hold_late_threads()  # rank 0's thread serves Paddle's store until the process ends
    _export_paddle_variables()
    address = _paddles_address()
    if not address:
        dist.init_parallel_env()  # its error names what is missing
        return
    split_address(address, _WHAT)
    place = read_rank_environment(address=address)
    serves = place.rank == 0
    preflight = prepare(
        place,
        _WHAT,
        f"paddle {paddle.__version__}",
        timeout_s,
        serves=serves,
        over_gloo=os.environ.get("PADDLE_DISTRI_BACKEND", "") in _GLOO,
        owner="paceline.paddle",
    )
    if not serves:
        preflight.wait_for_rank_0()
    membership_store = _open_store(preflight, serves=serves)
    prefix = f"{_PREFIX}/{next(_starts)}"
    try:
        membership = preflight.attend(membership_store, prefix)
        port = _port_of_paddles_store(preflight, membership, f"{prefix}/store", serves=serves)
        with _naming(f"{preflight.way.address}:{port}"):
            _form_with_all(preflight, membership, f"{prefix}/formed", serves=serves)
    except BaseException:
        if dist.is_initialized():
            _has_formed = True
            dist.destroy_process_group()
        membership_store.close()
        raise
    _has_formed, _membership = True, membership


def _paddles_address() -> str:
    """The address of rank 0 from Paddle's variables; "": they are not set."""
    return os.environ.get(_WHAT) or os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")[0].strip()


def membership_of_default_group() -> Membership | None:
    return _membership


def _export_paddle_variables() -> None:
    if "PADDLE_TRAINER_ID" in os.environ:
        return
    if "PADDLE_MASTER" not in os.environ:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                "paddle.distributed cannot use the port that torchrun gives its ranks.",
                likely="torchrun keeps a store of its own at MASTER_PORT",
                hint='set PADDLE_MASTER="host:port", a free port of rank 0\'s host, on every rank',
            )
        place = read_rank_environment()
        os.environ["PADDLE_MASTER"] = f"{place.master_addr}:{place.master_port}"
    place = read_rank_environment(needs_address=False)
    os.environ["PADDLE_TRAINER_ID"] = str(place.rank)
    os.environ["PADDLE_TRAINERS_NUM"] = str(place.world_size)
    os.environ["PADDLE_CURRENT_ENDPOINT"] = f"{socket.gethostname()}:{place.rank}"  # any value
    if paddle.get_device() == "cpu":
        os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")


def export_place(group: Group) -> None:
    """Set Paddle's variables for the ranks of one host, if another launcher (torchrun, Slurm, MPI) started
    them.

    Collective. Paddle's samplers and its `get_rank()` then know the rank, though Paddle has formed no group.
    If the script lets Paddle form a group later, the variables name a free port, because a store of
    torchrun's agent uses torchrun's port.
    """
    ports = np.zeros(group.world_size, np.int64)
    if group.rank == 0:
        ports[:] = free_ports(group.world_size)
    group.broadcast(ports)
    if "PADDLE_TRAINER_ID" in os.environ:
        return
    master_address = MasterAddress("127.0.0.1", 0, tuple(ports.tolist()), "")
    variables = rank_variables(group.rank, group.world_size, master_address)
    kept = {_WHAT: os.environ[_WHAT]} if _WHAT in os.environ else {}
    os.environ |= {name: value for name, value in variables.items() if name.startswith("PADDLE_")} | kept
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", "gloo")
    internals.read_rank_anew()


def _open_store(preflight: Preflight, *, serves: bool) -> MembershipClient:
    global _server
    try:
        if serves and (_server is None or _server.port != preflight.port):
            _server = MembershipServer(preflight.port, preflight.arrival.world_size)
        return MembershipClient(preflight.way.address, preflight.port, _ANSWER_WITHIN_S)
    except OSError as error:
        holder = who_listens(preflight.port) if serves else None
        raise RendezvousError(
            f"{preflight.who} could not {'open' if serves else 'reach'} the rendezvous address of this job.",
            where=f"{_WHAT} {preflight.way.name}:{preflight.port}; {preflight.way.describe()}",
            seen=f"the port is held by {holder}" if holder else error.strerror or str(error),
            likely="another job uses the same address" if serves else "rank 0 has ended meanwhile",
            hint=f"give each job a {_WHAT} of its own" if serves else "look at rank 0's output",
        ) from error


def _port_of_paddles_store(preflight: Preflight, membership: Membership, key: str, *, serves: bool) -> int:
    """Agree on the port of Paddle's store. Collective.

    Rank 0 returns only when all others have read the port: it then calls Paddle, which holds the
    interpreter's lock until the group is formed, and the membership store answers no rank meanwhile.
    """
    with _reaching_the_store(preflight):
        if serves:
            with socket.create_server(("", 0)) as reserved:
                port: int = reserved.getsockname()[1]
            _publish_from_rank_0(membership, key, str(port), preflight.deadline)
            return port
        port = int(_received_from_rank_0(membership, key, "where Paddle's store is", preflight.deadline))
    wait_for_listener(
        preflight.way,
        port,
        preflight.deadline.left_s(),
        what="Paddle's store at",
        who=preflight.who,
        likely="rank 0 has ended, or a firewall lets only some ports through",
        hint="look at rank 0's output",
    )
    return port


def _form_with_all(preflight: Preflight, membership: Membership, key: str, *, serves: bool) -> None:
    """Form Paddle's group, and wait until all ranks have formed it. Collective.

    Gloo may have formed its group on one rank while another one still reads addresses from the store. If the
    first rank ended then, the second one would find closed connections, and report a time-out.
    """
    own = membership.own.rank
    try:
        dist.init_parallel_env()
    except Exception as error:  # Paddle raises several kinds
        with contextlib.suppress(RuntimeError):  # the other ranks may be gone
            problem = f"rank {own}: {str(error)[:_LONGEST_PROBLEM]}"
            if serves:
                _publish_from_rank_0(membership, key, problem, Deadline(_LINGER_S))
            else:
                _write(membership, f"{key}/{own}", problem)
        raise
    # All ranks arrived in time, the last one perhaps just before the deadline; Gloo gives it this long.
    deadline = Deadline(max(preflight.deadline.left_s(), GLOO_LIMIT_S))
    with _reaching_the_store(preflight):
        if serves:
            if problem := _problem_of_others(membership, key, deadline):
                with contextlib.suppress(RuntimeError):  # a rank that has failed does not read it
                    _publish_from_rank_0(membership, key, problem, Deadline(_LINGER_S))
            else:
                _publish_from_rank_0(membership, key, "", deadline)
        else:
            _write(membership, f"{key}/{own}", "")
            # Rank 0 publishes which rank it waited for at its own deadline, which may be a moment later.
            answer_by = Deadline(deadline.left_s() + _LINGER_S)
            problem = _received_from_rank_0(membership, key, "that all have formed Paddle's group", answer_by)
    if problem:
        raise RendezvousError(
            f"{preflight.who} has formed Paddle's group, and another rank could not.",
            where=f"{_WHAT} {preflight.way.name}:{preflight.port}; {preflight.way.describe()}",
            seen=problem,
            likely="that rank cannot reach the others, or has died or was stopped",
            hint="look at the output of that rank first",
        )


def _problem_of_others(membership: Membership, key: str, deadline: Deadline) -> str:
    for rank in range(1, len(membership.arrivals)):
        reason = f"rank {rank} has not formed Paddle's group {deadline.timeout_s:.1f} s after rank 0"
        try:
            problem = _await(membership, f"{key}/{rank}", reason, deadline)
        except RuntimeError as late:
            return str(late)
        if problem:
            return problem
    return ""


def _publish_from_rank_0(membership: Membership, key: str, text: str, deadline: Deadline) -> None:
    """Wait until all other ranks have read the text. Raises like `_wait`."""
    membership_store, others = membership.membership_store, len(membership.arrivals) - 1
    _write(membership, key, text)
    reason = "not all have read what rank 0 wrote"
    _wait(lambda: membership_store.add(f"{key}/read", 0) == others or None, deadline, reason)


def _received_from_rank_0(membership: Membership, key: str, what: str, deadline: Deadline) -> str:
    """Raises like `_await`."""
    text = _await(membership, key, f"rank 0 has not said {what}", deadline)
    membership.membership_store.add(f"{key}/read", 1)
    return text


def _write(membership: Membership, key: str, text: str) -> None:
    signed = membership.signatures.sign(key, text.encode(errors=LOSSLESS))
    membership.membership_store.write(key, signed.decode(errors=LOSSLESS))


def _await(membership: Membership, key: str, reason: str, deadline: Deadline) -> str:
    """Raises like `_wait`; ForeignValueError if no rank of the job wrote the value."""
    text = _wait(lambda: membership.membership_store.read(key), deadline, reason)
    return membership.signatures.read(key, text.encode(errors=LOSSLESS)).decode(errors=LOSSLESS)


@contextlib.contextmanager
def _reaching_the_store(preflight: Preflight) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ForeignValueError, ValueError) as error:
        raise RendezvousError(
            f"{preflight.who} lost the rendezvous address of this job.",
            where=f"{_WHAT} {preflight.way.name}:{preflight.port}; {preflight.way.describe()}",
            seen=str(error),
            likely="rank 0 has ended meanwhile, or an unknown peer writes there",
            hint="look at rank 0's output first",
        ) from error


def _wait(find: Callable[[], _Found | None], deadline: Deadline, reason: str) -> _Found:
    """Return what `find` returns once it is not None. Raises RuntimeError with `reason` at the deadline."""
    while (found := find()) is None:
        if deadline.is_over():
            raise RuntimeError(reason)
        time.sleep(_NAP_S)
    return found


@contextlib.contextmanager
def _naming(endpoint: str) -> Iterator[None]:
    before = os.environ.get(_WHAT)
    os.environ[_WHAT] = endpoint
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WHAT]
        else:
            os.environ[_WHAT] = before
