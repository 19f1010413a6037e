"""The ways to train that benches compare: who averages the gradients, and who makes the optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def wrap(wrapper: str, module: nn.Module, **options: Any) -> nn.Module:
    """The module, or its wrapper.

    Args:
        wrapper: `none`, `torch` for torch's DistributedDataParallel, or `paceline` for Paceline's.
        module: What is to be trained.
        options: Further arguments of the wrapper.
    """
    if wrapper == "none":
        return module
    if wrapper == "torch":
        return TorchDDP(module, **options)
    from paceline.torch.ddp.distributed import DistributedDataParallel

    return DistributedDataParallel(module, **options)


def make_optimizer(
    way: str, parameters: Iterable[torch.Tensor], kind: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """An optimizer of which each rank makes the whole step, or a part of it.

    Args:
        way: `whole`; `zero` for torch's ZeroRedundancyOptimizer; or `paceline` for Paceline's
            ShardedOptimizer.
        parameters: What it is to update.
        kind: Its class.
        options: Further arguments.
    """
    if way == "whole":
        return kind(parameters, **options)
    if way == "zero":
        with warnings.catch_warnings():  # of torch about itself
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(parameters, kind, **options)
    from paceline.torch.one_model.sharded_optimizer import ShardedOptimizer

    return ShardedOptimizer(parameters, kind, **options)
