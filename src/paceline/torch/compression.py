"""Communication hooks that send gradients in 16 or 8 bits per value, with error feedback.

    model.register_comm_hook(EightBitCompression(), eight_bit_hook)

The algorithms are in `reducer/compression.py`; this file has torch's tensors, futures and process groups.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.reducer.compression import (
    Bf16Compression,
    Bytes,
    Compression,
    EightBitCompression,
    Fp16Compression,
    check_bucket,
    check_state,
)
from paceline.torch.communicator.comm_hook import GradBucket
from paceline.torch.communicator.flat_buckets import as_real

__all__ = [
    "Bf16Compression",
    "Compression",
    "EightBitCompression",
    "Fp16Compression",
    "bf16_hook",
    "eight_bit_hook",
    "fp16_hook",
]


def fp16_hook(state: Fp16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in float16 codes. Collective.

    Example:
        >>> model.register_comm_hook(Fp16Compression(), fp16_hook)

        Rank 0 has the gradient 1 + 2**-12 and rank 1 has 1: the mean is 1 in the first step. Rank 0 keeps
        2**-12 and adds it to its next gradient: after four such steps the means sum to 4 + 2**-11.

    Raises:
        ConfigTypeError: The state is not of this class.
    """
    return _average(check_state(state, Fp16Compression), bucket)


def bf16_hook(state: Bf16Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in bfloat16 codes, as `fp16_hook` does in float16. Collective."""
    return _average(check_state(state, Bf16Compression), bucket)


def eight_bit_hook(state: EightBitCompression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket in codes of 8 bits, as `fp16_hook` does in float16. Collective."""
    return _average(check_state(state, EightBitCompression), bucket)


def _average(state: Compression, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The future of the mean of a bucket's gradients over all ranks. Collective; does not block."""
    values, codes = _values_of(bucket, type(state).__name__), state.codes(torch.from_numpy)
    group, parameters = bucket.process_group(), bucket.parameters()
    all_rows = codes.rows(values.numel(), 1 + dist.get_world_size(group))
    sizes = [2 * p.numel() if p.is_complex() else p.numel() for p in parameters]
    adopt = codes.encode(bucket.index(), parameters, sizes, values.data_ptr(), bucket.weight(), all_rows[0])
    bucket.when_good(adopt)
    own, *others = torch.from_numpy(all_rows)
    work = dist.all_gather(others, own, group=group, async_op=True)

    def decode(gathered: torch.futures.Future[Any]) -> torch.Tensor:
        gathered.value()  # raises if it failed
        rows: list[Bytes] = list(all_rows[1:])
        codes.decode_mean(rows, values.numel(), values.data_ptr())
        codes.recycle(all_rows)
        return values

    return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(decode))


def _values_of(bucket: Any, name: str) -> torch.Tensor:
    """The bucket's values in float32; its own memory if it is float32."""
    check_bucket(bucket, GradBucket, user=name, owner="paceline.torch.DistributedDataParallel")
    flat = as_real(bucket.buffer())
    if flat.device.type != "cpu" or not flat.is_floating_point():
        raise ConfigError(
            f"{name} compresses floating gradients in the host's memory.",
            got=f"{flat.dtype} on {flat.device}",
            hint="torch's hooks work on a GPU: torch.distributed.algorithms.ddp_comm_hooks",
        )
    return flat.reshape(-1).float()
