"""Native mixed precision: forward in a smaller dtype, gradients and optimizer in the parameters' own dtype.

The module runs with cast copies in place of its parameters, and autograd records the casts. So gradients have
the parameters' own dtype, and parameters, state_dict and optimizer never have the smaller one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from paceline.reducer import mixed_precision
from paceline.torch.model.torch_compile import untraced_itself

Precision: TypeAlias = mixed_precision.Precision[torch.dtype]


def as_precision(given: Any) -> Precision:
    return mixed_precision.as_precision(
        "DistributedDataParallel",
        given,
        lambda dtype: dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None,
        expected="torch.nn.parallel.distributed._MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)",
        hint="_MixedPrecision(param_dtype=torch.bfloat16); or torch.autocast in the training loop",
    )


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    if dtype is None:
        return
    for name, buffer in module.named_buffers():
        if name not in ignored and buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


@untraced_itself
def run_in(dtype: torch.dtype, module: nn.Module, ignored: Collection[str], inputs: Any, kwargs: Any) -> Any:
    inputs, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (inputs, kwargs)
    )
    cast = {
        name: parameter.to(dtype)
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() and name not in ignored
    }
    return functional_call(module, cast, inputs, kwargs)
