"""Everything that Paceline raises.

    PacelineError                    base class of all errors (a RuntimeError)
    ├── ConfigError                  an argument or an environment variable is wrong (also a ValueError)
    │   └── ConfigTypeError          an argument is of the wrong type (also a TypeError)
    ├── RendezvousError              the processes did not find each other
    ├── RegionError                  shared memory could not be reserved or mapped (also a MemoryError)
    ├── ForkedError                  a group or a wrapped model was used in a forked child
    ├── CollectiveError              a call on a group failed
    │   ├── MismatchError            ranks made different calls; the group stays usable
    │   ├── PeerLostError            a rank died, left or raised; the group has ended
    │   ├── DeadlineError            a rank was too late (also a TimeoutError); the group has ended
    │   ├── GroupClosedError         the group was closed, or an earlier error ended it
    │   └── TornStepError            parameters hold half of an optimizer's step
    ├── ReplicaError                 the replicas of a model do not match
    │   ├── ModelMismatchError       names, shapes, dtypes, order or requires_grad differ
    │   ├── UnusedParameterError     a parameter got no gradient on some rank
    │   ├── SkippedPassError         a rank skipped a forward or a backward
    │   ├── GraphChangedError        a gradient came twice, or the graph changed in spite of static_graph
    │   ├── NonFiniteGradientError   a gradient holds an infinity or a NaN
    │   └── ReplicasDifferError      parameters, buffers or optimizer state are not the same on all ranks
    └── LaunchError                  a process started by `paceline run` or `spawn` failed

Imports nothing of Paceline. Each message says what happened, where, what was seen, the likely cause and
what to do; the same facts are fields of the exception, and exceptions pickle.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "CollectiveError",
    "ConfigError",
    "ConfigTypeError",
    "DeadlineError",
    "ForkedError",
    "GraphChangedError",
    "GroupClosedError",
    "LaunchError",
    "MismatchError",
    "ModelMismatchError",
    "NonFiniteGradientError",
    "PacelineError",
    "PeerLostError",
    "RegionError",
    "RendezvousError",
    "ReplicaError",
    "ReplicasDifferError",
    "SkippedPassError",
    "TornStepError",
    "UnusedParameterError",
]

_ROWS = ("where", "seen", "expected", "got", "likely", "hint")


class PacelineError(RuntimeError):
    """Base of every error that Paceline raises on purpose.

    Args:
        summary: One sentence: which rank failed at what.
        where: Group, call, bucket, parameter names.
        seen: What this rank saw of the others.
        expected: What should have been there.
        got: What was there instead.
        likely: The likely cause.
        hint: What to do next.
        **fields: Facts for programs; they become attributes (`err.rank`, `err.lost`).
    """

    def __init__(
        self,
        summary: str,
        *,
        where: str = "",
        seen: str = "",
        expected: str = "",
        got: str = "",
        likely: str = "",
        hint: str = "",
        **fields: Any,
    ) -> None:
        self.summary = summary
        self.where = where
        self.seen = seen
        self.expected = expected
        self.got = got
        self.likely = likely
        self.hint = hint
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [self.summary]
        for row in _ROWS:
            text = getattr(self, row)
            if text:
                first, *rest = str(text).splitlines()
                lines.append(f"  {row:<8} {first}")
                lines.extend(f"           {line}" for line in rest)
        return "\n".join(lines)

    def add_where(self, line: str) -> None:
        """Add a line to `where` that was not known when the error was made."""
        self.where = f"{self.where}\n{line}" if self.where else line
        self.args = (self._render(),)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = {row: getattr(self, row) for row in _ROWS}
        return _rebuild, (type(self), self.summary, rows, self.fields)


def _rebuild(
    cls: type[PacelineError], summary: str, rows: dict[str, str], fields: dict[str, Any]
) -> PacelineError:
    return cls(summary, **rows, **fields)


class ConfigError(PacelineError, ValueError):
    """An argument or an environment variable is wrong; nothing was started."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument is of the wrong type; nothing was started."""


class RendezvousError(PacelineError):
    """The processes of a job did not find each other."""


class RegionError(PacelineError, MemoryError):
    """Shared memory could not be created, reserved or mapped."""


class ForkedError(PacelineError):
    """A group or a wrapped model was used in a forked child, which does not share the memory."""


