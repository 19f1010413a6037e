"""Parameters that hold half of an optimizer's step, because a rank was lost in the middle of it.

Code that reads parameters calls `check` first. Shared parameters have their own check
(`SharedStorage.check_whole`). The parameters of one process, and those that left shared memory half written,
are listed here until other values are loaded. A model's own `state_dict()` is guarded only after a step was
partial, because hooks added before would be pickled with the model.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from paceline.errors import TornStepError


class _Mark(NamedTuple):
    parameter: weakref.ref[Any]
    versions: Callable[[Sequence[Any]], list[int]]
    was: int
    seen: str


class PartialSteps:
    """The partially updated parameters of this process.

    Attributes:
        marks: Empty if there are none: every forward checks this, and calls nothing.
        guards: Called when a step of any parameters remains partial.
    """

    def __init__(self) -> None:
        self.marks: dict[int, _Mark] = {}
        self.guards: list[weakref.WeakMethod[Callable[[], None]]] = []

    def mark(
        self, parameters: Iterable[Any], versions: Callable[[Sequence[Any]], list[int]], seen: str
    ) -> None:
        """Record that these parameters may hold half of a step."""
        for parameter in parameters:
            key = id(parameter)
            reference = weakref.ref(parameter, functools.partial(self._drop, key))
            self.marks[key] = _Mark(reference, versions, versions([parameter])[0], seen)

    def call_guard(self, guard: Callable[[], None]) -> None:
        self.guards.append(weakref.WeakMethod(guard, self.guards.remove))

    def call_guards(self) -> None:
        for reference in list(self.guards):
            if (guard := reference()) is not None:
                guard()

    def _drop(self, key: int, reference: weakref.ref[Any]) -> None:
        mark = self.marks.get(key)
        if mark is not None and mark.parameter is reference:
            del self.marks[key]

    def forget(self, parameters: Iterable[Any]) -> None:
        """Remove the marks of these parameters, because other values were loaded."""
        for parameter in parameters:
            self.marks.pop(id(parameter), None)

    def check(self, owner: str, parameters: Iterable[Any]) -> None:
        """Raise if some of these hold half of a step."""
        for parameter in parameters:
            mark = self.marks.get(id(parameter))
            if mark is None or mark.parameter() is not parameter:
                continue
            if mark.versions([parameter])[0] != mark.was:
                del self.marks[id(parameter)]
                continue
            raise partial_step_error(owner, mark.seen)


partial_steps = PartialSteps()


def partial_step_error(owner: str, seen: str) -> TornStepError:
    return TornStepError(
        f"{owner}: an earlier step was not completed.",
        seen=seen,
        likely="a rank was lost in the middle of a step, or the optimizer raised: some parameters are "
        "updated, and others not",
        hint="form a new group and wrap the model anew; then load the parameters and the optimizer's state "
        "from a checkpoint, on every rank",
        step_is_complete=False,
    )
