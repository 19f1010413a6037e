"""Communication hooks that send gradients in 16 or 8 bits per value and keep what rounding took.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

How that is done is in `reducer/compression.py`; this file has Paddle's tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paceline.errors import ConfigError
from paceline.paddle.link.comm_hook import Future, GradBucket
from paceline.reducer.compression import (
    BF16,
    EIGHT_BIT,
    FP16,
    Bytes,
    CompressionState,
    check_bucket,
    check_state,
)

__all__ = [
    "Bf16Compression",
    "Compression",
    "EightBitCompression",
    "Fp16Compression",
    "bf16_hook",
    "eight_bit_hook",
    "fp16_hook",
]


class Compression(CompressionState):
    """What `Fp16Compression`, `Bf16Compression` and `EightBitCompression` share.

    Args:
        error_feedback: Add what this rank's rounding took from a gradient to the next one, as
            Seide et al. (Interspeech 2014) do. It takes the memory of one float32 gradient.
    """

    def error_of(self, parameter: paddle.Tensor) -> paddle.Tensor | None:
        """The error-feedback residual: what has not been transmitted yet of a parameter's gradients.

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
        >>> state = Fp16Compression()
        >>> model.register_comm_hook(state, fp16_hook)

        Rank 0 has the gradient 1 + 2**-12 and rank 1 has 1: both get 1, and `state.error_of(parameter)` is
        2**-12 on rank 0, which adds it to its next gradient, and 0 on rank 1.

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return check_state(state, Fp16Compression).average(bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective."""
    return check_state(state, Bf16Compression).average(bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective."""
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