class CollectiveError(PacelineError):
    """A call on a group failed.

    `step_is_complete` is set if a rank was lost in `ShardedOptimizer.step()`: True if all of the step was
    made nevertheless or none of it was, and False if the parameters hold half of it.
    """

    step_is_complete: bool | None = None


class MismatchError(CollectiveError):
    """Ranks made different calls. Every rank raises, and the group stays usable."""


class PeerLostError(CollectiveError):
    """A rank died, left or raised. `lost` lists the ranks. The group has ended."""

    lost: tuple[int, ...] = ()


class DeadlineError(CollectiveError, TimeoutError):
    """A rank did not arrive in time: `late` lists the ranks, and the group has ended.

    If `late` is empty, there are two cases. Either the ranks wait for each other in different calls, and it
    is unknown which of them are right. Or an earlier call of this rank had not finished, and the group stays
    usable.
    """

    late: tuple[int, ...] = ()


class GroupClosedError(CollectiveError):
    """The group was closed, or an earlier error ended it."""


class TornStepError(CollectiveError):
    """Parameters hold half of an optimizer's step, because a rank was lost in the middle of it.

    Raised by each call that would use these parameters: forward, step(), writing(), a state_dict.
    """


class ReplicaError(PacelineError):
    """The replicas of a model do not match."""


class ModelMismatchError(ReplicaError):
    """Names, shapes, dtypes, order or requires_grad differ between ranks."""


class UnusedParameterError(ReplicaError):
    """A parameter got no gradient on some rank. `unused` maps parameter names to ranks."""


class SkippedPassError(ReplicaError):
    """A rank skipped a forward or a backward that the others made."""


class GraphChangedError(ReplicaError):
    """A gradient came twice in one backward, or the graph changed although static_graph promised otherwise.

    `changed` lists the parameters.
    """

    changed: tuple[str, ...] = ()


class NonFiniteGradientError(ReplicaError):
    """A gradient holds an infinity or a NaN. `nonfinite` maps ranks to parameter names.

    `overflowed` lists parameters whose gradients are finite on each rank and whose sum over ranks is not.
    """

    overflowed: tuple[str, ...] = ()


class ReplicasDifferError(ReplicaError):
    """Parameters, buffers or optimizer state are not the same on all ranks.

    `ranks` lists the ranks whose values differ from those of most ranks; `differing` maps names to such
    ranks. If no value has a majority, both list the ranks that differ from the lowest rank.
    """

    ranks: tuple[int, ...] = ()
    differing: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class LaunchError(PacelineError):
    """A process that the launcher started failed. `failures` lists them, the first to fail first."""


def leave_out_inner_frames(error: BaseException) -> None:
    """Let the traceback of a Paceline error end in the user's code, or in a library that called Paceline.

    The frames below that are of no use to a user, because the error itself says what happened, and where.
    Other errors keep all of their frames, and so do exceptions of a user's function that Paceline called.
    """
    folders = _inner_folders()
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for each in chain:
        last = None
        frame = each.__traceback__
        while isinstance(each, PacelineError) and frame is not None:
            path = frame.tb_frame.f_code.co_filename
            if not path.startswith(folders):
                last = frame
            frame = frame.tb_next
        if last is not None:
            last.tb_next = None


def warn(text: str) -> None:
    """Issue a RuntimeWarning that names the line of the program, or of the library, that called Paceline."""
    folders, frame, level = _inner_folders(), sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    # Python prints the line of the program below the text. A blank line keeps it apart from the rows.
    warnings.warn(f"{text}\n" if "\n" in text else text, RuntimeWarning, stacklevel=level)


def _inner_folders() -> tuple[str, ...]:
    """Folders, and a file, whose frames are of no use to a user."""
    modules = (sys.modules.get(name) for name in ("paceline", "torch", "paddle"))
    found = (f"{path}{os.sep}" for module in modules for path in getattr(module, "__path__", ()))
    return (*found, contextlib.__file__)


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as people write them: 'rank 5', 'ranks 0-4, 6'.

    Example:
        >>> format_ranks([0, 1, 2, 3, 4, 6])
        'ranks 0-4, 6'
    """
    ordered = sorted(set(ranks))
    runs: list[tuple[int, int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    spelled = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {spelled}" if ordered else "no rank"
