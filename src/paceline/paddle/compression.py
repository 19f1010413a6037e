"""Communication hooks that send gradients in 16 or 8 bits per value, with error feedback.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

The algorithm is in `reducer/compression.py`; this file applies it to Paddle's tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paceline.errors import ConfigError
from paceline.paddle.communicator.comm_hook import Future, GradBucket
from paceline.reducer.compression import (
    Bf16Compression,
    Bytes,
    Compression,
    EightBitCompression,
    Fp16Compression,
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
    return _average(check_state(state, Fp16Compression), bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective."""
    return _average(check_state(state, Bf16Compression), bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> Future[paddle.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective."""
    return _average(check_state(state, EightBitCompression), bucket)


def _average(state: Compression, bucket: Any) -> Future[paddle.Tensor]:
    """The future of the mean of a bucket's gradients over all ranks. Collective."""
    values, codes = _values_of(bucket, type(state).__name__), state.codes(paddle.to_tensor)
    parameters, count = bucket.parameters(), int(values.size)
    rows = codes.rows(count, 1)
    sizes = [int(p.size) for p in parameters]
    adopt = codes.encode(bucket.index(), parameters, sizes, values.data_ptr(), bucket.weight(), rows[0])
    bucket.when_good(adopt)

    def decode(gathered: Future[paddle.Tensor]) -> paddle.Tensor:
        of_ranks: list[Bytes] = list(np.from_dlpack(gathered.value().detach()))
        codes.decode_mean(of_ranks, count, values.data_ptr())
        codes.recycle(rows)
        return values

    return bucket.all_gather(paddle.from_dlpack(rows[0])).then(decode)


def _values_of(bucket: Any, name: str) -> paddle.Tensor:
    check_bucket(bucket, GradBucket, user=name, owner="paceline.paddle.DataParallel")
    flat = bucket.buffer()
    if not flat.place.is_cpu_place():
        raise ConfigError(
            f"{name} compresses gradients in the host's memory.",
            got=f"{flat.dtype} on {flat.place}",
            hint="on a GPU, write a hook that calls bucket.all_reduce(bucket.buffer().astype('bfloat16'))",
        )
    return flat if flat.dtype == paddle.float32 else flat.astype("float32")
