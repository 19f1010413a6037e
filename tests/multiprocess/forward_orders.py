"""Orders of forwards and backwards in and out of no_sync(), and the gradients that they must leave.

An order is a string of words: F is a forward, L is a forward in no_sync(), f and l are their backwards, (fl)
is one backward of both, and !f is a backward in no_sync(). Where each rank has an order of its own, it is a
string of letters: F and f as above, E is a forward that raises and whose error the script catches, and * is
one backward of all successful forwards since the last backward. Every framework runs the same orders.
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
"""Orders of ranks 0 and 1 with which both ranks train on."""

SKIPS = [("FFf", "Ff"), ("Ff", "FFFf"), ("FFFf", "FF*"), ("EF*", "F*")]
"""Orders of ranks 0 and 1 with which both ranks get an error at the first backward.

After E a rank may have gone on to its next batch.
"""


def value_of(number: int, rank: int) -> float:
    """The gradient that forward `number` leaves on `rank`."""
    return float((number + 1) * (rank + 2) ** 2)


def run(
    order: str,
    rank: int,
    forward: Callable[[float], Any],
    backward: Callable[[Sequence[Any]], None],
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    """Run the forwards and backwards; f and l stand for the last forward of their kind."""
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
    """The gradient of each rank after `order`.

    A backward averages all that has accumulated, unless it or each of its forwards is in no_sync().
    """
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
    """Run one rank's forwards and backwards; `fail` runs a forward that raises, and catches its error."""
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
    """The gradient after `orders`, the same on all ranks: the sum of the means of their backwards."""
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
