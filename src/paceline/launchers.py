"""The table of launchers: the variables that each one sets for a rank, and what follows from them.

For every launcher the same four numbers are read: rank, world size, local rank and local world size. If a
launcher gives the address of rank 0, or an id of the job, in a way of its own, a function finds that in the
environment.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Environ = Mapping[str, str]

MPIEXEC = "PACELINE_MPIEXEC"
"""Where MPICH's mpiexec listens for its proxies, as "host:port"; `environment_of_process` adds it."""

_POD_PORT = 29500  # torchrun's default; each pod has its own ports, so no other job can use it


def _nothing(_: Environ) -> str:
    return ""


def _always(_: Environ) -> bool:
    return True


def _no_size(_: Environ) -> int | None:
    return None


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. Of several names for one value, the first that is set is used.

    Attributes:
        name: Its name in messages.
        command: A command that starts a script with it, for hints.
        rank: The variable with the rank.
        world_size: Variables with the number of ranks.
        local_rank: Variables with the rank among those of this host.
        local_world_size: Variables with the number of ranks on this host.
        address: Variables with the address of rank 0, as messages list them.
        signs: Further variables that show that this launcher is in use, though no rank needs them.
        find_address: Finds the host of rank 0 if MASTER_ADDR is unset: "" if it is unknown; may be
            "host:port".
        find_local_size: Finds the number of ranks on this host if no variable holds it.
        has_started: Whether this process is one of its ranks, given that the variable of the rank is set.
        start: What is missing if it is not, for messages.
        default_port: Rank 0's port if no variable holds it; None: made from the id of the job.
        is_alone: Whether each rank has a host, or a pod, of its own.
    """

    name: str
    command: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    signs: tuple[str, ...] = ()
    find_address: Callable[[Environ], str] = _nothing
    find_local_size: Callable[[Environ], int | None] = _no_size
    has_started: Callable[[Environ], bool] = _always
    start: str = ""
    default_port: int | None = None
    is_alone: bool = False

    def found(self, environ: Environ) -> list[str]:
        return [f"{name}={environ[name]}" for name in self._names() if environ.get(name, "").strip()]

    def _names(self) -> tuple[str, ...]:
        own = (self.rank, *self.world_size, *self.local_rank, *self.local_world_size, *self.address)
        return tuple(dict.fromkeys((*own, "MASTER_ADDR", "MASTER_PORT", *self.signs)))

    def is_half_set(self, environ: Environ) -> bool:
        """Whether the rank is not set, but variables are that make no sense without it."""
        if self.rank in environ or self.start:
            return False
        size = next((environ[name] for name in self.world_size if environ.get(name, "").strip()), "1")
        places = (*self.local_rank, *self.local_world_size)
        return size.strip() != "1" or any(environ.get(name, "").strip() for name in places)

    def is_likely(self, environ: Environ) -> bool:
        """Whether any variable of this launcher is set, apart from the address of rank 0."""
        names = (self.rank, *self.world_size, *self.local_rank, *self.local_world_size, *self.signs)
        return any(environ.get(name, "").strip() for name in names)


def environment_of_process() -> Environ:
    """The variables of this process; under MPICH also mpiexec's address, which is in no variable."""
    if "PMI_RANK" not in os.environ or MPIEXEC in os.environ:
        return os.environ
    return {**os.environ, MPIEXEC: _mpiexec_above()}


def find_launcher(environ: Environ) -> Launcher | None:
    for launcher in LAUNCHERS:
        if launcher.rank in environ and launcher.has_started(environ):
            return launcher
    return None


def likely_launcher(environ: Environ) -> Launcher | None:
    """If no launcher has given a rank: the launcher of which most variables are set; None: none is."""
    likely = [launcher for launcher in LAUNCHERS if launcher.is_likely(environ)]
    return max(likely, key=lambda launcher: len(launcher.found(environ)), default=None)


def public_job_id(environ: Environ) -> str:
    """A text that all ranks of this launch share and no other job has, but no secret; "" if there is none."""
    if environ.get("PMIX_NAMESPACE"):
        return f"pmix-{environ['PMIX_NAMESPACE']}"
    if environ.get(MPIEXEC):
        return f"mpiexec-{environ[MPIEXEC]}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}"
    return ""


# --- Paddle's launch ---


def _paddle_address(environ: Environ) -> str:
    endpoints = environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    return environ.get("PADDLE_MASTER") or endpoints.split(",")[0].strip()


# --- Open MPI ---


