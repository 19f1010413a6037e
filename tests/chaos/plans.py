"""From a seed to a plan: a job, and one fault in it. Pure; independent of the framework.

The required result of a fault is known before it strikes: each kind of fault states it (`Expected`), and the
places where it may strike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import Enum

STEPS = 6
PATIENT_S = 60.0
"""The time-out of jobs in which no rank is expected to be late: far beyond the delays of a busy machine."""
SHORT_S = 2.0
"""The time-out of jobs in which a rank stops: most of the duration of such a trial."""


class Expected(Enum):
    """The required result of a fault, if it strikes."""

    RAISED = "every rank raises or dies, and every survivor names the struck rank"
    FINE = "all ranks train on, to the weights of the reference"
    EITHER = "one of these two"
    WARNED = "the ranks train on, and warn that the replicas differ"
    ENDED = "every process of the job ends, and the launcher's status is that of a failure"
    LATER = "the other ranks raise when the struck rank has finished"
    EVEN = "the ranks train on, to equal weights: this style allows a rank one batch more or fewer"
    HELD = "all ranks train on; the launcher names the rank that does not end, and stops it"
    BEHIND = "the struck rank raises at its end; the others have finished, with equal weights"


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: The fault.
        family: A row of the table of results.
        expected: Its required result.
        weight: How often it is chosen.
        places: Where it may strike, see `strikes.py`; empty: it is a change of the rank's program.
        is_late: Only a time-out of another rank reveals it.
        given_to_torch: Whether it can be done to torch's own DDP as well.
    """

    name: str
    family: str
    expected: Expected
    weight: int = 2
    places: tuple[str, ...] = ()
    is_late: bool = False
    given_to_torch: bool = False


_LOOP = (
    *("before forward", "in forward", "in backward", "after backward", "in the step", "after the step"),
    *("in evaluation", "in the checkpoint"),
)
# Often, because a random moment covers cases that no one has thought of.
_ANYWHERE = (*_LOOP, "outside", "outside", "outside", "core", "core", "core", "wrapping", "outside wrapping")
_OUTSIDE = ("outside",)
_START = ("start",)

CORE_POINTS = (
    "call_begin",
    "before_arrive",
    "after_arrive",
    "mark_ready",
    "before_post",
    "after_post",
    "chunk_claimed",
    "chunk_reduced",
    "before_end",
    "after_end",
)

_RAISED, _FINE, _EITHER = Expected.RAISED, Expected.FINE, Expected.EITHER

KINDS = (
    Kind("SIGKILL", "killed by SIGKILL", _RAISED, 24, _ANYWHERE, given_to_torch=True),
    Kind("SIGKILL before it came", "killed by SIGKILL", _RAISED, 2, _START, is_late=True),
    Kind("SIGKILL of two", "killed by SIGKILL", _RAISED, 4, _LOOP, given_to_torch=True),
    Kind("SIGKILL beside a child", "killed by SIGKILL", _RAISED, 4, _LOOP, given_to_torch=True),
    *(
        Kind(name, "another signal that ends it", _RAISED, 3, (*_LOOP, "outside", "outside", "wrapping"))
        for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGINT")
    ),
    *(
        Kind(name, "os._exit", _RAISED, 4, (*_LOOP, "wrapping"), given_to_torch=True)
        for name in ("os._exit(0)", "os._exit(3)")
    ),
    *(
        Kind(name, "sys.exit", _RAISED, 4, (*_LOOP, "wrapping"), given_to_torch=True)
        for name in ("sys.exit(0)", "sys.exit(3)")
    ),
    Kind("exception", "exception", _RAISED, 18, (*_LOOP, "wrapping", "core"), given_to_torch=True),
    Kind("SIGSTOP", "SIGSTOP for ever", _RAISED, 12, _ANYWHERE, is_late=True, given_to_torch=True),
    Kind("stuck", "stuck for ever", _RAISED, 6, _LOOP, is_late=True, given_to_torch=True),
    Kind(
        "SIGSTOP, SIGCONT too late",
        "SIGSTOP, SIGCONT after the others gave up",
        _RAISED,
        6,
        (*_LOOP, "outside", "core"),
        is_late=True,
    ),
    Kind("SIGSTOP and SIGCONT", "SIGSTOP, SIGCONT in time", _FINE, 12, _ANYWHERE),
    Kind("slow", "slow", _FINE, 4, _LOOP),
    *(
        Kind(f"{name} handled", "signal with a handler", _FINE, 4, (*_LOOP, "outside", "outside"))
        for name in ("SIGTERM", "SIGINT", "SIGUSR1")
    ),
    Kind("timer", "signal with a handler", _FINE, 4, _LOOP),
    Kind("handler raises", "exception", _RAISED, 4, (*_LOOP, "outside", "outside")),
    Kind("handler exits", "sys.exit", _RAISED, 4, (*_LOOP, "outside", "outside")),
    Kind("backward skipped", "backward skipped", _RAISED, 6, given_to_torch=True),
    Kind("forward too many", "forward too many", _RAISED, 4, given_to_torch=True),
    Kind("step skipped", "optimizer step skipped", _RAISED, 6, given_to_torch=True),
    Kind("step too many", "optimizer step too many", _RAISED, 6, given_to_torch=True),
    Kind("iteration skipped", "iteration skipped", Expected.LATER, 5, given_to_torch=True),
    Kind("iteration too many", "iteration too many", Expected.BEHIND, 5, given_to_torch=True),
    Kind("NaN", "NaN in a gradient", _RAISED, 4, given_to_torch=True),
    *(
        Kind(f"model: {name}", "another model", _RAISED, 3, given_to_torch=True)
        for name in ("another shape", "another order", "a layer more", "another dtype", "a frozen weight")
    ),
    *(
        Kind(f"limit: {name}", "resource limit", _EITHER, 3, ("start", "wrapping", *_LOOP))
        for name in ("descriptors", "file size", "address space", "locked memory", "stack")
    ),
    Kind("closes 0, 1 and 2", "closed descriptors", _FINE, 3, ("start", "wrapping", *_LOOP)),
    Kind("closes the others", "closed descriptors", _EITHER, 3, ("wrapping", *_LOOP), is_late=True),
    Kind("no temporary folder", "no temporary folder", _FINE, 2, _START),
)

