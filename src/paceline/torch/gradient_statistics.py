"""Methods of a wrapped model that tell what a pass found: the norm, and whose gradients were not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.errors import ConfigError
from paceline.torch.statistics import clip

if TYPE_CHECKING:
    from paceline.torch.config import DDPConfig
    from paceline.torch.parameters import ManagedTensors
    from paceline.torch.passes import GradientPasses


class GradientStatistics:
    """Mixed into `DistributedDataParallel`."""

    if TYPE_CHECKING:
        _passes: GradientPasses | None
        _tensors: ManagedTensors
        _config: DDPConfig

    def grad_norm(self) -> float:
        """The 2-norm of the last backward's mean gradient, over all parameters; the same on every rank.

        Costs nothing where gradients are averaged in shared memory. Call it before changing .grad.
        """
        if self._passes is not None:
            return math.sqrt(self._passes.squared_norm())
        squares = [p.grad.double().square().sum() for p in self._tensors.trainable if p.grad is not None]
        return math.sqrt(sum(float(square) for square in squares))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm that they had.

        As `torch.nn.utils.clip_grad_norm_`, but for gradients that are as backward left them the norm is
        known already. After the first call; that one computes it.

        Args:
            max_norm: The largest norm allowed.
            norm_type: Of the p-norm; others than 2 are computed.
            scaler: If gradients are still scaled by it: `max_norm` and the result are those of unscaled
                gradients. Leave it out after `scaler.unscale_()`.

        Example:
            Rank 0's gradient is 6 and rank 1's 10: the norm is 8, and after clip_grad_norm_(2) both hold 2.
        """
        is_known = self._passes is not None and norm_type == 2.0
        known = self._passes.known_norm() if is_known and self._passes is not None else None
        scale = 1.0 if scaler is None else scaler.get_scale()
        return clip(self._tensors.trainable, max_norm * scale, known, norm_type) / scale

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Whose gradients held an infinity or a NaN in the last pass: {rank: (parameter names)}.

        The same on every rank, and found without looking at gradients again. Empty: all were finite.

        Raises:
            ConfigError: Nobody has looked, because of nonfinite="ignore" over a process group.

        Example:
            After a NaN in the batch of rank 1: {1: ("head.weight", "head.bias")}.
        """
        if self._passes is None:
            parameters = zip(self._tensors.names, self._tensors.trainable)
            names = [n for n, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all()]
            return {0: tuple(names)} if names else {}
        if self._config.nonfinite == "ignore" and self._passes.path == "group":
            raise ConfigError(
                'DistributedDataParallel: with nonfinite="ignore" a process group looks for none.',
                hint='pass nonfinite="warn" or "raise"',
            )
        return self._passes.nonfinite()
