"""Communication hooks that send gradients in 16 or 8 bits per value and keep what rounding took.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

The one idea: every rank gathers everybody's codes and adds them up in float32, in the order of ranks, so
nothing is rounded but once, at its origin, and that rank adds what was lost to its next gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from paceline import _core
from paceline.arguments import Arguments, show
from paceline.errors import ConfigError, ConfigTypeError
from paceline.torch.engine import as_real
from paceline.torch.hooked import GradBucket

_HEADER_BYTES = 8  # this rank's weight, as float64; codes need 4
_SMALLEST_WEIGHT = 1e-30  # of which float32 still holds the inverse


class Compression:
    """What `Fp16Compression`, `Bf16Compression` and `EightBitCompression` share.

    Args:
        error_feedback: Add what this rank's rounding took from a gradient to the next one, as
            Seide et al. (Interspeech 2014) do. It takes the memory of one float32 gradient.
    """

    encoding: ClassVar[int]
    """The number of its encoding in the core (cpp/compression)."""

    def __init__(self, *, error_feedback: bool = True) -> None:
        self.error_feedback = Arguments(type(self).__name__).flag("error_feedback", error_feedback)
        self._buckets: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self._errors: dict[torch.Tensor, torch.Tensor] = {}
        self._spare: torch.Tensor | None = None  # of the codes of earlier buckets

    def error_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What the others have not got yet of this rank's gradients of a parameter.

        Returns:
            Float32, flat, complex numbers as pairs; it changes with each backward. None before the first
            backward, and without error feedback.
        """
        return self._errors.get(parameter)

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The future of the mean of a bucket's gradients over all ranks. Collective; does not block.

        Raises:
            ConfigError: The gradients are not in the host's memory, or not floating.
            ConfigTypeError: It is no bucket of `paceline.torch.DistributedDataParallel`.
        """
        values = _values_of(bucket, type(self).__name__)
        error = self._error_for(bucket, values.numel()) if self.error_feedback else None
        group = bucket.process_group()
        memory, rows_of_all = self._memory_for(values.numel(), 1 + dist.get_world_size(group))
        own, *rows = rows_of_all
        self._encode(values, error, bucket.weight(), own)
        work = dist.all_gather(rows, own, group=group, async_op=True)

        def decode(gathered: torch.futures.Future[Any]) -> torch.Tensor:
            gathered.value()  # raises if it failed
            weights = [row[:_HEADER_BYTES].view(torch.float64).item() for row in rows]
            self._decode(rows, weights, values)
            self._spare = memory if self._spare is None else self._spare
            return values

        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(decode))

    def _error_for(self, bucket: GradBucket, count: int) -> torch.Tensor:
        """The kept error of a bucket, flat; zeros at first, and where buckets were laid out anew, the old."""
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if known is not None and _are_same(known[0], parameters):
            return known[1]
        flat = torch.zeros(count)
        sizes = [2 * p.numel() if p.is_complex() else p.numel() for p in parameters]
        for parameter, place in zip(parameters, torch.split(flat, sizes), strict=True):
            before = self._errors.get(parameter)
            if before is not None:
                place.copy_(before)
            self._errors[parameter] = place
        self._buckets[bucket.index()] = (parameters, flat)
        return flat

    def _memory_for(self, count: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory, new pages of which cost as much as encoding; and rows in it for header and codes."""
        nbytes = _HEADER_BYTES + _core.encoded_bytes(self.encoding, count)
        row_bytes = -(-nbytes // _HEADER_BYTES) * _HEADER_BYTES
        memory, self._spare = self._spare, None  # another model may have the same state
        if memory is None or memory.numel() < num_rows * row_bytes:
            memory = torch.zeros(num_rows * row_bytes, dtype=torch.uint8)
        return memory, memory[: num_rows * row_bytes].view(num_rows, row_bytes)

    def _encode(
        self, values: torch.Tensor, error: torch.Tensor | None, weight: float, codes: torch.Tensor
    ) -> None:
        if weight < _SMALLEST_WEIGHT:  # nobody looks at codes of weight 0, and the error waits
            codes[:_HEADER_BYTES].zero_()
            return
        codes[:_HEADER_BYTES].view(torch.float64).fill_(weight)
        _core.encode(
            self.encoding,
            values.data_ptr(),
            error.data_ptr() if error is not None else 0,
            1 / weight,
            values.numel(),
            codes.data_ptr() + _HEADER_BYTES,
        )

    def _decode(self, rows: Sequence[torch.Tensor], weights: list[float], mean: torch.Tensor) -> None:
        codes = [row.data_ptr() + _HEADER_BYTES for row in rows]
        _core.decode_mean(self.encoding, codes, weights, mean.numel(), mean.data_ptr())


class Fp16Compression(Compression):
    """Sends float16, rounded to nearest even: 2 bytes per value.

    A finite value beyond 65504 is sent as 65504; with error feedback, the rest follows.
    """

    encoding = 0


class Bf16Compression(Compression):
    """Sends bfloat16, rounded to nearest even: 2 bytes per value, with float32's range."""

    encoding = 1


class EightBitCompression(Compression):
    """Sends a byte per value, and a float32 scale per 256 values: the largest magnitude / 127.

    A gradient that is not finite arrives as NaN, and leaves the others of its block alone.
    """

    encoding = 2


def fp16_hook(state: Fp16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in float16 codes. Collective.

    Example:
        >>> model.register_comm_hook(Fp16Compression(), fp16_hook)

        Rank 0 has the gradient 1 + 2**-12 and rank 1 has 1: the mean is 1 in the first step. Rank 0 has
        kept 2**-12 and adds it to its next gradient: after four such steps the means sum to 4 + 2**-11.

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return _checked(state, Fp16Compression).average(bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective.

    Example:
        >>> model.register_comm_hook(Bf16Compression(), bf16_hook)

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return _checked(state, Bf16Compression).average(bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective.

    Example:
        >>> model.register_comm_hook(EightBitCompression(), eight_bit_hook)

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return _checked(state, EightBitCompression).average(bucket)


def _checked(state: Any, expected: type[Compression]) -> Compression:
    if not isinstance(state, expected):
        raise ConfigTypeError(
            "A compression hook got the state of something else.",
            expected=f"an instance of {expected.__name__}",
            got=f"state={show(state)}, of type {type(state).__name__}",
            hint="register_comm_hook(EightBitCompression(), eight_bit_hook)",
            argument="state",
        )
    return state


def _values_of(bucket: Any, name: str) -> torch.Tensor:
    """A bucket's gradients in float32, flat: the bucket's own memory if it is float32."""
    if not isinstance(bucket, GradBucket):
        raise ConfigTypeError(
            f"{name} needs a bucket of paceline.torch.DistributedDataParallel, which knows its weight.",
            expected="what register_comm_hook() gives to the hook",
            got=f"bucket={show(bucket)}, of type {type(bucket).__name__}",
            hint="register the hook on paceline.torch.DistributedDataParallel",
            argument="bucket",
        )
    flat = as_real(bucket.buffer())
    if flat.device.type != "cpu" or not flat.is_floating_point():
        raise ConfigError(
            f"{name} compresses floating gradients in the host's memory.",
            got=f"{flat.dtype} on {flat.device}",
            hint="torch's hooks work on a GPU: torch.distributed.algorithms.ddp_comm_hooks",
        )
    return flat.reshape(-1).float()


def _are_same(known: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return len(known) == len(now) and all(a is b for a, b in zip(known, now))
