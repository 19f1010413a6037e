"""Gradients in 16 or 8 bits per value, and what rounding took from them.

The one idea: every rank gathers everybody's codes and adds them up in float32, in the order of ranks, so
nothing is rounded but once, at its origin, and that rank adds what was lost to its next gradient.

Words: a *row* is what one rank sends of one bucket: its weight, then the codes. Imports the core, numpy and
`errors`, `arguments`; tensors are addresses here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar, final

import numpy as np

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.errors import ConfigTypeError

_HEADER_BYTES = 8  # this rank's weight, as float64; codes need 4
_SMALLEST_WEIGHT = 1e-30  # of which float32 still holds the inverse

_NAMES = ("float16", "bfloat16", "eight_bit", "top_k")
FP16, BF16, EIGHT_BIT, TOP_K = (_core.ENCODINGS[name] for name in _NAMES)
"""The numbers of the encodings in the core (cpp/compression)."""

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
_State = TypeVar("_State")


class Compression:
    """What `Fp16Compression`, `Bf16Compression` and `EightBitCompression` share.

    The state of a communication hook: what it keeps of one model's gradients from one backward to the next.

    Args:
        error_feedback: Add what this rank's rounding took from a gradient to the next one, as
            Seide et al. (Interspeech 2014) do. It takes the memory of one float32 gradient.
    """

    encoding: ClassVar[int]
    """The number of its encoding in the core (cpp/compression)."""

    _as_tensor: Callable[[Floats], Any]

    def __init__(self, *, error_feedback: bool = True) -> None:
        self.error_feedback = Arguments(type(self).__name__).flag("error_feedback", error_feedback)
        self._codes = Codes(self.encoding, error_feedback=self.error_feedback)

    def error_of(self, parameter: Hashable) -> Any:
        """The error-feedback residual: what has not been transmitted yet of a parameter's gradients.

        Returns:
            A tensor of the parameter's framework: float32, flat, complex numbers as pairs. torch's changes
            with each backward, Paddle's is a copy. None before the first backward, and without error
            feedback.
        """
        error = self._codes.error_of(parameter)
        return None if error is None else self._as_tensor(error)

    def codes(self, as_tensor: Callable[[Floats], Any]) -> Codes:
        """Its codes, for the hook of a framework whose tensors `as_tensor` makes of numpy's arrays."""
        self._as_tensor = as_tensor
        return self._codes


@final
class Fp16Compression(Compression):
    """Sends float16, rounded to nearest even: 2 bytes per value.

    A finite value beyond 65504 is sent as 65504; with error feedback, the rest follows.
    """

    encoding = FP16


@final
class Bf16Compression(Compression):
    """Sends bfloat16, rounded to nearest even: 2 bytes per value, with float32's range."""

    encoding = BF16


@final
class EightBitCompression(Compression):
    """Sends a byte per value, and a float32 scale per 256 values: the largest magnitude / 127.

    A gradient that is not finite arrives as NaN, and leaves the others of its code block alone.
    """

    encoding = EIGHT_BIT


class Codes:
    """What one rank knows of the compression of one model's gradients.

    Args:
        encoding: One of the numbers above.
        error_feedback: Keep what rounding takes, and add it to the next gradient.
    """

    def __init__(self, encoding: int, *, error_feedback: bool) -> None:
        self._encoding = encoding
        self._error_feedback = error_feedback
        self._buckets: dict[int, tuple[list[Hashable], Floats]] = {}
        self._errors: dict[Hashable, Floats] = {}
        self._spare: Bytes | None = None

    def error_of(self, parameter: Hashable) -> Floats | None:
        """What has not been transmitted yet of a parameter's gradients; None: nothing is kept."""
        return self._errors.get(parameter)

    def rows(self, count: int, num_rows: int) -> Bytes:
        """Memory for rows of a bucket of so many values; new pages cost as much as encoding.

        Give it back with `recycle`.
        """
        nbytes = _HEADER_BYTES + _core.encoded_bytes(self._encoding, count)
        row_bytes = -(-nbytes // _HEADER_BYTES) * _HEADER_BYTES
        memory, self._spare = self._spare, None  # another model may have the same state
        if memory is None or memory.size < num_rows * row_bytes:
            memory = np.zeros(num_rows * row_bytes, np.uint8)
        return memory[: num_rows * row_bytes].reshape(num_rows, row_bytes)

    def recycle(self, rows: Bytes) -> None:
        """The memory of these rows is free."""
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
    ) -> None:
        """Write this rank's row.

        Args:
            bucket: Its number.
            parameters: Whose gradients they are.
            sizes: How many values each has.
            values: The address of all of them, float32, multiplied by `weight`.
            weight: The weight of this rank.
            row: To be written.
        """
        error = self._error_for(bucket, parameters, sizes) if self._error_feedback else None
        if weight < _SMALLEST_WEIGHT:  # nobody looks at codes of weight 0, and the error waits
            row[:_HEADER_BYTES] = 0
            return
        row[:_HEADER_BYTES].view(np.float64)[0] = weight
        _core.encode(
            self._encoding,
            values,
            error.ctypes.data if error is not None else 0,
            1 / weight,
            sum(sizes),
            row.ctypes.data + _HEADER_BYTES,
        )

    def decode_mean(self, rows: Sequence[Bytes], count: int, mean: int) -> None:
        """Write the mean of all ranks' rows, by rank, as float32 to the address `mean`."""
        weights = [float(row[:_HEADER_BYTES].view(np.float64)[0]) for row in rows]
        codes = [row.ctypes.data + _HEADER_BYTES for row in rows]
        _core.decode_mean(self._encoding, codes, weights, count, mean)

    def _error_for(self, bucket: int, parameters: Sequence[Hashable], sizes: Sequence[int]) -> Floats:
        """The kept error of a bucket, flat; zeros at first, and where buckets were laid out anew, the old."""
        known = self._buckets.get(bucket)
        if known is not None and _are_same(known[0], parameters):
            return known[1]
        moved = set(parameters)  # buckets that had them are laid out anew, too, when they come next
        self._buckets = {n: known for n, known in self._buckets.items() if moved.isdisjoint(known[0])}
        flat: Floats = np.zeros(sum(sizes), np.float32)
        for parameter, place in zip(parameters, np.split(flat, np.cumsum(sizes[:-1])), strict=True):
            before = self._errors.get(parameter)
            if before is not None:
                place[:] = before
            self._errors[parameter] = place
        self._buckets[bucket] = (list(parameters), flat)
        return flat


def check_state(state: Any, expected: type[_State]) -> _State:
    """The state of a compression hook.

    Raises:
        ConfigTypeError: It is of another kind.
    """
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
    """Refuse what is no bucket of ours.

    Args:
        expected: The class of those.
        user: What needs one.
        owner: The wrapper that hands them out.

    Raises:
        ConfigTypeError: It is none.
    """
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
