"""Other floating-point modes of a thread: another rounding direction, or flushing of subnormals."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest

# The numbers of this processor's <fenv.h>.
_NEAREST = 0
_ROUNDING = {
    "x86_64": {"downward": 0x400, "upward": 0x800, "towards zero": 0xC00},
    "aarch64": {"downward": 0x800000, "upward": 0x400000, "towards zero": 0xC00000},
}.get(platform.machine(), {})
ROUNDINGS = list(_ROUNDING)
KINDS = [*_ROUNDING, "flushed"]  # the last one needs torch


@contextlib.contextmanager
def other_floats(kind: str | None) -> Iterator[None]:
    """Run the block in this floating-point mode of the thread; None leaves the mode as it is.

    Compute expected values before the block, since the mode would change them, too.
    """
    if kind is None:
        yield
    elif kind in _ROUNDING:
        libm = ctypes.CDLL("libm.so.6")
        assert libm.fesetround(_ROUNDING[kind]) == 0
        try:
            yield
        finally:
            assert libm.fesetround(_NEAREST) == 0
    else:
        import torch

        if not torch.set_flush_denormal(True):
            pytest.fail("this processor does not flush subnormals")
        try:
            yield
        finally:
            torch.set_flush_denormal(False)


def delicate(rank: int, count: int) -> np.ndarray:
    """Values whose sums over ranks must be rounded; every second one is subnormal."""
    values = np.random.default_rng(rank).normal(size=count).astype(np.float32)
    values[::2] = values[::2] * np.float32(1e-39)
    return values
