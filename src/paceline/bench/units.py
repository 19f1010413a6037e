"""Sizes and times as people write them. Imports only the standard library."""

from __future__ import annotations

import re

_FACTORS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_size(text: str) -> int:
    """Bytes of a size such as '16KiB', '25 MB' or '4'. Raises ValueError that says what is wrong.

    Example:
        >>> parse_size("16KiB")
        16384
    """
    match = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write 4, 16KiB, 25MB or 1GiB")
    size = int(match[1]) * factor
    if size == 0 or size % 4:
        raise ValueError(f"{text!r}: a size must hold whole float32 elements of 4 bytes, and at least one")
    return size


def format_size(nbytes: int) -> str:
    """The other way round.

    Example:
        >>> format_size(16384), format_size(26214400)
        ('16 KiB', '25 MiB')
    """
    for name, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{_three_digits(nbytes / (1 << shift))} {name}"
    return f"{nbytes} B"


def format_time(seconds: float) -> str:
    """Three digits and a fitting unit.

    Example:
        >>> format_time(0.00192), format_time(3.2e-07)
        ('1.92 ms', '0.32 us')
    """
    if abs(seconds) >= 0.9995:
        return f"{_three_digits(seconds)} s"
    if abs(seconds) >= 0.9995e-3:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds * 1e6)} us"


def format_ratio(ratio: float) -> str:
    """How many times.

    Example:
        >>> format_ratio(213.4), format_ratio(2.54)
        ('213x', '2.5x')
    """
    return f"{ratio:.0f}x" if ratio >= 20 else f"{ratio:.1f}x"


def _three_digits(value: float) -> str:
    size = abs(value)
    if size == int(size) and size < 10_000:
        return f"{value:.0f}"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
