"""The smallest program that still fails. Independent of the framework.

Every subset of a program is a program, so shrinking only leaves out: elements of lists of ops and layers,
halves of them first, then arguments, until nothing more can be left out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.differential.programs import Program

_LISTS = ("ops", "body", "otherwise", "layers", "models")
_KEPT = ("op", "kind", "body", "layers", "models", "ops", "seed", "modes")


def shrink(program: Program, still_fails: Callable[[Program], bool], *, seconds: float = 60.0) -> Program:
    """Leave out as much as possible while the program fails in the same way."""
    until = time.monotonic() + seconds
    smallest = copy.deepcopy(program)
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        position = 0
        while time.monotonic() < until:
            candidate = _candidate(smallest, position)
            if candidate is None:
                break
            if candidate["models"] and still_fails(candidate):
                smallest, changed = candidate, True
            else:
                position += 1
    return smallest


def _candidate(program: Program, position: int) -> Program | None:
    """The program with the change of this number; None: there are no more."""
    smaller = copy.deepcopy(program)
    for number, change in enumerate(_changes(smaller)):
        if number == position:
            change()
            return smaller
    return None


def _changes(program: Program) -> Iterator[Callable[[], None]]:
    lists = list(_lists(program))
    for items in lists:  # halves, then single ones
        for size in (len(items) // 2, len(items) // 4):
            if size > 1:
                for first in range(0, len(items), size):
                    yield lambda items=items, first=first, size=size: _cut(items, first, size)  # type: ignore[misc]
    for items in lists:
        for first in range(len(items)):
            yield lambda items=items, first=first: _cut(items, first, 1)  # type: ignore[misc]
    for items in lists:
        for place, item in enumerate(items):
            for key in ("body", "layers"):
                if item.get(key) and ("op" in item or "kind" in item):
                    yield lambda items=items, place=place, inner=item[key]: _unfold(items, place, inner)  # type: ignore[misc]
    for item in (program, *(item for items in lists for item in items)):
        for key in [key for key in item if key not in _KEPT]:
            yield lambda item=item, key=key: item.pop(key)  # type: ignore[misc]
    for item in (item for items in lists for item in items):
        for key, value in item.items():
            if isinstance(value, list) and value and isinstance(value[0], (int, float)) and key == "batch":
                yield lambda item=item, key=key: item.update({key: 1})  # type: ignore[misc]


def _lists(node: Any) -> Iterator[list[Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in _LISTS and isinstance(value, list):
                yield value
            yield from _lists(value)
    elif isinstance(node, list):
        for value in node:
            yield from _lists(value)


def _cut(items: list[Any], first: int, size: int) -> None:
    del items[first : first + size]


def _unfold(items: list[Any], place: int, inner: list[Any]) -> None:
    items[place : place + 1] = inner
