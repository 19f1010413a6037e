"""Barriers before a step, at which the ranks compare what they are about to do, so that none writes half a
step.

Each rank sends four numbers: its call, how often the ranks have synced, a hash of all hyperparameters, and a
hash of which parameters have gradients. Only if these differ do the ranks exchange the facts behind them, for
an error that shows what differs and on which ranks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

from paceline import _core
from paceline.errors import (
    ConfigError,
    MismatchError,
    PacelineError,
    UnusedParameterError,
    format_ranks,
)
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.backward_errors import shorten
from paceline.reducer.model_agreement import by_ranks

_NUMBERS = struct.Struct("<4Q")  # filling a numpy array takes longer than a barrier
NUMBERS_BYTES = _NUMBERS.size


class Call(IntEnum):
    STEP = 1
    JOINED_STEP = 2  # in torch's Join, after the end of this rank's data
    CONSOLIDATE = 3
    REFUSED = 4  # it could not make its step

    @property
    def words(self) -> str:
        return {
            Call.STEP: "step()",
            Call.JOINED_STEP: "step() after the end of its data",
            Call.CONSOLIDATE: "consolidate_state_dict()",
            Call.REFUSED: "step(), which it refuses",
        }[self]


@dataclass
class Facts:
    """The facts behind one rank's numbers.

    Attributes:
        call: The call that the rank makes.
        options: Each hyperparameter by name ("lr of group 0"), as text.
        without: Names of parameters that have no gradient.
        replica_group: The rank's replica group, if replicas differ on purpose (local SGD); else empty.
        failure: Why it refuses the step; empty: it does not.
    """

    call: int
    options: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    replica_group: str = ""
    failure: str = ""


class StepBarriers:
    """The barriers of one optimizer, counted."""

    def __init__(
        self,
        gather: Callable[[bytes], bytes],
        gather_bytes: Callable[[bytes], list[bytes]],
        owner: str,
        parameters: Callable[[], Sequence[object]],
    ) -> None:
        self.number = 0
        self._gather = gather
        self._gather_bytes = gather_bytes
        self._owner = owner
        self._parameters = parameters
        self._replica_group = ""
        self._replica_group_of = (-1, 0)  # the version of the registry, and the number of parameters

    def sync(self, call: Call, options: int, gradients: int, facts: Callable[[], Facts]) -> tuple[int, ...]:
        """Return when all ranks have reached the same call. Collective.

        Returns:
            The ranks that have no data left, and so no gradients.

        Raises:
            MismatchError: The ranks call different methods, or have different hyperparameters.
            UnusedParameterError: A parameter has a gradient on some ranks only.
            ConfigError: Another rank has refused its step; quotes it. Or replicas differ on purpose.
        """
        self.number += 1
        own = _NUMBERS.pack(call, self.number, options ^ self._hash_replica_group(), gradients)
        all_ranks = self._gather(own)
        if all_ranks == own * (len(all_ranks) // NUMBERS_BYTES):
            return ()
        rows = list(_NUMBERS.iter_unpack(all_ranks))
        joined = tuple(rank for rank, row in enumerate(rows) if row[0] == Call.JOINED_STEP)
        active = [row for row in rows if row[0] != Call.JOINED_STEP]
        if joined and all(row[0] == Call.STEP for row in active):
            same_options = len({row[2] for row in rows}) == 1
            if same_options and len({row[1:] for row in active}) <= 1:
                return joined
        payload = json.dumps(asdict(replace(facts(), replica_group=self._replica_group))).encode()
        reported = [Facts(**json.loads(each)) for each in self._gather_bytes(payload)]
        raise difference(reported, [row[1] for row in rows], self._owner)

    def _hash_replica_group(self) -> int:
        parameters = self._parameters()
        now = registry.version, len(parameters)
        if self._replica_group_of != now:  # a model was wrapped or dropped
            self._replica_group_of, self._replica_group = now, registry.replica_group_of(parameters)
        return _core.hash_bytes(self._replica_group.encode()) if self._replica_group else 0


def difference(reported: Sequence[Facts], numbers: Sequence[int], owner: str) -> PacelineError:
    """The error for the first difference between the ranks. Pure."""
    where = f"barrier {' or '.join(map(str, sorted(set(numbers))))} of the optimizer's ranks"
    unchanged = "nothing was written on any rank"
    refused = {rank: each.failure for rank, each in enumerate(reported) if each.failure}
    if refused:
        return ConfigError(
            f"{owner}.step: {format_ranks(refused)} of {len(reported)} cannot make the step.",
            where=f"{where}; {unchanged}",
            seen=by_ranks([each.failure or "waited for the others" for each in reported]),
            hint=f"mend what {format_ranks(refused)} says",
            ranks=tuple(refused),
        )
    calls = [Call(each.call).words for each in reported]
    if len(set(calls) - {Call.JOINED_STEP.words}) > 1 or len(set(numbers)) > 1:
        made = [f"{call}, its barrier number {number}" for call, number in zip(calls, numbers)]
        return MismatchError(
            f"{owner}: the ranks call different methods of the optimizer.",
            where=f"{where}; {unchanged}",
            seen=by_ranks(made),
            likely="a rank has skipped a step, or has made one more",
            hint="every rank calls step() and consolidate_state_dict() as often, in the same order",
        )
    groups = [each.replica_group for each in reported]
    if len(set(groups)) > 1:
        return ConfigError(
            f"{owner}: the ranks that share the optimizer do not train the same model.",
            where=f"{where}; {unchanged}",
            seen=by_ranks([each or "a model without local_sgd" for each in groups]),
            likely="the model was wrapped with local_sgd, and the optimizer made for all ranks: each gets "
            "parts of the others' parameters in each step",
            hint="a whole optimizer on each rank; or process_group=, a group of the ranks of one host; or no "
            "local_sgd",
            argument="local_sgd",
        )
    keys = {key: None for each in reported for key in each.options}
    differing = [key for key in keys if len({each.options.get(key) for each in reported}) > 1]
    if differing:
        name = differing[0]
        return MismatchError(
            f"{owner}.step: the ranks have different hyperparameters: {shorten(differing)}.",
            where=f"{where}; {unchanged}",
            seen=by_ranks([f"{name}: {each.options.get(name, 'absent')}" for each in reported]),
            likely="a learning rate scheduler that sees a rank's own loss, or an argument that depends on "
            "the rank",
            hint="set the same value on every rank; average what decides about it first",
            names=tuple(differing),
        )
    return _gradients_error(reported, owner, f"{where}; {unchanged}")


def _gradients_error(reported: Sequence[Facts], owner: str, where: str) -> UnusedParameterError:
    active = [rank for rank, each in enumerate(reported) if each.call == Call.STEP]
    ranks_of: dict[str, list[int]] = {}
    for rank in active:
        for name in reported[rank].without:
            ranks_of.setdefault(name, []).append(rank)
    unused = {name: tuple(ranks) for name, ranks in ranks_of.items() if len(ranks) < len(active)}
    rows: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in unused.items():
        rows.setdefault(ranks, []).append(name)
    return UnusedParameterError(
        f"{owner}.step: {len(unused)} parameter{'s' * (len(unused) != 1)} "
        f"{'has' if len(unused) == 1 else 'have'} a gradient on some ranks only.",
        where=where,
        seen="\n".join(f"{format_ranks(who)} without: {shorten(names)}" for who, names in rows.items()),
        likely="the model is not wrapped, or a rank has cleared or set gradients after backward()",
        hint="wrap the model for data-parallel training: then backward() gives all ranks the same gradients; "
        "do the same on every rank after it",
        unused=unused,
    )


def hash_options(options: Mapping[str, str]) -> int:
    return _core.hash_bytes(json.dumps(list(options.items())).encode())


def spell_options(groups: Iterable[Mapping[str, Any]], first: int = 0) -> dict[str, str]:
    """Hyperparameters of an optimizer's groups, by name, as text that is the same on all ranks.

    Values other than numbers, strings, booleans, None and sequences of these are left out, because their text
    may contain a memory address.
    """
    return {
        f"{key} of group {number}": repr(value)
        for number, group in enumerate(groups, start=first)
        for key, value in group.items()
        if key not in ("params", "param_names") and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str))