# Launchers start new interpreters, which import the framework: seconds each. So they are few.
_LAUNCHED = (
    *(Kind(name, "while importing", Expected.ENDED, 1, ("import",)) for name in ("SIGKILL", "exception")),
    *(
        Kind(name, "after training", Expected.ENDED, 1, ("destroy", "exit"))
        for name in ("SIGKILL", "os._exit(3)")
    ),
    Kind("stuck", "after training", Expected.HELD, 3, ("destroy", "exit")),
    *(Kind(f"full disk: {what}", "full disk", _FINE, 2, ("start",)) for what in ("output", "logs")),
    Kind("SIGKILL", "under a launcher: a rank", _RAISED, 4, (*_LOOP, "outside")),
    Kind("exception", "under a launcher: a rank", _RAISED, 4, _LOOP),
    Kind("sys.exit(3)", "under a launcher: a rank", _RAISED, 2, _LOOP),
    Kind("os._exit(0)", "under a launcher: a rank", _RAISED, 2, _LOOP),
    Kind("SIGSTOP and SIGCONT", "under a launcher: a rank", _FINE, 1, ("outside",)),
    *(
        Kind(f"launcher {name}", "the launcher itself", Expected.ENDED, 3, ("outside",))
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
    ),
)

# Another generator makes these from some of the kinds above, so that a seed keeps its old plan.
_STREAM = Kind("full disk: stream", "full disk", _FINE, 0, ("start",))
_WARNED = Kind("launcher SIGUSR1", "the launcher itself", _FINE, 0, ("outside",))
_READ_LATE = Kind("full pipe: read late", "full pipe", _FINE, 0, (*_LOOP, "destroy", "exit"))
_UNREAD = Kind("full pipe: never read", "full pipe", _RAISED, 0, _LOOP, is_late=True)

LAUNCHERS = ("paceline run", "paceline.spawn", "torchrun")


@dataclass(frozen=True)
class Job:
    """The work of the ranks without a fault.

    Attributes:
        framework: "torch" or "paddle".
        way: The transport of the gradients: "memory", a `paceline.Group`; "environment", the same formed from
            variables; "gloo", through a process group; "gloo memory", a process group, in memory; "backend",
            the backend "paceline"; "torch", torch's own DDP over Gloo; "hosts", in memory within hosts and by
            messages between them, two hosts of two ranks or some of one; "hosts alone", the same hosts, over
            the process group.
        style: "copy"; "view", gradients live in the shared memory; "tiny", a bucket for each parameter;
            "accumulate", two micro-batches, the first in no_sync(); "finished", ranks with fewer batches;
            "join", the same through torch's Join.
        width: Of the model's hidden layers.
        launcher: "", forks of the driver; else the launcher that starts the ranks.
    """

    framework: str
    world_size: int
    way: str
    style: str
    width: int
    launcher: str = ""

    def steps_of(self, rank: int) -> int:
        """The number of a rank's batches."""
        return STEPS - 2 * (rank % 2) if self.style in ("finished", "join") else STEPS

    @property
    def micro_batches(self) -> int:
        return 2 if self.style == "accumulate" else 1

    @property
    def is_in_memory(self) -> bool:
        return self.way in ("memory", "environment", "gloo memory")

    def host_of(self, rank: int) -> int | None:
        """The number of a rank's host; None: all ranks are on one host."""
        if not self.way.startswith("hosts"):
            return None
        return rank * (2 if self.world_size == 4 else self.world_size) // self.world_size

    def __str__(self) -> str:
        under = f", {self.launcher}" if self.launcher else ""
        return (
            f"{self.framework}, {self.world_size} ranks, {self.way}, {self.style}, width {self.width}{under}"
        )


