"""Tables of wrong uses, and the requirements on their errors.

A row is one wrong value of one argument of one public callable. Its error must be a Paceline error, raised by
Paceline's own code (and not by numpy, torch, Paddle or a socket that the value reached), and must name the
argument, show the value, and say what was expected and how to correct it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import PacelineError

OURS = Path(paceline.__file__).parent
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Use:
    """One wrong use.

    Attributes:
        owner: The callable.
        argument: The argument that the error must name.
        value: The wrong value.
        call: Passes it.
        shown: The error's form of it; None: the beginning of its repr.
    """

    owner: str
    argument: str
    value: Any
    call: Callable[..., object]
    shown: str | None = None

    @property
    def text(self) -> str:
        return repr(self.value)[:20] if self.shown is None else self.shown

    def __str__(self) -> str:
        # Without an address in memory: each of several test workers must find the same names.
        value = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(self.value).split()))
        return f"{self.owner}-{self.argument}-{value[:24]}"


def each(owner: str, argument: str, call: Callable[..., object], *values: Any) -> list[Use]:
    """One row for each value."""
    return [Use(owner, argument, value, call) for value in values]


def each_shown(owner: str, argument: str, call: Callable[..., object], *values: tuple[Any, str]) -> list[Use]:
    """The same, with the error's form of each."""
    return [Use(owner, argument, value, call, shown) for value, shown in values]


def check(use: Use) -> None:
    """Make the wrong use, and check its error."""
    with pytest.raises(PacelineError) as caught:
        use.call(use.value)
    error, text = caught.value, str(caught.value)
    *_, innermost = traceback.extract_tb(error.__traceback__)
    assert OURS in Path(innermost.filename).parents, f"raised by {innermost.filename}:\n{text}"
    # An exception that is printed above ours ("During handling of ...") is not allowed either.
    assert error.__context__ is None or error.__suppress_context__, repr(error.__context__)
    assert use.argument in text, f"does not name {use.argument!r}:\n{text}"
    assert use.text in text, f"does not show {use.text!r}:\n{text}"
    assert error.expected, f"does not say what was expected:\n{text}"
    assert error.hint, f"does not say what to do:\n{text}"
    assert len(text) < 1500, f"too long:\n{text}"
