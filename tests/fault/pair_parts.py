"""All cases of `pairs.py`, in parts: the cases of one program and one kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fault import pair_programs
from tests.fault.faults import Action
from tests.fault.pair_driver import Findings, run_pairs
from tests.fault.pairs import Pair, Program, every_pair, every_stop_with_a_death

PROGRAMS: tuple[type[Program], ...] = (
    pair_programs.Training,
    pair_programs.Backwards,
    pair_programs.AssignedBackwards,
    pair_programs.BackwardsInBuffer,
    pair_programs.ScatteringBackwards,
    pair_programs.VoidBackwards,
    pair_programs.NewReducers,
    pair_programs.HostBackwards,
    pair_programs.SmallCalls,
    pair_programs.RegionCalls,
    pair_programs.PieceCalls,
    pair_programs.Movements,
    pair_programs.Messages,
    pair_programs.Steps,
    pair_programs.Subgroups,
    pair_programs.WrappedInView,
    pair_programs.WrappedByPointer,
    pair_programs.WrappedSparse,
)

KINDS: dict[str, Callable[[type[Program]], list[Pair]]] = {
    "killed": lambda program: every_pair(program, Action.KILL),
    "stopped": lambda program: every_pair(program, Action.STOP),
    "held": lambda program: every_pair(program, Action.HOLD),
    "stopped, another killed": every_stop_with_a_death,
}


@dataclass(frozen=True)
class Part:
    """The cases of one program and one kind of fault.

    Attributes:
        kind: A name of `KINDS`.
    """

    program: type[Program]
    kind: str

    def __str__(self) -> str:
        return f"{self.program.__name__}, {self.kind}"

    def pairs(self) -> list[Pair]:
        """All cases of the part."""
        return KINDS[self.kind](self.program)

    def run(self) -> Findings:
        """Run all of them.

        Raises:
            RanksFailed: The driver itself failed, or something was left behind.
        """
        return run_pairs(self.pairs(), framework_of(self.program))


def framework_of(program: type[Program]) -> str:
    """The framework that its ranks import before they start."""
    return "torch" if program.__name__.startswith("Wrapped") else "numpy"


def all_parts() -> list[Part]:
    """All parts, in the order in which they run."""
    return [Part(program, kind) for program in PROGRAMS for kind in KINDS]
