"""Native mixed precision: forward in a smaller dtype, gradients and optimizer in the parameters' own.

The one idea: the module runs with casts of its parameters in their place, made within autograd. So gradients
arrive in the parameters' own dtype, and parameters, state_dict and optimizer never see the smaller one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from paceline.arguments import show
from paceline.errors import ConfigTypeError
from paceline.torch.model.compiling import untraced_itself


@dataclass(frozen=True)
class Precision:
    """Dtypes of a forward and of what follows; None: those of the module.

    Attributes:
        param_dtype: The dtype of floating-point parameters and inputs within forward.
        reduce_dtype: In which gradients are averaged.
        buffer_dtype: The dtype of floating-point buffers.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def cast_buffers(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Give the module buffers of this precision, once and for all, as torch's DDP does."""
        if self.buffer_dtype is None:
            return
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(self.buffer_dtype)

    @untraced_itself
    def run(self, module: nn.Module, ignored: Collection[str], inputs: Any, kwargs: Any) -> Any:
        """Call the module with parameters and inputs of `param_dtype`, which is not None."""
        dtype = self.param_dtype
        inputs, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (inputs, kwargs)
        )
        cast = {
            name: parameter.to(dtype)
            for name, parameter in module.named_parameters()
            if parameter.is_floating_point() and name not in ignored
        }
        return functional_call(module, cast, inputs, kwargs)


def as_precision(given: Any) -> Precision:
    """From torch's `_MixedPrecision`, or anything with its three attributes; None: the module's own dtypes.

    Gradients are averaged in param_dtype where reduce_dtype is None, as in torch.

    Raises:
        ConfigTypeError: It has no such attributes, or they are no floating-point dtypes.
    """
    if given is None:
        return Precision()
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes: list[Any] = [getattr(given, name, "missing") for name in names]
    for name, dtype in zip(names, dtypes):
        if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            continue
        raise ConfigTypeError(
            "DistributedDataParallel: mixed_precision describes no precision.",
            expected="torch.nn.parallel.distributed._MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)",
            got=f"{show(given)}, {name} is {dtype}",
            hint="_MixedPrecision(param_dtype=torch.bfloat16); or torch.autocast in the training loop",
            argument="mixed_precision",
        )
    param_dtype, reduce_dtype, buffer_dtype = dtypes
    return Precision(param_dtype, reduce_dtype or param_dtype, buffer_dtype)