def _open_mpi_address(environ: Environ) -> str:
    """The host of mpirun. Rank 0 runs there unless a host file leaves it out, which rank 0 notices."""
    uri = re.search(r"tcp://([^,:;\[\]]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if uri:
        return uri.group(1)
    namespace = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return namespace.group(1) if namespace else ""


# --- MPICH ---


def _mpich_address(environ: Environ) -> str:
    return environ.get(MPIEXEC, "").rpartition(":")[0]


def _has_mpiexec_started(environ: Environ) -> bool:
    # srun --mpi=pmi2 sets PMI_RANK as well, but none of the variables for the ranks of a host.
    return "SLURM_STEP_ID" not in environ or "MPI_LOCALRANKID" in environ


@functools.cache
def _mpiexec_above() -> str:
    """Where mpiexec listens, from the command line of the proxy that started this process; "" without one.

    No variable holds this address. All proxies of a job get the same one, and can reach the host by it.
    """
    for command in _commands_above():
        if Path(command[0]).name == "hydra_pmi_proxy" and "--control-port" in command[:-1]:
            return command[command.index("--control-port") + 1]
    return ""


def _commands_above() -> Iterator[list[str]]:
    pid = os.getppid()
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:  # the process belongs to another user, or has ended
            return
        yield command
        pid = int(stat.rpartition(")")[2].split()[1])  # the program's name may hold blanks and brackets


# --- Slurm ---


def first_slurm_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list.

    Example:
        >>> first_slurm_host("gpu[07-09,12],login1")
        'gpu07'
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodelist)
    return "" if match is None else "".join(part or "" for part in match.groups())


def slurm_tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has, from Slurm's compressed list; empty if it is no such list.

    Example:
        >>> slurm_tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks


def _slurm_address(environ: Environ) -> str:
    return first_slurm_host(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", "")))


def _slurm_local_size(environ: Environ) -> int | None:
    tasks = slurm_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "0" if len(tasks) == 1 else "")
    return tasks[int(node)] if node.isdecimal() and int(node) < len(tasks) else None


def _has_srun_started(environ: Environ) -> bool:
    # A batch script has SLURM_PROCID too, but is one process: only srun sets the step's id.
    return "SLURM_STEP_ID" in environ


# --- Kubernetes ---


def _leader_of_pods(environ: Environ) -> str:
    return environ.get("LWS_LEADER_ADDRESS", "")


def _is_part_of_a_job(environ: Environ) -> bool:
    # The pods of most indexed Jobs work independently, and are no ranks of one job.
    return "WORLD_SIZE" in environ


LAUNCHERS = (
    Launcher(
        "torchrun",
        "torchrun --nproc-per-node 2 script.py",
        "RANK",
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        # Kubernetes configures torchrun by these; they give no rank by themselves.
        signs=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    ),
    Launcher(
        "paddle.distributed.launch",
        "python -m paddle.distributed.launch script.py",
        "PADDLE_TRAINER_ID",
        ("PADDLE_TRAINERS_NUM",),
        ("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE"),
        ("PADDLE_LOCAL_SIZE",),
        address=("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"),
        find_address=_paddle_address,
    ),
    Launcher(
        "Open MPI",
        "mpirun -np 2 python script.py",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        address=("PMIX_NAMESPACE",),
        find_address=_open_mpi_address,
    ),
    Launcher(
        "MPICH",
        "mpiexec -np 2 python script.py",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
        address=(MPIEXEC,),
        find_address=_mpich_address,
        has_started=_has_mpiexec_started,
        start="MPI_LOCALRANKID, which mpiexec sets,",
    ),
    Launcher(
        "Slurm",
        "srun -n 2 python script.py",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        address=("SLURM_STEP_NODELIST",),
        signs=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        find_address=_slurm_address,
        find_local_size=_slurm_local_size,
        has_started=_has_srun_started,
        start="SLURM_STEP_ID, which srun sets,",
    ),
    Launcher(
        "Kubernetes' LeaderWorkerSet",
        "a pod of a LeaderWorkerSet that runs python script.py",
        "LWS_WORKER_INDEX",
        ("LWS_GROUP_SIZE",),
        address=("LWS_LEADER_ADDRESS",),
        find_address=_leader_of_pods,
        default_port=_POD_PORT,
        is_alone=True,
    ),
    Launcher(
        "Kubernetes' indexed Job",
        "a pod of an indexed Job that has WORLD_SIZE and MASTER_ADDR set",
        "JOB_COMPLETION_INDEX",
        ("WORLD_SIZE",),
        has_started=_is_part_of_a_job,
        start="WORLD_SIZE, which the template of the Job has to set,",
        default_port=_POD_PORT,
        is_alone=True,
    ),
)
