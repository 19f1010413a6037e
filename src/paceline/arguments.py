"""Checks the arguments of Paceline's public functions and classes.

Values that mean the same are accepted: numpy's numbers and tensors of one element instead of Python's
numbers, and a timedelta instead of seconds.
"""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Real
from typing import Any, SupportsIndex, TypeVar

from paceline.errors import ConfigError, ConfigTypeError

_LONGEST_S = 1e8
"""Three years. Longer times, infinity among them, become this, so that nanoseconds fit into 64 bits."""

_LONGEST_SHOWN = 120
"""Most characters of a value in an error, which shows it twice."""

_Kind = TypeVar("_Kind")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Arguments:
    """Checks the arguments of one public callable. Each method returns the value that Paceline uses.

    Args:
        owner: The callable's name, for errors: "init", "DistributedSampler". Empty: the argument's name is
            enough.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def refuse(
        self,
        name: str,
        value: object,
        expected: str,
        hint: str,
        *,
        is_type: bool = False,
        got: str = "",
        **more: Any,
    ) -> ConfigError:
        """Make the error for a wrong value; the caller raises it."""
        kind = ConfigTypeError if is_type else ConfigError
        shown = show(value)
        given = shown if value is None else f"{shown}, of type {type(value).__name__}"
        prefix = f"{self._owner}: " if self._owner else ""
        return kind(
            f"{prefix}{name}={shown} is not usable.",
            expected=expected,
            got=got or given,
            hint=hint,
            argument=name,
            **more,
        )

    def require(self, holds: bool, name: str, value: object, expected: str, hint: str = "") -> None:
        if not holds:
            raise self.refuse(name, value, expected, hint or f"leave {name} out for its default")

    def whole(
        self,
        name: str,
        value: SupportsIndex,
        *,
        least: int | None = None,
        most: int | None = None,
        hint: str = "",
    ) -> int:
        """A whole number, as Python's own int."""
        expected = f"a whole number{_range(least, most)}"
        hint = hint or f"for example {name}={1 if least is None else least}"
        plain = _plain(value)
        try:
            if isinstance(plain, bool):
                raise TypeError
            number = operator.index(plain)
        except _NO_NUMBER:
            raise self.refuse(name, value, expected, _as_number(name, value) or hint, is_type=True) from None
        if (least is not None and number < least) or (most is not None and number > most):
            raise self.refuse(name, value, expected, hint)
        return number

    def number(
        self,
        name: str,
        value: Any,
        *,
        above: float | None = None,
        least: float | None = None,
        what: str = "a number",
        is_finite: bool = True,
        hint: str = "",
    ) -> float:
        """A number, as Python's own float."""
        if least is not None:
            what = f"{what}, {least:g} or more"
        elif above is not None:
            what = f"{what}, more than {above:g}"
        hint = hint or f"for example {name}=1.0"
        plain = _plain(value)
        try:
            if isinstance(plain, (bool, str, bytes, bytearray)):
                raise TypeError
            number = float(plain)
        except OverflowError:
            number = math.inf
        except _NO_NUMBER:
            raise self.refuse(name, value, what, _as_number(name, value) or hint, is_type=True) from None
        is_low = (above is not None and not number > above) or (least is not None and not number >= least)
        if is_low or math.isnan(number) or (is_finite and math.isinf(number)):
            raise self.refuse(name, value, what, hint)
        return number

    def seconds(
        self, name: str, value: float | timedelta, *, may_be_zero: bool = False, is_finite: bool = False
    ) -> float:
        """A time in seconds; infinity becomes a very long time."""
        least = "0 or more" if may_be_zero else "more than 0"
        what = f"a number of seconds, {least}, or a datetime.timedelta"
        hint = f"{name}=30.0, or {name}=datetime.timedelta(seconds=30)"
        if isinstance(value, timedelta):
            number = value.total_seconds()
        else:
            number = self.number(name, value, what=what, hint=hint, is_finite=is_finite)
        if number < 0 or (number == 0 and not may_be_zero):
            raise self.refuse(name, value, what, hint)
        return min(number, _LONGEST_S)

    def optional_seconds(
        self, name: str, value: float | timedelta | None, *, may_be_zero: bool = False
    ) -> float | None:
        return None if value is None else self.seconds(name, value, may_be_zero=may_be_zero)

    def flag(self, name: str, value: object) -> bool:
        """True or False. Also accepts 1 and 0, numpy's booleans, and None for False.

        Raises:
            ConfigError: It is something else, such as the text "False", which is true in Python.
        """
        if value is None:
            return False
        plain = _plain(value)
        if isinstance(plain, int) and plain in (0, 1):
            return bool(plain)
        raise self.refuse(
            name, value, "True or False", f"{name}=True or {name}=False", is_type=not isinstance(value, int)
        )

    def choice(self, name: str, value: object, choices: Sequence[str]) -> str:
        if isinstance(value, str) and value in choices:
            return value
        *others, last = [f'"{choice}"' for choice in choices]
        expected = f"{', '.join(others)} or {last}" if others else last
        raise self.refuse(
            name, value, expected, f'for example {name}="{choices[0]}"', is_type=not isinstance(value, str)
        )

    def text(self, name: str, value: object, *, hint: str = "", may_be_empty: bool = True) -> str:
        expected = "a text" if may_be_empty else "a text that is not empty"
        hint = hint or f'for example {name}="a"'
        if not isinstance(value, str):
            raise self.refuse(name, value, expected, hint, is_type=True)
        if not value and not may_be_empty:
            raise self.refuse(name, value, expected, hint)
        return value

    def instance(self, name: str, value: Any, kind: type[_Kind], *, what: str, of: str, hint: str) -> _Kind:
        """An instance of a class.

        Args:
            what: What is expected, such as "a module", for the error if the class itself was passed.
            of: The class, as users write it.
        """
        if isinstance(value, kind):
            return value
        if isinstance(value, type) and issubclass(value, kind):
            instead = f"make one: {value.__name__}(...)"
            raise self.refuse(name, value, f"{what}, and not its class", instead, is_type=True)
        raise self.refuse(name, value, f"an instance of {of}", hint, is_type=True)

    def function(self, name: str, value: _Function, expected: str, *, hint: str = "") -> _Function:
        """Something that can be called."""
        if not callable(value):
            raise self.refuse(
                name, value, f"a function: {expected}", hint or f"{name}=the function itself", is_type=True
            )
        return value


