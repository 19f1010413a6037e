"""Checks that all ranks still have the same model.

Gradients do not reveal a skipped `optimizer.step()`, another learning rate or a weight written on one rank.
Every rank hashes each tensor to 64 bits. The ranks exchange one hash of all, and the others only if it
differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline import _core
from paceline.errors import ReplicasDifferError, format_ranks
from paceline.reducer.backward_errors import shorten

Gather = Callable[[bytes], list[bytes]]
"""Payloads of all ranks, by rank, of any lengths. Collective."""


class Entry(NamedTuple):
    """The hash of a value that must be equal on all ranks.

    Attributes:
        kind: "parameter", "buffer" or "optimizer".
        name: Its name in the model, or in the optimizer.
        hash: The hash of the value.
    """

    kind: str
    name: str
    hash: int


def check_replicas(entries: Sequence[Entry], gather: Gather, *, where: str, seen: str = "") -> None:
    """Raise on every rank if any two ranks have different entries. Collective."""
    payload = json.dumps(entries, separators=(",", ":")).encode()
    digests = gather(_core.hash_bytes(payload).to_bytes(8, "little"))
    if len(set(digests)) > 1:
        raise differing([_parsed(row) for row in gather(payload)], where=where, seen=seen)


def differing(rows: Sequence[Sequence[Entry]], *, where: str, seen: str = "") -> ReplicasDifferError:
    world_size = len(rows)
    values = [{(entry.kind, entry.name): entry.hash for entry in row} for row in rows]
    keys = list(dict.fromkeys(key for each in values for key in each))
    # The value of most ranks is taken as right; without a majority, that of the lowest ranks.
    odd_of: dict[tuple[str, str], tuple[int, ...]] = {}
    has_majority = True
    for key in keys:
        held = [each.get(key) for each in values]
        usual, count = Counter(held).most_common(1)[0]
        if count < world_size:
            odd_of[key] = tuple(rank for rank, value in enumerate(held) if value != usual)
            has_majority = has_majority and count > world_size / 2
    ranks = tuple(sorted({rank for odd in odd_of.values() for rank in odd}))
    (kind, name), total = next(iter(odd_of)), f"{len(odd_of)} of {len(keys)}"
    if has_majority:
        verb = "has" if len(ranks) == 1 else "have"
        summary = (
            f"{format_ranks(ranks).capitalize()} of {world_size} {verb} another model than the other ranks: "
            f"{total} values differ, {kind} '{name}' first."
        )
    else:
        summary = f"The {world_size} replicas of the model differ, in {total} values: {kind} '{name}' first."
    return ReplicasDifferError(
        summary,
        where=where,
        seen="\n".join(filter(None, [seen, *_rows(odd_of)])),
        likely=_likely({kind for kind, _ in odd_of}),
        hint="make every rank do the same after backward; then start all ranks from one checkpoint"
        + ("" if has_majority else " (no majority shows which rank is right)"),
        ranks=ranks,
        differing={name: odd for (_, name), odd in odd_of.items()},
    )


def flattened(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """The leaves of nested dicts and sequences, with names that show the path to them."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flattened(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from flattened(f"{name}.{place}", each)
    else:
        yield name, value


def hash_of_plain(value: object) -> int | None:
    """The hash of a number, a text, a truth value or None; None for anything else."""
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str))
    return _core.hash_bytes(repr(value).encode()) if is_plain else None


def _rows(odd_of: Mapping[tuple[str, str], tuple[int, ...]]) -> list[str]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for (kind, name), odd in odd_of.items():
        groups.setdefault(odd, []).append(f"{kind} '{name}'")
    return [f"{format_ranks(odd)}: {shorten(names)}" for odd, names in groups.items()]


def _likely(kinds: set[str]) -> str:
    if kinds == {"buffer"}:
        return "a buffer was written on some ranks only; if that is meant, call it local in buffers={...}"
    if kinds == {"optimizer"}:
        return "the optimizer was made, loaded or changed differently on some ranks"
    return (
        "a rank skipped an optimizer.step(), or made one more; its learning rate is another; or it has "
        "written to a weight, or loaded another checkpoint"
    )


def _parsed(payload: bytes) -> list[Entry]:
    return [Entry(*entry) for entry in json.loads(payload)]
