"""Communication hooks that send gradients in 16 or 8 bits per value and keep what rounding took.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

How that is done is in `reducer/compression.py`; this file has torch's tensors, futures and process groups.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.reducer.compression import (
    BF16,
    EIGHT_BIT,
    FP16,
    Bytes,
    CompressionState,
    check_bucket,
    check_state,
)
from paceline.torch.link.comm_hook import GradBucket
from paceline.torch.link.transport import as_real

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

    def error_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The error-feedback residual: what has not been transmitted yet of a parameter's gradients.

        Returns:
            Float32, flat, complex numbers as pairs; it changes with each backward. None before the first
            backward, and without error feedback.
        """
        error = self._codes.error_of(parameter)
        return None if error is None else torch.from_numpy(error)

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The future of the mean of a bucket's gradients over all ranks. Collective; does not block.

        Raises:
            ConfigError: The gradients are not in the host's memory, or not floating.
            ConfigTypeError: It is no bucket of `paceline.torch.DistributedDataParallel`.
        """
        values = _values_of(bucket, type(self).__name__)
        group, parameters = bucket.process_group(), bucket.parameters()
        all_rows = self._codes.rows(values.numel(), 1 + dist.get_world_size(group))
        sizes = [2 * p.numel() if p.is_complex() else p.numel() for p in parameters]
        self._codes.encode(bucket.index(), parameters, sizes, values.data_ptr(), bucket.weight(), all_rows[0])
        own, *others = torch.from_numpy(all_rows)
        work = dist.all_gather(others, own, group=group, async_op=True)

        def decode(gathered: torch.futures.Future[Any]) -> torch.Tensor:
            gathered.value()  # raises if it failed
            rows: list[Bytes] = list(all_rows[1:])
            self._codes.decode_mean(rows, values.numel(), values.data_ptr())
            self._codes.recycle(all_rows)
            return values

        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(decode))


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


def fp16_hook(state: Fp16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in float16 codes. Collective.

    Example:
        >>> model.register_comm_hook(Fp16Compression(), fp16_hook)

        Rank 0 has the gradient 1 + 2**-12 and rank 1 has 1: the mean is 1 in the first step. Rank 0 has
        kept 2**-12 and adds it to its next gradient: after four such steps the means sum to 4 + 2**-11.

    Raises:
        ConfigTypeError: The state is of another kind.
    """
    return check_state(state, Fp16Compression).average(bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective."""
    return check_state(state, Bf16Compression).average(bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective."""
    return check_state(state, EightBitCompression).average(bucket)


def _values_of(bucket: Any, name: str) -> torch.Tensor:
    """A bucket's gradients in float32, flat: the bucket's own memory if it is float32."""
    check_bucket(bucket, GradBucket, user=name, owner="paceline.torch.DistributedDataParallel")
    flat = as_real(bucket.buffer())
    if flat.device.type != "cpu" or not flat.is_floating_point():
        raise ConfigError(
            f"{name} compresses floating gradients in the host's memory.",
            got=f"{flat.dtype} on {flat.device}",
            hint="torch's hooks work on a GPU: torch.distributed.algorithms.ddp_comm_hooks",
        )
    return flat.reshape(-1).float()
