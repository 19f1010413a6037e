"""Buffers that are averaged, broadcast or left alone after each pass, or on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.reducer.buffer_policy import BufferPolicies
from paceline.reducer.link import Link
from paceline.torch.buffer_hook import BufferHook
from paceline.torch.parameters import ManagedTensors


class BufferSync:
    """Keeps the buffers of one model in step.

    Args:
        tensors: The model's.
        link: Between the ranks that train it.
        patterns: Policies by name pattern, as those of file names; the first match counts.
        broadcasts: Whether buffers that no pattern matches are broadcast after each pass.

    Attributes:
        hook: Does it instead, where a user has registered one.
    """

    def __init__(
        self,
        tensors: ManagedTensors,
        link: Link[torch.Tensor],
        patterns: Mapping[str, str],
        broadcasts: bool,
    ) -> None:
        self.hook: BufferHook | None = None
        self._tensors = tensors
        self._link = link
        self._patterns = patterns
        self._broadcasts = broadcasts
        self._take_names()

    def _take_names(self) -> None:
        self._buffers = self._tensors.buffers
        self._policies_then = BufferPolicies(self._buffers, self._patterns, self._broadcasts)

    @property
    def _policies(self) -> BufferPolicies:
        if self._tensors.buffers is not self._buffers:  # the model has changed
            self._take_names()
        return self._policies_then

    @property
    def is_needed(self) -> bool:
        """Whether any buffer changes after a pass."""
        is_known = self._tensors.buffers is self._buffers
        return (self._policies_then if is_known else self._policies).is_needed

    @property
    def in_step(self) -> set[str]:
        """Names of those that are the same on all ranks after a pass; of a user's hook nobody knows."""
        return set() if self.hook is not None else self._policies.in_step

    def sync(self, active: Sequence[int], *, on_demand: bool) -> None:
        """Bring the buffers in step. Collective.

        Args:
            active: Ranks whose values count; the first is the one that broadcasts.
            on_demand: Include buffers that are left alone after a pass, but for those that a pattern says
                to leave alone.
        """
        now = self._tensors.current_buffers()
        chosen = self._policies.broadcast(on_demand=on_demand)
        copied = [buffer for name, buffer in now.items() if name in chosen]
        averaged = [buffer for name, buffer in now.items() if name in self._policies.averaged]
        # Counters and other integers have no mean.
        copied += [buffer for buffer in averaged if not buffer.is_floating_point()]
        self._link.broadcast(copied, root=active[0])
        self._average([buffer for buffer in averaged if buffer.is_floating_point()], active)

    def _average(self, buffers: Sequence[torch.Tensor], active: Sequence[int]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in buffers:
            wide = torch.float64 if buffer.dtype is torch.float64 else torch.float32
            kinds.setdefault((buffer.device, wide), []).append(buffer)
        with torch.no_grad():
            for (_, dtype), group in kinds.items():
                flat = torch.cat([buffer.detach().to(dtype).flatten() for buffer in group])
                if self._link.rank not in active:
                    flat.zero_()
                self._link.sum(flat)
                flat /= len(active)
                means = torch.split(flat, [buffer.numel() for buffer in group])
                for buffer, mean in zip(group, means):
                    buffer.copy_(mean.view(buffer.shape))
