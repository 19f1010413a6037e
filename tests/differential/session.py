"""One program in its modes, with its references. Independent of the framework.

A `Session` has worlds of ranks, one for each number of ranks, and a reference. A finding is run again in new
worlds, to exclude effects of earlier programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.differential.judge import (
    EQUAL,
    KNOWN,
    REFUSED,
    Verdict,
    agreed,
    is_uneven,
    judge,
    raised_everywhere,
    without_buffers,
)
from tests.differential.pool import DEADLINE_S, World
from tests.differential.programs import Program, show
from tests.differential.records import Lost, Record
from tests.differential.shrink import shrink
from tests.differential.walk import Parting

UNEXPECTED = "refused, though the framework's own wrapper trains"

_NO_WEIGHT = "The weight of this backward is not"


@dataclass(frozen=True)
class Finding:
    """A program that failed.

    Attributes:
        program: As small as it could be made.
        mode: In which it failed.
        verdict: The expected and the actual result.
        is_alone: It fails in new worlds too; otherwise a program before it is to blame.
    """

    program: Program
    mode: str
    verdict: Verdict
    is_alone: bool = True

    def __str__(self) -> str:
        verdict = self.verdict
        alone = "" if self.is_alone else "\nnot seen again in new processes: timing, or what ran before"
        return (
            f"{verdict.kind}, at op {verdict.at}, mode {self.mode!r}, "
            f"seed {self.program.get('seed')}{alone}\n"
            f"{verdict.text}\n{show(self.program)}"
        )


def in_every_mode(frontend: Any, program: Program) -> Program:
    """The program, to be run in all modes in which it can run, and under the framework's own wrapper."""
    return {**program, "modes": [*frontend.modes_of(program), *frontend.incumbents_of(program)]}


class Session:
    """Runs programs.

    Args:
        frontend: A module like `torch_frontend`.
        mutation: A bug to inject into the ranks.
        deadline_s: For each program.
    """

    def __init__(self, frontend: Any, mutation: str | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._frontend = frontend
        self._mutation = mutation
        self._worlds: dict[int, World] = {}
        self._reference = World(frontend.make_reference, 1, DEADLINE_S)
        self._expected: tuple[Program, dict[Any, list[Record] | Lost]] = ({}, {})

    def close(self) -> None:
        self._reference.close()
        self._end_worlds()

    def _end_worlds(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, program: Program, mode: str) -> Verdict:
        """Run it in one mode, or under the framework's own wrapper, and judge it."""
        verdict, records = self._compare(program, mode)
        if self.is_incumbent(mode):
            if verdict.kind != EQUAL:  # its remains in a group must not reach another program
                self._end_worlds()
            return self._weigh_incumbent(program, verdict)
        if verdict.kind == REFUSED and not is_uneven(records):
            verdict = self._weigh_refusal(program, mode, verdict)
        return verdict

    def is_incumbent(self, mode: str) -> bool:
        """True if the framework's own wrapper averages in this mode."""
        return mode in self._frontend.INCUMBENTS

    def _compare(self, program: Program, mode: str) -> tuple[Verdict, list[Record | Lost]]:
        """Compare a run with the reference, and ranks with each other."""
        records = self._run(program, mode)
        drop = without_buffers if self.is_incumbent(mode) else list
        records = drop(records)
        refused = raised_everywhere(records)
        readings: list[list[Record]] = []
        # The further references are for mistakes of the framework itself.
        for parting in Parting if self.is_incumbent(mode) else self._frontend.PARTINGS:
            expected = self._expect(program, refused, parting)
            if isinstance(expected, Lost):
                return Verdict("the reference failed", text=str(expected)), records
            expected = drop(expected)
            readings.append(expected)
            verdict = self._judge(program, mode, records, expected)
            if not verdict.kind.startswith("wrong"):
                break
        else:
            if self._frontend.writes_to_shared_gradients(program):
                verdict = self._judge(program, mode, records, agreed(*readings))
        return verdict, records

    def find(
        self, program: Program, mode: str, *, seconds: Callable[[str], float]
    ) -> tuple[Verdict, Finding | None]:
        """Check it; a finding is run again in new worlds and shrunk."""
        verdict = self.check(program, mode)
        if not verdict.is_finding:
            return verdict, None
        self.close()
        kind = verdict.kind
        again = next((v for v in (self.check(program, mode) for _ in range(3)) if v.kind == kind), None)
        if again is None:
            return verdict, Finding(program, mode, verdict, is_alone=False)
        latest = {"verdict": again}

        def still_fails(candidate: Program) -> bool:
            seen = self.check(candidate, mode)
            is_same = (seen.kind, seen.error) == (kind, again.error)
            if is_same:
                latest["verdict"] = seen
            return is_same

        smallest = shrink(program, still_fails, seconds=seconds(kind)) if seconds(kind) else program
        return verdict, Finding(smallest, mode, latest["verdict"])

    def _run(self, program: Program, mode: str) -> list[Record | Lost]:
        size = program.get("ranks", 2)
        world = self._worlds.setdefault(size, World(self._frontend.make_rank, size, self._deadline_s))
        return world.run(program, {"mode": mode, "mutation": self._mutation})

    def _judge(
        self, program: Program, mode: str, records: list[Record | Lost], expected: list[Record]
    ) -> Verdict:
        return judge(
            records,
            expected,
            tolerance=self._frontend.tolerance(program, mode),
            same_parameters=self._frontend.same_parameters(program),
            is_engine_crash=lambda lost: self._frontend.is_engine_crash(program, lost),
        )

    def _expect(self, program: Program, refused: dict[str, bool], parting: Parting) -> list[Record] | Lost:
        """The reference's records. They serve all modes that were refused alike."""
        if self._expected[0] is not program:
            self._expected = (program, {})
        answers = self._expected[1]
        key = frozenset(refused.items()), parting
        if key not in answers:
            (answer,) = self._reference.run(program, {"refused": refused, "parting": parting})
            answers[key] = answer if isinstance(answer, Lost) else answer.records
        return answers[key]

    def _weigh_refusal(self, program: Program, mode: str, verdict: Verdict) -> Verdict:
        if _NO_WEIGHT in verdict.text:  # but models of programs return tensors
            return replace(verdict, kind="refused, though the weights of forwards are known")
        if self._frontend.expected_refusal(program, mode, verdict.error) is not None:
            return verdict
        if not self._frontend.incumbent_can_run(program):
            return replace(verdict, kind="refused, and no row of the table says why")
        incumbent = next(iter(self._frontend.incumbents_of(program)), self._frontend.INCUMBENT)
        if self._compare(program, incumbent)[0].kind == EQUAL:
            return replace(verdict, kind=UNEXPECTED)
        return verdict

    def _weigh_incumbent(self, program: Program, verdict: Verdict) -> Verdict:
        """A known difference of the framework's own wrapper is no finding; an unknown one is."""
        if not verdict.is_finding:
            return verdict
        why = self._frontend.known_difference(program, verdict.at)
        if why is None:
            return replace(verdict, kind=f"in the framework's own wrapper: {verdict.kind}")
        return replace(verdict, kind=KNOWN, error=f"{verdict.kind}: {why}")
