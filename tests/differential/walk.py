"""How one rank walks through a program. Independent of the framework.

A run is a generator that yields where the ranks synchronise: after each synchronised backward, and where a
rank has no more data. A real rank has synchronised with the others by then and just continues; the reference
(lockstep.py) runs one generator for each rank and averages between them. A subclass has a method `_op_NAME`
for each op.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.differential.programs import Op, Program
from tests.differential.records import Event, Record, Value


class UserError(Exception):
    """The exception that generated programs raise."""


class Refused(Exception):
    """In the reference: all ranks of the subject raised here."""


class Traps:
    """The place that raises the next error of the program."""

    def __init__(self) -> None:
        self.place: str | None = None

    def spring(self, place: str) -> None:
        if self.place == place:
            self.place = None
            raise UserError(f"raised in {place}")


@dataclass
class Sync:
    """A point at which ranks synchronise.

    Attributes:
        kind: "wrapped", "synchronised" (after a backward), or "finished".
        models: The models whose gradients are averaged.
        joins: Of "finished": a rank without data counts as one with zeros (torch's join()).
        steps: Of "finished": optimizers that step with the means.
    """

    kind: str
    models: list[int]
    joins: bool = False
    steps: list[Any] = field(default_factory=list)


Run = Generator[Sync, None, None]


def of_rank(value: Any, rank: int) -> Any:
    """A value of all ranks, or one of each."""
    return value[rank % len(value)] if isinstance(value, list) else value


def _models_of(loss: Any) -> list[int]:
    return loss.models if hasattr(loss, "models") else [loss.model]


class Parting(enum.Enum):
    """When the reference separates gradients that share memory, which frameworks do not do.

    The framework alone adds to that memory once for each of them, which is a mistake of the framework.
    Paceline may make the same mistake, or avoid it: a run is right if it is equal to one of these.
    """

    NEVER = enum.auto()
    AFTER_BACKWARD = enum.auto()
    AT_ONCE = enum.auto()  # also in the middle of backward, where a gradient may receive two contributions


class Walker:
    """One rank's run.

    Args:
        program: A result of the grammar.
        rank: Of the process, or the simulated one.
        subject: The wrapper that averages.
        options: Of the wrapper, besides the program's own.
        refused: For the reference: labels at which all ranks of the subject raised, and whether a backward
            had recomputed layers by then.
        parting: For the reference: when gradients that share memory are separated.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        subject: Any,
        options: dict[str, Any],
        refused: dict[str, bool] | None = None,
        parting: Parting = Parting.NEVER,
    ) -> None:
        self.program = program
        self.rank = rank
        self.subject = subject
        self.options = {**options, **program.get("options", {})}
        self.refused = refused or {}
        self.parting = parting
        self.record = Record()
        self.traps = Traps()
        self.nets: list[Any] = []
        self.wrappers: dict[int, Any] = {}
        self.optimizers: dict[int, Any] = {}
        self.trainable: dict[int, list[Any]] = {}
        self.weights: dict[int, float] = {}
        self.weight_so_far: dict[int, float] = {}
        self.weighed_so_far: dict[int, set[int]] = {}  # parameters to whose gradients it applies
        self.has_parted = False  # the remaining gradients of the ranks may differ
        self.at = ""
        self._visits: dict[str, int] = {}
        self._tainted = False
        self._is_lost = False
        self._recomputed = False  # by the backward that has raised
        self._made: list[int] = []  # models whose means came in the backward that has raised

    def run(self) -> Run:
        """Run the whole program; errors that it does not catch propagate."""
        yield from self._run_ops(self.program["ops"], "", 0)

    def note_end(self, error: BaseException) -> None:
        """Record the error that ended the program."""
        self.record.raised = self._error(error)

    def _run_ops(self, ops: list[Op], prefix: str, first: int) -> Run:
        for position, op in enumerate(ops, first):
            label = f"{prefix}{position}"
            visit = self._visits[label] = self._visits.get(label, 0) + 1
            self.at = label if visit == 1 else f"{label}#{visit}"
            if self.at in self.refused and op["op"] not in ("try", "iterate"):
                if self.refused[self.at] and self.rank in op.get("ranks", [self.rank]):
                    self._run_alone(op, label)
                raise Refused
            if self.rank not in op.get("ranks", [self.rank]):
                continue
            steps = getattr(self, "_op_" + op["op"])(op, label)
            if steps is not None:
                yield from steps

    def _run_alone(self, op: Op, label: str) -> None:
        """Run an op up to the sync that the ranks did not reach, without events."""
        count = len(self.record.events)
        next(getattr(self, "_op_" + op["op"])(op, label), None)
        del self.record.events[count:]

    def _op_try(self, op: Op, label: str) -> Run:
        body = op.get("body", [])
        self._part()
        try:
            yield from self._run_ops(body, f"{label}.", 0)
        except Exception as error:
            self.record.events.append(self._error(error))
            self.traps.place = None
            self._tainted = True
            # A warning that is an error here: parameters differ since a step with gradients that were not
            # averaged.
            self._is_lost = self._is_lost or isinstance(error, RuntimeWarning)
            self.weight_so_far.clear()
            self.weights.clear()
            yield from self._run_ops(op.get("otherwise", []), f"{label}.", len(body))
        self._part()

    def _part(self) -> None:
        """From here on the ranks' remaining gradients may differ, or be cleared on some.

        Some have run out of data before others, or may raise alone. Gradients of trained parameters are
        averaged again, but those of frozen ones are not.
        """
        self.has_parted = True
        for model in range(len(self.nets)):
            self._drop_frozen(model)

    def _op_iterate(self, op: Op, label: str) -> Run:
        model, how = op.get("model", 0), op.get("how", "finished")
        wrapper, optimizer = self.wrappers.get(model), self.optimizers.get(model)
        if wrapper is None:
            return
        counts = op.get("counts", [1])
        batches = self._until_finished(range(counts[self.rank % len(counts)]), model)
        step = None if optimizer is None or how == "join" else optimizer.step
        context = self.subject.join(wrapper) if how == "join" else contextlib.nullcontext()
        with context:
            for _ in self.subject.iterate(wrapper, batches, step) if how == "loader" else batches:
                yield from self._run_ops(op.get("body", []), f"{label}.", 0)
        if how == "finished":
            self.at = label
            self.subject.finished(wrapper, step)
        steps = [] if step is None else [optimizer]
        yield Sync("finished", [model], joins=how == "join", steps=steps)
        self._part()
        self.at = label
        self._note_parameters(model)

    def _until_finished(self, batches: Iterable[int], model: int) -> Iterator[int]:
        """The batches; then note that this rank has none left, and may see the others' values only."""
        yield from batches
        self.record.events.append(Event(self.at, "finished", model=model))

    def _op_trap(self, op: Op, label: str) -> None:
        self.traps.place = op.get("place", "backward")

    def _op_raise(self, op: Op, label: str) -> None:
        raise UserError("raised between two calls")

    def _wrapping(self) -> dict[str, Any]:
        """The options of a wrapper."""
        by_forward = {"weight": lambda x, batch: batch.weight} if self.program.get("weighs") else {}
        return {**self.options, **by_forward}

    def _weigh(self, losses: Sequence[Any]) -> None:
        """Before a backward, if forwards have weights: those of one model add up."""
        if self.program.get("weighs"):
            for loss in losses:
                for model in _models_of(loss):
                    self.weights.pop(model, None)
            for loss in losses:
                for model in _models_of(loss):
                    self.weights[model] = self.weights.get(model, 0.0) + loss.batch.weight

    @contextlib.contextmanager
    def _watching(self, losses: Sequence[Any], models: Sequence[int]) -> Iterator[None]:
        """Note the progress of a backward that raises."""
        runs = [loss.batch.runs for loss in losses]
        backwards = [self._backwards_of(model) for model in models]
        try:
            yield
        except BaseException:
            self._recomputed = runs != [loss.batch.runs for loss in losses]
            if len(models) > 1:
                self._made = [m for m, before in zip(models, backwards) if self._backwards_of(m) > before]
            raise

    def _backwards_of(self, model: int) -> int:
        return self.subject.backwards(self.wrappers[model]) if model in self.wrappers else 0

    # --- recording values ---

    def _drop_frozen(self, model: int) -> None:
        """Drop gradients of frozen parameters."""
        raise NotImplementedError

    def _note_parameters(self, model: int) -> None:
        raise NotImplementedError

    def _note(self, model: int, kind: str, values: dict[str, Value | None], is_shared: bool) -> None:
        at = f"{self.at} model {model}"
        is_tainted = self._is_lost if kind == "parameters" else self._tainted
        self.record.events.append(Event(at, kind, values, model, shared=is_shared, tainted=is_tainted))

    def _note_norm(self, reported: float, true: float, resolution: float) -> None:
        """Note a norm of all gradients.

        Args:
            reported, true: Of the subject, and computed in float64.
            resolution: Of the coarsest type of a gradient: the distance of 1 from the next larger number.
        """
        # A norm of norms, each rounded to that type, by half of the resolution; and sums in float32 of some
        # thousand squares, the error of each at most 2**-24.
        within = resolution * (1 + resolution / 4) + 2e-4
        self.record.events.append(Event(self.at, "norm", reported=reported, true=true, within=within))

    def _error(self, error: BaseException) -> Event:
        message = str(error).strip()
        text = "" if isinstance(error, Refused) else " | ".join(message.splitlines()[:4])[:400]
        recomputed, self._recomputed = self._recomputed, False
        made, self._made = self._made, []
        name = type(error).__name__
        by_user = self._is_own(error)
        return Event(
            self.at, "error", error=name, text=text, by_user=by_user, recomputed=recomputed, made=made
        )

    def _is_own(self, error: BaseException) -> bool:
        """True if the program itself has raised it."""
        return isinstance(error, UserError)
