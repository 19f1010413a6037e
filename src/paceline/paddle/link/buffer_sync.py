"""The mean of buffers and running statistics over some ranks."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paceline.reducer.link import Link


def average_buffers(
    link: Link[paddle.Tensor], buffers: Sequence[paddle.Tensor], active: Sequence[int]
) -> None:
    """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective."""
    with paddle.no_grad():
        for buffer in buffers:
            dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
            wide = buffer.astype(dtype).contiguous() * float(link.rank in active)
            link.sum(wide)
            paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)
