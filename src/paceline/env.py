"""Turns the variables of any launcher into one checked `RankEnvironment`.

`launchers` has the table of launchers and their variables.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.launchers import (
    Launcher,
    environment_of_process,
    find_launcher,
    likely_launcher,
    public_job_id,
)


@dataclass(frozen=True)
class RankEnvironment:
    """The place of this process in its job.

    Example:
        The second of two ranks that `paceline run -n 2` started:
        RankEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2,
                        master_addr="127.0.0.1", master_port=23456, job_id="5f0c...")
    """

    rank: int
    world_size: int
    local_rank: int | None  # None: unknown
    local_world_size: int | None
    master_addr: str
    master_port: int
    job_id: str  # the same text on every rank of one launch; "" when the launcher gives none


def read_rank_environment(
    environ: Mapping[str, str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    job_id: str | None = None,
    needs_address: bool = True,
) -> RankEnvironment:
    """Read the place of this rank from the environment; an argument replaces its variable.

    Raises:
        ConfigError: A variable is missing, not a number, or out of range; it is named with its value.
    """
    environ = environment_of_process() if environ is None else environ
    launcher = find_launcher(environ)
    if launcher is None and (rank is None or world_size is None):
        raise _unknown_rank(environ)
    if world_size is None:
        assert launcher is not None
        world_size = _require_int(environ, launcher.world_size, launcher)
        _check_at_least(world_size, 1, _first_set(environ, launcher.world_size))
    _check_at_least(world_size, 1, "world_size")
    rank_name = "rank"
    if rank is None:
        assert launcher is not None
        rank_name = launcher.rank
        rank = _require_int(environ, (launcher.rank,), launcher)
    _check_range(rank, world_size, rank_name)
    local_rank = local_world_size = None
    if launcher is not None and _is_place_of(environ, launcher, rank, world_size):
        local_rank, local_world_size = _local_place(environ, launcher, rank, world_size)
    master_addr, master_port = "", 0
    if needs_address or address is not None:
        master_addr, master_port = _master(environ, launcher, address, world_size, local_world_size)
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=master_addr,
        master_port=master_port,
        job_id=job_id_from_environment(environ) if job_id is None else job_id,
    )


def may_span_hosts(place: RankEnvironment, environ: Mapping[str, str] | None = None) -> bool:
    """Whether the ranks may be on several hosts. The answer is the same on every rank.

    If the launcher does not give the number of ranks on this host, they may be, unless the address of rank 0
    is localhost. In a Kubernetes pod they may be even then, because Kubeflow sets MASTER_ADDR to localhost in
    the pod of rank 0, and to the name of that pod in the others.
    """
    environ = environment_of_process() if environ is None else environ
    if place.world_size == 1:
        return False
    if place.local_world_size is not None:
        return place.local_world_size != place.world_size
    if nodes := environ.get("SLURM_STEP_NUM_NODES", ""):  # all that an old Slurm sets
        return nodes != "1"
    if endpoints := environ.get("PADDLE_TRAINER_ENDPOINTS", ""):
        return len({each.strip().rpartition(":")[0] for each in endpoints.split(",")}) > 1
    return is_in_pod(environ) or not (
        place.master_addr in ("", "localhost") or _is_loopback(place.master_addr)
    )


def is_in_pod(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, which may resolve to a loopback address on its own host only
        return False


def job_id_from_environment(environ: Mapping[str, str] | None = None) -> str:
    """A text that all ranks of this launch share and no other job has; "" if the launcher gives none."""
    environ = environment_of_process() if environ is None else environ
    if secret := job_secret_from_environment(environ):
        return secret
    return public_job_id(environ)


def job_secret_from_environment(environ: Mapping[str, str] | None = None) -> str:
    """Such a text that other users do not know, unless the user chose a known one; "" if there is none.

    `paceline run`, `spawn` and `torchrun --standalone` make 128 random bits for each launch, and pass them to
    the ranks in their environment. The ids of Slurm and PMIx are public.
    """
    environ = environment_of_process() if environ is None else environ
    if environ.get("PACELINE_JOB_ID"):
        return environ["PACELINE_JOB_ID"]
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    # "none": torchrun's default, the same for every job
    return f"torchelastic-{run_id}" if run_id and run_id != "none" else ""


def _unknown_rank(environ: Mapping[str, str]) -> ConfigError:
    launcher = likely_launcher(environ)
    if launcher is None or not launcher.is_half_set(environ):
        seen = ""
        if launcher is not None:
            seen = f"found {', '.join(launcher.found(environ))}"
            seen += f"; {launcher.start} is missing" if launcher.start else ""
        command = "paceline run -n 2 script.py" if launcher is None else launcher.command
        summary = (
            "No launcher's variables are set, so this process does not know its rank."
            if launcher is None
            else "No launcher has started this process, so it does not know its rank."
        )
        return ConfigError(
            summary,
            seen=seen,
            expected="RANK and WORLD_SIZE, or those of Paddle, Open MPI, MPICH, srun or Kubernetes",
            likely="the script was started with plain python",
            hint=f"start ranks with {_as_code(command)}; for a single one: rank=0, world_size=1",
        )
    return ConfigError(
        f"The variables of {launcher.name} are half set: {launcher.rank} is not set.",
        **_inventory(environ, launcher, (launcher.rank,)),
        likely="the script was started with plain python where a launcher's variables were left over, or are "
        "given for another launcher",
        hint=f"start the ranks with {_as_code(launcher.command)}; or set {launcher.rank} for every rank",
        variable=launcher.rank,
    )


def _as_code(command: str) -> str:
    return command if command.startswith("a pod ") else f"`{command}`"


def _inventory(
    environ: Mapping[str, str], launcher: Launcher | None, missing: tuple[str, ...]
) -> dict[str, str]:
    if launcher is None:
        return {}
    lacks = [name for name in (launcher.rank, *launcher.world_size[:1]) if not environ.get(name, "").strip()]
    found = ", ".join(launcher.found(environ)) or "nothing"
    return {
        "where": f"the environment, as {launcher.name} sets it",
        "seen": f"found    {found}\nmissing  {', '.join(dict.fromkeys((*lacks, *missing)))}",
    }


def _is_place_of(environ: Mapping[str, str], launcher: Launcher, rank: int, world_size: int) -> bool:
    launched = _optional_int(environ, (launcher.rank,)), _optional_int(environ, launcher.world_size)
    return launched == (rank, world_size)


def _local_place(
    environ: Mapping[str, str], launcher: Launcher, rank: int, world_size: int
) -> tuple[int | None, int | None]:
    local_world_size = _optional_int(environ, launcher.local_world_size)
    if local_world_size is None:
        local_world_size = launcher.find_local_size(environ)
    local_rank = _optional_int(environ, launcher.local_rank)
    if launcher.is_alone:
        return 0, 1
    if local_world_size is not None:
        name = _first_set(environ, launcher.local_world_size)
        _check_at_least(local_world_size, 1, name)
        if local_world_size > world_size:
            raise _bad_value(name, str(local_world_size), f"at most the world size, {world_size}")
    if local_rank is not None:
        size, there = world_size, ""
        if local_world_size is not None:
            name = _first_set(environ, launcher.local_world_size)
            size, there = local_world_size, f" on this host{f' ({name})' if name else ''}"
        _check_range(local_rank, size, _first_set(environ, launcher.local_rank), there)
    return local_rank, local_world_size


def _master(
    environ: Mapping[str, str],
    launcher: Launcher | None,
    address: str | None,
    world_size: int,
    local_world_size: int | None,
) -> tuple[str, int]:
    if address is not None:
        return split_address(address, "address")
    addr = environ.get("MASTER_ADDR") or _default_addr(environ, launcher, world_size, local_world_size)
    if not addr:
        raise ConfigError(
            f"MASTER_ADDR is not set, so {world_size} ranks cannot find each other.",
            **_inventory(environ, launcher, ("MASTER_ADDR",)),
            expected="the host name or address of rank 0 in MASTER_ADDR, its port in MASTER_PORT",
            hint='`paceline run` and torchrun set both; or pass address="host:port"',
            variable="MASTER_ADDR",
        )
    if environ.get("MASTER_PORT"):
        return addr, _parse_port("MASTER_PORT", environ["MASTER_PORT"])
    if ":" in addr:
        return split_address(addr, "MASTER_ADDR")
    if world_size == 1:
        return addr, 0  # a single rank needs no port
    port = _agreed_port(environ) or (None if launcher is None else launcher.default_port)
    if port is None:
        raise ConfigError(
            "MASTER_PORT is not set.",
            **_inventory(environ, launcher, ("MASTER_PORT",)),
            expected="a free port of rank 0's host, the same on every rank",
            hint='set MASTER_PORT=29500 for every rank, or pass address="host:port"',
            variable="MASTER_PORT",
        )
    return addr, port


def _default_addr(
    environ: Mapping[str, str], launcher: Launcher | None, world_size: int, local_world_size: int | None
) -> str:
    """Host of rank 0 if MASTER_ADDR is unset; "" if it is unknown; may be "host:port"."""
    is_on_one_host = world_size == 1 or local_world_size == world_size
    addr = "" if launcher is None else launcher.find_address(environ)
    # On one host only an address with a port is kept. The host name that mpirun gives may not resolve.
    return "127.0.0.1" if is_on_one_host and (not addr or ":" not in addr) else addr


def _agreed_port(environ: Mapping[str, str]) -> int | None:
    """A port made from the job's id, so that all ranks agree on it; None without an id."""
    job_id = job_id_from_environment(environ)
    if not job_id:
        return None
    digest = hashlib.sha256(job_id.encode()).digest()
    # 16384-32767: below the range that Linux hands to outgoing connections (32768-60999).
    return 16384 + int.from_bytes(digest[:8], "big") % 16384


