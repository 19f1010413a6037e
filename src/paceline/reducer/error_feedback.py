"""Error feedback of compressed gradients: what encoding lost is added to the next gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any, TypeAlias, final

import numpy as np

from paceline import _core

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Elements = tuple[int, int]
"""A range of elements: the first, and the one after the last."""


@final
class KeptError:
    """The encoding errors of a bucket or shard.

    The errors of a backward take effect with `adopt`, when the backward is known to be good on all ranks.
    Without that call the next backward starts from the same errors again. So there are two arrays: encoding
    reads one and writes the other.

    The values of a parameter that no rank used are not delivered, so its error stays. It is set aside until
    there are values again, because large errors would take up codes of values in the same block.
    """

    def __init__(self, count: int) -> None:
        self._now: Floats = np.zeros(count, np.float32)
        self._next: Floats = np.zeros(count, np.float32)
        # Errors of elements whose values, and errors in `_now`, are zeros; None: the error is zero, too.
        self._aside: dict[Elements, Floats | None] = {}

    def __len__(self) -> int:
        return len(self._now)

    def current(self, elements: Elements) -> Floats:
        first, last = elements
        found: Floats = self._now[first:last].copy()
        for (start, stop), error in self._aside.items():
            begin, end = max(start, first), min(stop, last)
            if error is not None and begin < end:
                found[begin - first : end - first] = error[begin - start : end - start]
        return found

    def begin_with(self, elements: Elements, error: Floats) -> None:
        self._now[slice(*elements)] = error

    def encode(self, encoding: int, values: int, weight: float, elements: Elements, codes: int) -> None:
        """Write the codes of some values, each multiplied by `weight`, to the address `codes`."""
        start, stop = elements
        if self._aside:
            self._bring_back(values, elements)
        now, following = self._now.ctypes.data + 4 * start, self._next.ctypes.data + 4 * start
        _core.encode(encoding, values, now, following, 1 / weight, stop - start, codes)

    def wait(self, elements: Elements) -> None:
        """Keep the error of these values as it is, in place of `encode`, because their weight is 0."""
        here = slice(*elements)
        self._next[here] = self._now[here]

    def adopt(self, unused: Collection[Elements] = ()) -> None:
        """Use the errors of the last backward from now on."""
        before, self._aside = self._aside, {}
        for elements in unused:
            if elements in before:
                self._aside[elements] = before.pop(elements)
                continue
            start, stop = elements
            error: Floats = self._now[start:stop].copy()
            for part in [part for part in before if start <= part[0] and part[1] <= stop]:
                if (kept := before.pop(part)) is not None:
                    error[part[0] - start : part[1] - start] = kept
            self._aside[elements] = error if error.any() else None
            self._next[start:stop] = 0
        for (start, stop), kept in before.items():  # used again, but only with zeros here
            if kept is not None:
                self._next[start:stop] += kept
        self._now, self._next = self._next, self._now

    def _bring_back(self, values: int, elements: Elements) -> None:
        """Restore errors that are set aside to ranges in which some value is not 0."""
        first, last = elements
        flat = np.ctypeslib.as_array((ctypes.c_float * (last - first)).from_address(values))
        for (start, stop), error in list(self._aside.items()):
            begin, end = max(start, first), min(stop, last)
            if begin >= end or not flat[begin - first : end - first].any():
                continue
            del self._aside[start, stop]
            if error is not None:
                self._now[begin:end] = error[begin - start : end - start]
            for part in ((start, begin), (end, stop)):  # the rest, which belongs to another call
                if part[0] < part[1]:
                    rest = None if error is None else error[part[0] - start : part[1] - start]
                    self._aside[part] = rest
