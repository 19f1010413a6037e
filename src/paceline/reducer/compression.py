"""Gradients in 16 or 8 bits per value, with error feedback.

Every rank gathers all codes and adds them up in float32, in rank order. The rounding error of a rank's values
is added to its next gradient. A *row* is what one rank sends for one bucket: its weight, then the codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import numpy as np

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.errors import ConfigTypeError

_HEADER_BYTES = 8  # this rank's weight, as float64; codes need 4
_SMALLEST_WEIGHT = 1e-30  # its inverse is still finite in float32

_NAMES = ("float16", "bfloat16", "eight_bit", "top_k")
FP16, BF16, EIGHT_BIT, TOP_K = (_core.ENCODINGS[name] for name in _NAMES)
"""The numbers of the encodings in the core (cpp/compression)."""

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
_State = TypeVar("_State")


class Compression:
    """The common base of `Fp16Compression`, `Bf16Compression` and `EightBitCompression`.

    An instance is the state of a communication hook: it holds the errors of one model's gradients from one
    backward to the next.

    Args:
        error_feedback: Add the rounding error of this rank's gradient to the next one, as in Seide et al.
            (Interspeech 2014). It takes the memory of two float32 gradients, because a backward that is not
            finite, or that raises on all ranks, leaves the errors as they were before it.
    """

    encoding: ClassVar[int]
    """The number of its encoding in the core (cpp/compression)."""

    _as_tensor: Callable[[Floats], Any]

    def __init__(self, *, error_feedback: bool = True) -> None:
        self.error_feedback = Arguments(type(self).__name__).flag("error_feedback", error_feedback)
        self._codes = Codes(self.encoding, error_feedback=self.error_feedback)

    def error_of(self, parameter: Hashable) -> Any:
        """The error-feedback residual: the part of a parameter's gradients that has not been sent yet.

        Returns:
            A new tensor of the parameter's framework: float32, flat, complex numbers as pairs. None before
            the first backward, and without error feedback.
        """
        error = self._codes.error_of(parameter)
        return None if error is None else self._as_tensor(error)

    def codes(self, as_tensor: Callable[[Floats], Any]) -> Codes:
        """The codes, for the hook of a framework; `as_tensor` converts numpy arrays to its tensors."""
        self._as_tensor = as_tensor
        return self._codes


@final
class Fp16Compression(Compression):
    """Sends float16, rounded to nearest even: 2 bytes per value.

    A finite value beyond 65504 is sent as 65504; with error feedback, the rest follows later.
    """

    encoding = FP16


@final
class Bf16Compression(Compression):
    """Sends bfloat16, rounded to nearest even: 2 bytes per value, with float32's range."""

    encoding = BF16


@final
class EightBitCompression(Compression):
    """Sends a byte per value, and a float32 scale per 256 values: the largest magnitude / 127.

    A gradient that is not finite arrives as NaN, and affects only values of its own code block.
    """

    encoding = EIGHT_BIT


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


