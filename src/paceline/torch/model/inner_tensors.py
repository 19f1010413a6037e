"""The plain tensors that hold the values of a parameter or buffer: the tensor itself, or tensors within it.

A quantised weight, a jagged or a sparse tensor has no memory of its own: it consists of plain tensors. Code
that copies, compares or hashes values by address uses these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import ConfigError

Named = list[tuple[str, torch.Tensor]]

PLAIN_CLASSES = frozenset({torch.Tensor, nn.Parameter})
"""Classes whose objects usually have memory of their own."""

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_LEAVE = (
    "name it in module._ddp_params_and_buffers_to_ignore, on every rank, if the ranks need not have the same "
    "values; or keep it outside of the module"
)


def is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in PLAIN_CLASSES and callable(getattr(type(tensor), "__tensor_flatten__", None))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has memory of its own, with a separate place for each element."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and (tensor.data_ptr() != 0 or not tensor.numel())
        and (tensor.is_contiguous() or is_disjoint(tensor))
    )


def plain_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The plain tensors that hold the values of these tensors; the same sequence, if all are plain."""
    # The usual case first: every backward of a model with buffers runs this.
    if all(
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.is_contiguous()
        for tensor in tensors
    ):
        return tensors
    return [part for tensor in tensors for _, part in inner_tensors("a tensor", tensor) if part.numel()]


def inner_tensors(name: str, tensor: torch.Tensor) -> Named:
    """The plain tensors that hold the values of a tensor, with names; the tensor itself if it is plain.

    An inner tensor has a version counter of its own, not that of the outer tensor.

    Example:
        >>> [name for name, _ in inner_tensors("mask", torch.eye(3).to_sparse())]
        ['mask.indices', 'mask.values']
    """
    if is_plain(tensor):
        return [(name, tensor)]
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        held = {each: getattr(tensor, each) for each in names}
        inner = {each: value for each, value in held.items() if isinstance(value, torch.Tensor)}
    elif tensor.is_meta:
        return [(name, tensor)]
    elif tensor.layout is torch.sparse_coo:
        inner = {"indices": tensor._indices(), "values": tensor._values()}
    elif tensor.layout in _COMPRESSED:
        inner = {each: getattr(tensor, each)() for each in _COMPRESSED[tensor.layout]}
    elif tensor.layout is not torch.strided:
        raise _no_memory(name, tensor, f"its layout is {tensor.layout}")
    elif tensor.data_ptr() == 0 and tensor.numel():
        raise _no_memory(
            name, tensor, "it has no memory, and its class does not say of which tensors it consists"
        )
    elif tensor.is_nested:
        if not tensor.is_contiguous():
            raise _no_memory(name, tensor, "it is a nested tensor with gaps between its elements")
        return [(name, tensor.data.values())]
    elif tensor.is_quantized and not is_dense(tensor):
        raise _no_memory(name, tensor, "it is quantised, with gaps between its elements")
    elif tensor.is_quantized:
        inner = _of_quantised(tensor)
    else:
        return [(name, _each_place_once(name, tensor))]
    return [
        (part_name, part.data)
        for each, value in inner.items()
        for part_name, part in inner_tensors(f"{name}.{each}", value)
    ]


def form(tensor: torch.Tensor) -> str:
    """Properties of a tensor that must be the same on all ranks, besides its inner tensors."""
    if type(tensor) in PLAIN_CLASSES and tensor.layout is torch.strided and not tensor.is_quantized:
        if tensor.is_nested:
            return f"nested, of sizes {tensor._nested_tensor_size().tolist()}"
        return ""
    if is_wrapper(tensor):
        return type(tensor).__name__
    if tensor.is_quantized and tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.dtype} of scale {tensor.q_scale()}, zero point {tensor.q_zero_point()}"
    return f"{type(tensor).__name__}, {tensor.layout}".removeprefix("Tensor, ").removeprefix("Parameter, ")


def has_no_mean(tensor: torch.Tensor) -> bool:
    """Whether the tensor cannot be averaged in place, element by element."""
    return is_wrapper(tensor) or tensor.layout is not torch.strided or tensor.is_nested


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the values in a new plain tensor of the same shape, without a graph."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def why_not_trained(parameter: torch.Tensor) -> str:
    if parameter.layout is torch.jagged or parameter.is_nested:
        return "it is a nested tensor"
    if parameter.layout is not torch.strided:
        return f"its layout is {parameter.layout}"
    if type(parameter) in PLAIN_CLASSES:
        return ""
    try:
        as_plain(parameter)
    except Exception as error:  # a class may raise any error for an operation that it does not support
        return (
            f"{type(parameter).__name__} can't be copied into a plain tensor: {type(error).__name__}: {error}"
        )
    return ""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a range of memory without overlap, in any order of dimensions."""
    if is_wrapper(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize


def is_disjoint(tensor: torch.Tensor) -> bool:
    """Whether no two elements share memory. May return False for some unusual strides that are disjoint."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride < end:
                return False
            end = stride * (size - 1) + end
    return True


def _of_quantised(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = torch.empty(0, dtype=torch.uint8)
    begin = tensor.storage_offset() * tensor.itemsize
    whole.set_(tensor.untyped_storage(), begin, (tensor.numel() * tensor.itemsize,), (1,))
    inner = {"int_repr": whole}
    if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        inner |= {"scales": tensor.q_per_channel_scales(), "zero_points": tensor.q_per_channel_zero_points()}
    return inner


def _each_place_once(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a class of torch's own on the same memory, in which no two elements share a place."""
    if type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor.data.as_subclass(torch.Tensor)
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if size > 1 and stride == 0:  # an expanded dimension repeats the same places
            tensor = tensor.narrow(dimension, 0, 1)
    if is_disjoint(tensor):
        return tensor
    reach = 1  # elements from the first place on, if there are no gaps
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride > reach:
                why = f"its elements share places, with gaps between them (strides {tensor.stride()})"
                raise _no_memory(name, tensor, why)
            reach += stride * (size - 1)
    return tensor.as_strided((reach,), (1,))


def _no_memory(name: str, tensor: torch.Tensor, why: str) -> ConfigError:
    subject = f"'{name}'" if name != "a tensor" else name
    return ConfigError(
        f"The values of {subject} can't be copied to other ranks, or compared with theirs: {why}.",
        expected="a tensor in memory, or one whose class has __tensor_flatten__",
        got=f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}",
        hint=_LEAVE,
    )