@dataclass(frozen=True)
class Fault:
    """The fault of a plan.

    Attributes:
        rank: The rank that is struck.
        step: The step in which it strikes; has no meaning for the place "wrapping" and earlier ones.
        place: See `strikes.py`; "core" places have a point and its passage: "core chunk_claimed 2".
        amount: A number between 0 and 1, from which the kind derives a delay or a size.
        also: A second rank that is struck; -1: none.
    """

    kind: Kind
    rank: int
    step: int
    place: str
    amount: float
    also: int = -1

    @property
    def struck(self) -> tuple[int, ...]:
        return (self.rank,) if self.also < 0 else (self.rank, self.also)

    def __str__(self) -> str:
        who = " and ".join(map(str, self.struck))
        where = f", {self.place}" if self.place else ""
        return f"{self.kind.name}, rank {who}, step {self.step}{where}"


@dataclass(frozen=True)
class Plan:
    """One trial."""

    seed: int
    job: Job
    fault: Fault
    timeout_s: float = field(default=PATIENT_S)

    @property
    def expected(self) -> Expected:
        """The result that its kind states, except for jobs in which docs/design/reducer.md allows another."""
        kind = self.fault.kind
        # A rank that calls backward in no_sync() may step alone on purpose (local SGD).
        if kind.name in ("step skipped", "step too many") and self.job.style == "accumulate":
            return Expected.WARNED
        # Paddle's optimizers don't count their writes: a step too many shows only in the values.
        if kind.name == "step too many" and self.job.framework == "paddle":
            return Expected.WARNED
        if kind.name.startswith("iteration") and self.job.style in ("finished", "join"):
            return Expected.EVEN
        return kind.expected

    @property
    def must_name(self) -> bool:
        """True if survivors must name the struck rank.

        torch's DDP does not; for it, names are only counted.
        """
        return self.job.way != "torch"

    @property
    def is_while_wrapping_over_others(self) -> bool:
        """True if the fault strikes while another library's process group may still be forming."""
        return "wrapping" in self.fault.place and self.job.way not in ("memory", "environment")

    @property
    def is_late(self) -> bool:
        """True if a time-out has to pass before any rank can notice the fault."""
        job, fault = self.job, self.fault
        # Such jobs form the group while wrapping: a rank that dies before that never arrives.
        is_unborn = job.way == "environment" and "wrapping" in fault.place and not job.launcher
        # In torch's Join this rank waits in its next forward for ranks that wait for its backward.
        is_crossed = job.style == "join" and fault.kind.name in ("backward skipped", "forward too many")
        return fault.kind.is_late or is_crossed or (is_unborn and fault.kind.expected is Expected.RAISED)

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.job}: {self.fault}"


_TORCH_WAYS = ("memory", "memory", "environment", "gloo", "gloo memory", "backend")
_PADDLE_WAYS = ("memory", "memory", "group")
_TORCH_STYLES = ("copy", "view", "tiny", "accumulate", "finished", "join")
_PADDLE_STYLES = ("copy", "view", "tiny", "accumulate", "finished")


def plan_of(seed: int, framework: str = "torch", *, launched: bool = False) -> Plan:
    """The plan of a seed: the same each time."""
    chance = random.Random(f"{framework} {launched} {seed}")
    if framework == "torch":
        job = _job(chance, framework, _TORCH_WAYS, _TORCH_STYLES)
    else:
        job = _job(chance, framework, _PADDLE_WAYS, _PADDLE_STYLES)
    # From another generator, so that a seed keeps the plan that it had before hosts were added.
    if job.way in ("gloo", "group") and not launched:
        on_hosts = random.Random(f"hosts {seed}").random()
        job = replace(job, way="hosts" if on_hosts < 0.5 else "hosts alone" if on_hosts < 0.75 else job.way)
    if launched:
        launcher = chance.choice(LAUNCHERS)
        job = Job(
            framework, min(job.world_size, 3), chance.choice(("environment", "gloo")), "copy", 16, launcher
        )
    kinds = _LAUNCHED if launched else KINDS
    while True:
        kind = chance.choices(kinds, [kind.weight for kind in kinds])[0]
        fault = _fault(chance, job, kind)
        if fault is not None:
            break
    if launched:
        fault = _varied(random.Random(f"launched {seed}"), job, fault)
        fault = _unread(random.Random(f"full pipe {seed}"), job, fault)
    plan = Plan(seed, job, fault)
    if plan.is_late or (kind.expected is _EITHER and fault.place != "start"):
        return Plan(seed, job, fault, SHORT_S)
    return plan


