"""Communication hooks that send gradients in 16 or 8 bits per value and keep what rounding took.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

How that is done is in `reducer/compression.py`; this file has Paddle's tensors.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import paddle

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.paddle.link.comm_hook import Future, GradBucket
from paceline.reducer.compression import BF16, EIGHT_BIT, FP16, Bytes, Codes, check_bucket, check_state

__all__ = [
    "Bf16Compression",
    "Compression",
    "EightBitCompression",
    "Fp16Compression",
    "bf16_hook",
    "eight_bit_hook",
    "fp16_hook",
]


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
        self._codes = Codes(self.encoding, error_feedback=self.error_feedback)

    def error_of(self, parameter: paddle.Tensor) -> paddle.Tensor | None:
        """What the others have not got yet of this rank's gradients of a parameter.

        Returns:
            A copy: float32, flat. None before the first backward, and without error feedback.
        """
        error = self._codes.error_of(parameter)
        return None if error is None else paddle.to_tensor(error)

    def average(self, bucket: Any) -> Future[paddle.Tensor]:
        """The future of the mean of a bucket's gradients over all ranks. Collective.

        Raises:
            ConfigError: The gradients are not in the host's memory.
            ConfigTypeError: It is no bucket of `paceline.paddle.DataParallel`.
        """
        values = _values_of(bucket, type(self).__name__)
        parameters, count = bucket.parameters(), int(values.size)
        rows = self._codes.rows(count, 1)
        sizes = [int(p.size) for p in parameters]
        self._codes.encode(bucket.index(), parameters, sizes, values.data_ptr(), bucket.weight(), rows[0])

        def decode(gathered: Future[paddle.Tensor]) -> paddle.Tensor:
            everybodys: list[Bytes] = list(np.from_dlpack(gathered.value().detach()))
            self._codes.decode_mean(everybodys, count, values.data_ptr())
            self._codes.recycle(rows)
            return values

        return bucket.all_gather(paddle.from_dlpack(rows[0])).then(decode)


class Fp16Compression(Compression):
    """Sends float16, rounded to nearest even: 2 bytes per value.

    A finite value beyond 65504 is sent as 65504; with error feedback, the rest follows.
    """

    encoding = FP16


class Bf16Compression(Compression):
    """Sends bfloat16, rounded to nearest even: 2 bytes per value, with float32's range."""

    encoding = BF16


class EightBitCompression(Compression):
    """Sends a byte per value, and a float32 scale per 256 values: the largest magnitude / 127.

    A gradient that is not finite arrives as NaN, and leaves the others of its block alone.
    """

    encoding = EIGHT_BIT


def fp16_hook(state: Fp16Compression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in float16 codes. Collective.

    Example:
        >>> model.register_comm_hook(Fp16Compression(), fp16_hook)

        Rank 0 has the gradient 1 + 2**-12 and rank 1 has 1: the mean is 1 in the first step. Rank 0 has
        kept 2**-12 and adds it to its next gradient: after four such steps the means sum to 4 + 2**-11.

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return check_state(state, Fp16Compression).average(bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective.

    Example:
        >>> model.register_comm_hook(Bf16Compression(), bf16_hook)

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return check_state(state, Bf16Compression).average(bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective.

    Example:
        >>> model.register_comm_hook(EightBitCompression(), eight_bit_hook)

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return check_state(state, EightBitCompression).average(bucket)


def _values_of(bucket: Any, name: str) -> paddle.Tensor:
    """A bucket's gradients in float32, flat: the bucket's own memory if it is float32."""
    check_bucket(bucket, GradBucket, user=name, owner="paceline.paddle.DataParallel")
    flat = bucket.buffer()
    if not flat.place.is_cpu_place():
        raise ConfigError(
            f"{name} compresses gradients in the host's memory.",
            got=f"{flat.dtype} on {flat.place}",
            hint="on a GPU, write a hook that calls bucket.all_reduce(bucket.buffer().astype('bfloat16'))",
        )
    return flat if flat.dtype == paddle.float32 else flat.astype("float32")
