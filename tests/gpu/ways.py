"""The variants of training that benches of steps compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.torch import DistributedDataParallel

ALONE, INCUMBENT = "alone", "torch"


def all_the_way(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Paceline's wrapper; a single rank does all that several do, instead of leaving the averaging out."""
    wrapped = DistributedDataParallel(module, **options)
    buffers = wrapped._sync_to_weigh().buffers
    if buffers.is_alone:
        buffers.is_alone = False
        buffers.watch()
    return wrapped


def _torchs(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: TorchDDP(module, **options)


def _ours(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: all_the_way(module, reduce_through="group", **options)


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    ALONE: lambda module: module,
    INCUMBENT: _torchs(),
    "torch_view": _torchs(gradient_as_bucket_view=True),
    "torch_batched": _torchs(batched_grad_copy=True),
    "paceline": _ours(),
    "paceline_view": _ours(gradient_as_bucket_view=True),
}
LABELS = {
    ALONE: "alone, no DDP",
    INCUMBENT: "torch DDP",
    "torch_view": "torch DDP, bucket view",
    "torch_batched": "torch DDP, batched copies",
    "paceline": "Paceline",
    "paceline_view": "Paceline, bucket view",
}
"""Their names in reports."""
BATCHED = "torch_batched"
"""A variant that only newer versions of torch have. Paceline always copies like this."""


def here() -> list[str]:
    """The variants that this torch has."""
    has_it = "batched_grad_copy" in inspect.signature(TorchDDP.__init__).parameters
    return [key for key in WAYS if has_it or key != BATCHED]