class Codes:
    """The compression state of one rank for one model's gradients."""

    def __init__(self, encoding: int, *, error_feedback: bool) -> None:
        self._encoding = encoding
        self._error_feedback = error_feedback
        self._buckets: dict[int, tuple[list[Hashable], list[Elements], KeptError]] = {}
        self._errors: dict[Hashable, tuple[KeptError, Elements]] = {}
        self._spare: Bytes | None = None

    def error_of(self, parameter: Hashable) -> Floats | None:
        """A copy of the error kept for a parameter's gradients; None: none is kept."""
        known = self._errors.get(parameter)
        return None if known is None else known[0].current(known[1])

    def rows(self, count: int, num_rows: int) -> Bytes:
        """Memory for rows of a bucket of `count` values. Pass it to `recycle` afterwards.

        It is reused, because touching new pages takes as long as encoding.
        """
        nbytes = _HEADER_BYTES + _core.encoded_bytes(self._encoding, count)
        row_bytes = -(-nbytes // _HEADER_BYTES) * _HEADER_BYTES
        memory, self._spare = self._spare, None  # taken, because another model may use the same state
        if memory is None or memory.size < num_rows * row_bytes:
            memory = np.zeros(num_rows * row_bytes, np.uint8)
        return memory[: num_rows * row_bytes].reshape(num_rows, row_bytes)

    def recycle(self, rows: Bytes) -> None:
        if self._spare is None:
            self._spare = rows.reshape(-1)

    def encode(
        self,
        bucket: int,
        parameters: Sequence[Hashable],
        sizes: Sequence[int],
        values: int,
        weight: float,
        row: Bytes,
    ) -> Callable[[Sequence[Hashable]], None]:
        """Write this rank's row.

        Returns:
            A function to be called with the parameters that no rank used, if the backward is good on all
            ranks. The next backward then adds what this one did not deliver. Without that call it adds the
            same errors as this one.
        """
        kept: KeptError | None = None
        places: list[Elements] = []
        if self._error_feedback:
            places, kept = self._error_for(bucket, parameters, sizes)
        elements = 0, sum(sizes)
        if weight < _SMALLEST_WEIGHT:  # no rank reads codes of weight 0, and the error is kept
            row[:_HEADER_BYTES] = 0
            if kept is not None:
                kept.wait(elements)
        else:
            row[:_HEADER_BYTES].view(np.float64)[0] = weight
            codes = row.ctypes.data + _HEADER_BYTES
            if kept is not None:
                kept.encode(self._encoding, values, weight, elements, codes)
            else:
                _core.encode(self._encoding, values, 0, 0, 1 / weight, elements[1], codes)

        def adopt(unused: Sequence[Hashable]) -> None:
            if kept is not None:
                is_unused = {id(parameter) for parameter in unused}
                kept.adopt([place for p, place in zip(parameters, places) if id(p) in is_unused])

        return adopt

    def decode_mean(self, rows: Sequence[Bytes], count: int, mean: int) -> None:
        weights = [float(row[:_HEADER_BYTES].view(np.float64)[0]) for row in rows]
        codes = [row.ctypes.data + _HEADER_BYTES for row in rows]
        _core.decode_mean(self._encoding, codes, weights, count, mean)

    def _error_for(
        self, bucket: int, parameters: Sequence[Hashable], sizes: Sequence[int]
    ) -> tuple[list[Elements], KeptError]:
        known = self._buckets.get(bucket)
        if known is not None and _are_same(known[0], parameters):
            return known[1:]
        moved = set(parameters)  # other buckets that held them are laid out anew when they come next
        self._buckets = {n: known for n, known in self._buckets.items() if moved.isdisjoint(known[0])}
        kept, stop = KeptError(sum(sizes)), 0
        places: list[Elements] = []
        for parameter, size in zip(parameters, sizes, strict=True):
            start, stop = stop, stop + size
            if (before := self.error_of(parameter)) is not None:
                kept.begin_with((start, stop), before)
            places.append((start, stop))
            self._errors[parameter] = kept, places[-1]
        self._buckets[bucket] = list(parameters), places, kept
        return places, kept


def check_state(state: Any, expected: type[_State]) -> _State:
    if not isinstance(state, expected):
        raise ConfigTypeError(
            "A compression hook got the state of something else.",
            expected=f"an instance of {expected.__name__}",
            got=f"state={show(state)}, of type {type(state).__name__}",
            hint="register_comm_hook(EightBitCompression(), eight_bit_hook)",
            argument="state",
        )
    return state


def check_bucket(bucket: Any, expected: type, *, user: str, owner: str) -> None:
    if not isinstance(bucket, expected):
        raise ConfigTypeError(
            f"{user} needs a bucket of {owner}, which knows its weight.",
            expected="what register_comm_hook() gives to the hook",
            got=f"bucket={show(bucket)}, of type {type(bucket).__name__}",
            hint=f"register the hook on {owner}",
            argument="bucket",
        )


def _are_same(known: Sequence[Hashable], now: Sequence[Hashable]) -> bool:
    return len(known) == len(now) and all(a is b for a, b in zip(known, now))
