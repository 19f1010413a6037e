"""Which rank needs which range of each mean gradient.

With a `ShardedOptimizer` only the owner of an element needs its mean. Models and optimizers may be created in
any order, so each publishes to, or follows, this table. Owners change when an optimizer is created, which all
ranks do together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import _core
from paceline.errors import ConfigError, format_ranks


@dataclass(frozen=True)
class OwnedRange:
    """A range of one parameter, and the rank that updates it.

    Attributes:
        begin, end: In bytes, from the beginning of the parameter's memory.
        rank: The owner.
    """

    begin: int
    end: int
    rank: int


Ranges = tuple[OwnedRange, ...]
"""All ranges of one parameter, in order, without empty ones."""


@dataclass(frozen=True)
class Owned:
    ranges: Ranges
    rank: int
    world_size: int


class _Owners:
    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Owned]] = {}
        # In the order in which they were registered, which is the same on all ranks.
        self._followers: list[weakref.WeakMethod[Callable[[set[int]], object]]] = []

    def follow(self, changed: Callable[[set[int]], object]) -> None:
        """Call this method with the identities of parameters whose owners change."""
        self._followers[:] = [each for each in self._followers if each() is not None]
        self._followers.append(weakref.WeakMethod(changed))

    def publish(self, reported: Iterable[tuple[Any, Owned]]) -> None:
        """Set the owners of these parameters. Collective, because followers may make collective calls."""
        changed = set()
        for parameter, owned in reported:
            self._known[id(parameter)] = weakref.ref(parameter, self._forgetting(id(parameter))), owned
            changed.add(id(parameter))
        for follower in list(self._followers):
            if (follow := follower()) is not None:
                follow(changed)

    def of(self, parameter: Any) -> Owned | None:
        entry = self._known.get(id(parameter))
        return None if entry is None else entry[1]

    def _forgetting(self, key: int) -> Any:
        def forget(reference: weakref.ref[Any]) -> None:
            entry = self._known.get(key)
            if entry is not None and entry[0] is reference:
                del self._known[key]

        return forget


owners = _Owners()


def agreed_owners(
    known: Sequence[Owned], rank: int, world_size: int, all_gather: Callable[[bytes], list[bytes]]
) -> tuple[Ranges, ...]:
    """The owners of each mean's ranges, after checking that all ranks have the same. Collective."""
    owned = tuple(each.ranges for each in known)
    error = _other_ranks(known, rank, world_size)
    digests = all_gather(_OTHER_RANKS if error is not None else _digest_of(owned))
    if error is not None:
        raise error
    _check_agree(digests)
    return owned


def _digest_of(owned: Sequence[Ranges]) -> bytes:
    ranges = [[(each.begin, each.end, each.rank) for each in its] for its in owned]
    return _core.hash_bytes(repr(ranges).encode()).to_bytes(8, "little")


_OTHER_RANKS = b"other ranks"
"""In place of a digest: on this rank, the owners are numbered among other ranks."""


def _other_ranks(owned: Sequence[Owned], rank: int, world_size: int) -> ConfigError | None:
    for each in owned:
        if (each.rank, each.world_size) != (rank, world_size):
            return ConfigError(
                'reduce="scatter": the optimizer divides its step among other ranks than those that train '
                "the model.",
                expected=f"an optimizer in which this process is rank {rank} of {world_size}",
                got=f"rank {each.rank} of {each.world_size}",
                hint="give the wrapper and the optimizer the same process group",
            )
    return None


def _check_agree(digests: Sequence[bytes]) -> None:
    if len(set(digests)) == 1:
        return
    others = [rank for rank, digest in enumerate(digests) if digest == _OTHER_RANKS]
    differing = others or [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    raise ConfigError(
        'reduce="scatter": the ranks do not agree on who gets which gradient.',
        seen=f"{format_ranks(differing)}: "
        + (
            "its optimizer counts other ranks" if others else "another division of the parameters than rank 0"
        ),
        hint="the same process group for the wrapper and the optimizer, and the same parameters in it, on "
        "every rank",
        ranks=tuple(differing),
    )


def globally_unused(names: str, where: str) -> ConfigError:
    return ConfigError(
        'reduce="scatter": no ShardedOptimizer has some parameters, so no rank would get their gradients.',
        where=where,
        got=names,
        likely="the optimizer is made after the first forward; or it has only some of the parameters",
        hint="give all that is trained to a ShardedOptimizer before the first forward, and freeze the rest "
        'before wrapping; or leave out reduce="scatter"',
    )


def several_models(names: str, where: str) -> ConfigError:
    return ConfigError(
        'reduce="scatter": another wrapped model has some of the parameters, too.',
        where=where,
        got=names,
        hint='wrap both with reduce="mean"; or wrap one module that holds both models',
    )


def needs_memory(path: str) -> ConfigError:
    return ConfigError(
        'reduce="scatter" is for ranks that share memory.',
        seen="ranks on several hosts" if path == "hosts" else "gradients that go over the process group",
        expected="all ranks on one host, and parameters on the CPU",
        hint='leave out reduce="scatter": ShardedOptimizer works with whole gradients, too',
    )