def split_address(address: str, name: str) -> tuple[str, int]:
    """Split "host:port" or "[v6 address]:port"; `name` is the argument or variable that holds it."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("tcp://").removeprefix("[").removesuffix("]")
    if not colon or not host:
        raise _bad_value(name, address, '"host:port"', _address_hint(name))
    return host, _parse_port(name, port, address)


def _parse_port(name: str, text: str, address: str = "") -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        if address:
            expected, hint = '"host:port", with a port from 1 to 65535', _address_hint(name)
        else:
            expected, hint = "a port, 1 to 65535", f"{name}=29500, or another free port of rank 0's host"
        raise _bad_value(name, address or text, expected, hint)
    return int(text)


def _address_hint(name: str) -> str:
    if name.startswith("--"):
        return f"{name} node0:29400"
    return f"{name}=node0:29400" if name.isupper() else f'{name}="node0:29400"'


def _first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((name for name in names if environ.get(name, "").strip()), names[0] if names else "")


def _optional_int(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = _first_set(environ, names)
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise _bad_value(name, environ[name], "an integer") from None


def _require_int(environ: Mapping[str, str], names: tuple[str, ...], launcher: Launcher) -> int:
    value = _optional_int(environ, names)
    if value is None:
        raise ConfigError(
            f"{launcher.rank} is set, but {names[0]} is {'empty' if names[0] in environ else 'not set'}.",
            **_inventory(environ, launcher, names[:1]),
            expected=f"{launcher.rank} and {names[0]}, both integers",
            hint="`paceline run -n 2 script.py` and torchrun set both",
            variable=names[0],
        )
    return value


def _check_at_least(value: int, least: int, name: str) -> None:
    if value < least:
        raise _bad_value(name, str(value), f"at least {least}")


def _check_range(value: int, size: int, name: str, there: str = "") -> None:
    if not 0 <= value < size:
        ranks = "there is 1 rank" if size == 1 else f"there are {size} ranks"
        raise _bad_value(name, str(value), f"{f'0 to {size - 1}' if size > 1 else '0'}: {ranks}{there}")


def _bad_value(name: str, value: str, expected: str, hint: str = "") -> ConfigError:
    return Arguments("").refuse(
        name,
        value,
        expected,
        hint or "every rank is started with its own rank and the same world size; `paceline run` does that",
        where="the environment" if name.isupper() else "the arguments",
        got=repr(value),
        variable=name,
    )
