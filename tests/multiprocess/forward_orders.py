"""Forwards in and out of no_sync(), whose backwards come in another order; what gradients they leave.

An order is words: F a forward, L one in no_sync(), f and l their backwards, (fl) one backward of both, and
!f a backward in no_sync(). Ranks may make different orders, of which each is letters: F and f as above, E a
forward that raises, which the script catches, and * one backward of all others since the last. The same for
every framework.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

ORDERS = [
    "Ff", "Ll Ff", "F L f", "F L l f", "F L f l Ff", "L F l f", "L F f l Ff", "F L (fl)", "L F (fl)",
    "F !f Ff", "F L !l f", "F L !f Ll Ff", "L Ll F f", "F Ll f", "F L f F L f",
]  # fmt: skip

EPISODES = [
    ("FFF*", "F*"), ("F*FF*", "FFF*F*"), ("F*F*", "FFFFFFFF*FF*"), ("EF*", "FFf"), ("FEF*F*", "EFF*FF*"),
    ("FF*", "FFf"), ("FFf", "FF*"),
]  # fmt: skip
"""What ranks 0 and 1 do, and both train on."""

SKIPS = [("FFf", "Ff"), ("Ff", "FFFf"), ("FFFf", "FF*"), ("EF*", "F*")]
"""The same, and both are told at the first backward. After E a rank may have gone on to its next batch."""


def value_of(number: int, rank: int) -> float:
    """The gradient that the forward of this number leaves on a rank."""
    return float((number + 1) * (rank + 2) ** 2)


def run(
    order: str,
    rank: int,
    forward: Callable[[float], Any],
    backward: Callable[[Sequence[Any]], None],
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    """Make the forwards and backwards; a letter stands for the last forward of its kind."""
    last: dict[str, Any] = {}
    number = 0
    for word in re.findall(r"!?\(\w+\)|!?\w", order):
        if word.isupper():
            value = value_of(number, rank)
            number += 1
            if word == "L":
                with no_sync():
                    last["l"] = forward(value)
            else:
                last["f"] = forward(value)
            continue
        outputs = [last[letter] for letter in word.strip("!()")]
        if word.startswith("!"):
            with no_sync():
                backward(outputs)
        else:
            backward(outputs)


def expected(order: str, world_size: int) -> np.ndarray[Any, Any]:
    """Of each rank, the gradient after it. A backward averages all if neither it nor its forward is local."""
    found = np.zeros(world_size)
    last: dict[str, int] = {}
    number = 0
    for word in re.findall(r"!?\(\w+\)|!?\w", order):
        if word.isupper():
            last[word.lower()] = number
            number += 1
            continue
        letters = word.strip("!()")
        for letter in letters:
            found += [value_of(last[letter], rank) for rank in range(world_size)]
        if "f" in letters and not word.startswith("!"):
            found[:] = found.mean()
    return found


def run_alone(
    order: str,
    rank: int,
    forward: Callable[[float], Any],
    backward: Callable[[Sequence[Any]], None],
    fail: Callable[[float], None],
) -> None:
    """Make one rank's forwards and backwards; `fail` makes a forward that raises, and catches that."""
    outputs: list[Any] = []
    for number, letter in enumerate(order):
        if letter == "F":
            outputs.append(forward(value_of(number, rank)))
        elif letter == "E":
            fail(value_of(number, rank))
        else:
            backward(outputs if letter == "*" else outputs[-1:])
            outputs = []


def expected_of(orders: Sequence[str]) -> float:
    """The gradient after it, the same on all ranks: the sum of the means of their backwards."""
    sums: list[list[float]] = []
    for rank, order in enumerate(orders):
        sums.append([])
        values: list[float] = []
        for number, letter in enumerate(order):
            if letter == "F":
                values.append(value_of(number, rank))
            elif letter != "E":
                sums[-1].append(sum(values if letter == "*" else values[-1:]))
                values = []
    return float(np.mean([sum(of_rank) for of_rank in sums]))