def _job(chance: random.Random, framework: str, ways: tuple[str, ...], styles: tuple[str, ...]) -> Job:
    way, style = chance.choice(ways), chance.choice(styles)
    world_size = chance.choices((2, 3, 4), (4, 3, 2))[0]
    if style == "join" and way in ("memory", "environment"):
        style = "finished"  # torch's Join needs a process group
    return Job(framework, world_size, way, style, chance.choice((16, 16, 150)))


def _fault(chance: random.Random, job: Job, kind: Kind) -> Fault | None:
    """A fault of this kind in this job; None: there is none."""
    rank = chance.randrange(job.world_size)
    # A backward in which all ranks have data must follow: otherwise no rank has to notice the fault; for an
    # optimizer step, no rank can.
    step = chance.randrange(min(map(job.steps_of, range(job.world_size))) - 1)
    place = chance.choice(kind.places) if kind.places else ""
    amount = chance.random()
    if place == "core":
        if not job.is_in_memory:
            place = "in forward" if kind.name == "exception" else "outside"
        else:
            place = f"core {chance.choice(CORE_POINTS)} {chance.randint(1, 3)}"
    if "wrapping" in place:
        step = -1
    if place == "start":
        step = -2
        # There, torch's own rendezvous raises the error, not ours.
        if job.way not in ("memory", "environment") and kind.expected is not _FINE:
            return None
    if kind.name == "SIGKILL beside a child" and place == "in backward":
        place = (
            "after backward"  # torch forbids autograd in forks of its threads; the child does nothing anyway
        )
    also = -1
    if kind.name.endswith("of two"):
        if job.world_size < 3:
            return None
        also = chance.choice([other for other in range(job.world_size) if other != rank])
    if job.launcher == "torchrun" and (
        kind.name == "launcher SIGKILL" or kind.name.startswith("full disk") or kind.expected is Expected.HELD
    ):
        return None  # its ranks outlive it; it raises if it cannot write; it waits forever
    if job.framework == "paddle" and kind.name == "model: another dtype":
        return None  # Paddle's layers of another dtype don't multiply inputs of this one
    return Fault(kind, rank, step, place, amount, also)


def _varied(chance: random.Random, job: Job, fault: Fault) -> Fault:
    """A fault under a launcher, or a variant of it that only this launcher can have."""
    if job.launcher == "paceline.spawn" and fault.kind.family == "full disk" and chance.random() < 0.5:
        return replace(fault, kind=_STREAM)
    # A signal that schedulers send as a warning: `spawn` has no process of its own to pass it on.
    is_run = job.launcher == "paceline run"
    if is_run and fault.kind.family == "the launcher itself" and chance.random() < 0.3:
        return replace(fault, kind=_WARNED)
    return fault


def _unread(chance: random.Random, job: Job, fault: Fault) -> Fault:
    """The fault, or output of a launcher that is not read; torchrun's ranks write to it themselves."""
    if job.launcher == "torchrun" or chance.random() > 0.08:
        return fault
    # A caller of spawn() that ends by a signal prints no report, and without one it waits for the reader.
    kind = chance.choice((_READ_LATE, _UNREAD if job.launcher == "paceline run" else _READ_LATE))
    place, step = chance.choice(kind.places), max(fault.step, 0)
    return replace(fault, kind=kind, place=place, step=step, also=-1)


def for_torch(plan: Plan) -> Plan | None:
    """The same fault in a job of torch's own DDP; None: it cannot have this fault."""
    job, fault = plan.job, plan.fault
    if not fault.kind.given_to_torch or job.framework != "torch" or job.style == "finished":
        return None
    place = fault.place
    if place.startswith("core"):
        place = "in forward" if fault.kind.name == "exception" else "outside"
    if "wrapping" in place or place == "start":
        return None
    assert place not in ("import", "destroy", "exit")  # of launched jobs
    given = Fault(fault.kind, fault.rank, fault.step, place, fault.amount, fault.also)
    # For torch's DDP every fault needs the time-out: its ranks may wait forever for a rank that skipped.
    return Plan(plan.seed, Job("torch", job.world_size, "torch", job.style, job.width), given, 2 * SHORT_S)
