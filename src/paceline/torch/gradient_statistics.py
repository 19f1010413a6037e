"""Methods of a wrapped model that need torch to tell what a pass found: clipping; and without a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.arguments import Arguments
from paceline.reducer.wrapped_model import WrappedModel, checked_norms
from paceline.torch.statistics import clip

if TYPE_CHECKING:
    from paceline.torch.parameters import ManagedTensors
    from paceline.torch.passes import GradientPasses


class GradientStatistics(WrappedModel):
    """Mixed into `DistributedDataParallel`."""

    _passes: GradientPasses | None
    _tensors: ManagedTensors

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm that they had.

        As `torch.nn.utils.clip_grad_norm_`, but for gradients that are as backward left them the norm is
        known already. After the first call; that one computes it. A kernel or numpy that changed a few
        elements of a gradient, and no others, may go unseen.

        Args:
            max_norm: The largest norm allowed.
            norm_type: Of the p-norm; others than 2 are computed.
            scaler: If gradients are still scaled by it: `max_norm` and the result are those of unscaled
                gradients. Leave it out after `scaler.unscale_()`.

        Example:
            Rank 0's gradient is 6 and rank 1's 10: the norm is 8, and after clip_grad_norm_(2) both hold 2.
        """
        if not (type(max_norm) is type(norm_type) is float and max_norm >= 0 and norm_type > 0):
            max_norm, norm_type = checked_norms(max_norm, norm_type)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            hint = "the GradScaler that scaled the loss, or None"
            raise Arguments("clip_grad_norm_").refuse("scaler", scaler, "a GradScaler", hint, is_type=True)
        is_known = self._passes is not None and norm_type == 2.0
        known = self._passes.known_norm() if is_known and self._passes is not None else None
        scale = 1.0 if scaler is None else scaler.get_scale()
        return clip(self._tensors.trainable, max_norm * scale, known, norm_type) / scale

    def _own_squared_norm(self) -> float:
        squares = [p.grad.double().square().sum() for p in self._tensors.trainable if p.grad is not None]
        return sum(float(square) for square in squares)

    def _own_nonfinite(self) -> tuple[str, ...]:
        parameters = zip(self._tensors.names, self._tensors.trainable)
        return tuple(n for n, p in parameters if p.grad is not None and not torch.isfinite(p.grad).all())
