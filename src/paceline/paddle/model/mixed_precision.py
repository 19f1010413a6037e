"""Mixed precision: a forward with casts of the parameters in the parameters' places.

The casts are part of autograd's graph, so gradients arrive in the parameters' own dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import paddle
from paddle import nn

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.model.parameters import DTYPES, ManagedTensors, dtype_name
from paceline.reducer import mixed_precision
from paceline.reducer.backward_errors import shorten

Precision: TypeAlias = mixed_precision.Precision[paddle.dtype]

COMPUTED = ("float32", "float64")
"""Dtypes for which Paddle 3.3 has all kernels of a model on the CPU."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a wrapped model, for the argument `mixed_precision`; like torch's `_MixedPrecision`.

    Each is a dtype of Paddle or its name; None: the dtype of the model.

    Attributes:
        param_dtype: The dtype of forward: parameters and inputs are cast to it. "float32" or "float64".
        reduce_dtype: The dtype in which gradients are averaged: "float16", "bfloat16", "float32" or
            "float64". None: param_dtype.
        buffer_dtype: The dtype to which floating-point buffers are converted permanently.

    Example:
        Rank 0's gradient is 1 and rank 1's is 1.0078125, in float32. They are averaged in bfloat16, with 8
        significant bits, and both ranks hold 1.0 in float32:

        >>> model = DataParallel(layer, mixed_precision=MixedPrecision(reduce_dtype="bfloat16"))
    """

    param_dtype: paddle.dtype | str | None = None
    reduce_dtype: paddle.dtype | str | None = None
    buffer_dtype: paddle.dtype | str | None = None


def as_precision(given: Any) -> Precision:
    hint = "MixedPrecision(reduce_dtype='bfloat16') of paceline.paddle"
    expected = "paceline.paddle.MixedPrecision(param_dtype, reduce_dtype, buffer_dtype)"
    found = mixed_precision.as_precision("DataParallel", given, _as_dtype, expected=expected, hint=hint)
    if found.param_dtype is not None and dtype_name(found.param_dtype) not in COMPUTED:
        name = dtype_name(found.param_dtype)
        raise ConfigError(
            f"DataParallel: mixed_precision asks for a forward in {name}.",
            expected=f"param_dtype {' or '.join(COMPUTED)}, or None",
            got=f"param_dtype={name}",
            likely=f"code for torch. Paddle 3.3 has no kernels on the CPU for {name}: none for matmul, "
            "conv2d, layer_norm, relu or softmax",
            hint=f"reduce_dtype='{name}' averages in it; on GPUs, paddle.amp.auto_cast(dtype='{name}')",
            argument="mixed_precision",
        )
    return found


def _as_dtype(given: object) -> paddle.dtype | None:
    name = dtype_name(given) if isinstance(given, paddle.dtype) else given
    return DTYPES.get(name) if isinstance(name, str) else None


def cast_buffers(tensors: ManagedTensors, chosen: Precision) -> None:
    """Convert the layer's buffers permanently, as torch's DDP does.

    Running statistics get param_dtype instead of buffer_dtype, because Paddle normalises with statistics in
    the dtype of the inputs.
    """
    for name, buffer in tensors.buffers.items():
        dtype = chosen.param_dtype if name in tensors.statistics else chosen.buffer_dtype
        if dtype is not None and buffer.is_floating_point():
            internals.convert(buffer, dtype)


def check_castable(tensors: ManagedTensors, chosen: Precision) -> None:
    """Refuse to cast parameters with sparse gradients, because a cast has dense gradients."""
    if chosen.param_dtype is not None and tensors.sparse:
        raise ConfigError(
            "DataParallel: mixed_precision cannot cast parameters with sparse gradients.",
            expected="param_dtype=None, or embeddings with sparse=False",
            got=f"param_dtype={dtype_name(chosen.param_dtype)}, and sparse: {shorten(list(tensors.sparse))}",
            hint="make the embedding with sparse=False; or leave param_dtype out",
            argument="mixed_precision",
        )


def run_in(dtype: paddle.dtype, tensors: ManagedTensors, layer: nn.Layer, inputs: Any, kwargs: Any) -> Any:
    """Call the layer with parameters and inputs of this dtype."""
    inputs, kwargs = paddle.utils.map_structure(lambda x: _cast_input(x, dtype), (list(inputs), kwargs))
    with _casts_in_place(dtype, tensors, layer):
        return layer(*inputs, **kwargs)


def _cast_input(value: Any, dtype: paddle.dtype) -> Any:
    is_cast = isinstance(value, paddle.Tensor) and value.is_floating_point()
    return value.cast(dtype) if is_cast else value


@contextlib.contextmanager
def _casts_in_place(dtype: paddle.dtype, tensors: ManagedTensors, layer: nn.Layer) -> Iterator[None]:
    own = {id(p): p for p in tensors.all_parameters.values() if p.is_floating_point() and p.dtype != dtype}
    casts: dict[int, paddle.Tensor] = {}  # one for each parameter, even if several layers share it
    replaced: list[tuple[dict[str, Any], str, paddle.Tensor]] = []
    try:
        for child in layer.sublayers(include_self=True):
            slots = internals.parameters_of(child)
            for name, parameter in slots.items():
                if id(parameter) in own:
                    if id(parameter) not in casts:
                        casts[id(parameter)] = parameter.cast(dtype)
                    replaced.append((slots, name, parameter))
        for slots, name, parameter in replaced:
            slots[name] = casts[id(parameter)]
        yield
    finally:
        for slots, name, parameter in replaced:
            slots[name] = parameter
