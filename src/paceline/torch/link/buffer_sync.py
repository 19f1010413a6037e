"""The mean of buffers over some ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.reducer.link import Link


def average_buffers(link: Link[torch.Tensor], buffers: Sequence[torch.Tensor], active: Sequence[int]) -> None:
    """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for buffer in buffers:
        wide = torch.float64 if buffer.dtype is torch.float64 else torch.float32
        kinds.setdefault((buffer.device, wide), []).append(buffer)
    with torch.no_grad():
        for (_, dtype), group in kinds.items():
            flat = torch.cat([buffer.detach().to(dtype).flatten() for buffer in group])
            if link.rank not in active:
                flat.zero_()
            link.sum(flat)
            flat /= len(active)
            means = torch.split(flat, [buffer.numel() for buffer in group])
            for buffer, mean in zip(group, means):
                buffer.copy_(mean.view(buffer.shape))
