"""Gradients in 16 or 8 bits per value, with error feedback.

Every rank gathers all codes and adds them up in float32, in rank order. The rounding error of a rank's values
is added to its next gradient. A *row* is what one rank sends for one bucket: its weight, then the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import numpy as np

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.errors import ConfigTypeError
from paceline.reducer.error_feedback import Elements, Floats, KeptError

_HEADER_BYTES = 8  # this rank's weight, as float64; codes need 4
_SMALLEST_WEIGHT = 1e-30  # its inverse is still finite in float32

_NAMES = ("float16", "bfloat16", "eight_bit", "top_k")
FP16, BF16, EIGHT_BIT, TOP_K = (_core.ENCODINGS[name] for name in _NAMES)
"""The numbers of the encodings in the core (cpp/compression)."""

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
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
