"""Parses and formats sizes, times and numbers, for command lines and tables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

_FACTORS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_Value = TypeVar("_Value")


def size(text: str) -> int:
    """Parse a size such as '16KiB', '25 MB' or '4' to bytes: whole float32 elements, and at least one."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4, 16KiB, 25MB or 1GiB")
    nbytes = int(match[1]) * factor
    if nbytes == 0 or nbytes % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a size must hold whole float32 elements of 4 bytes, and at least one"
        )
    return nbytes


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        if most is not None and int(text) > most:
            raise argparse.ArgumentTypeError(f"{int(text)} is more than {most}")
        return int(text)

    return parse


def positive(unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above 0")
        return value

    return parse


def listed(parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """A parser of values separated by commas, at least one."""
    return lambda text: (
        tuple(parse(part.strip()) for part in text.split(",") if part.strip()) or (parse(text),)
    )


def format_size(nbytes: int) -> str:
    for name, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{_three_digits(nbytes / (1 << shift))} {name}"
    return f"{nbytes} B"


def format_time(seconds: float) -> str:
    if abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude == int(magnitude) and magnitude < 10_000:
        return f"{value:.0f}"
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.2f}"