_NO_NUMBER = (TypeError, ValueError, AssertionError, RuntimeError)
"""What conversions to a number raise: Python's, Paddle's of several elements, torch's of meta tensors."""


def show(value: object) -> str:
    """The value on one short line, however large it is and even if its repr raises."""
    text = " ".join(_short.repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


class _Short(reprlib.Repr):
    """As reprlib's, which formats only the first elements, with more room for strings."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_instance(self, x: object, level: int) -> str:
        try:
            text = repr(x)
        except Exception:
            return f"<{type(x).__name__} instance>"
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 3]}..."


_short = _Short()


def _plain(value: Any) -> Any:
    if hasattr(value, "item") and not isinstance(value, type):
        with contextlib.suppress(Exception):  # a tensor of several elements, or one without values
            return value.item()
    return value


def _range(least: int | None, most: int | None) -> str:
    if least is not None and most is not None:
        return f", {least} to {most}" if most > least else f": {least}"
    if least is not None:
        return f", {least} or more"
    return "" if most is None else f", at most {most}"


def _as_number(name: str, value: object) -> str:
    if isinstance(value, Real) and float(value).is_integer():
        return f"{name}={int(float(value))}, or int(...) of it"
    if isinstance(value, (str, bytes)):
        with contextlib.suppress(ValueError):
            number = float(value)
            if math.isfinite(number):
                return f"{name}={number:g}, a number and not text; int() or float() make one of a text"
    return ""
