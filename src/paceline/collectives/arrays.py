"""Passes numpy arrays to the core: addresses, checks, and arrays in the region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import _core
from paceline.arguments import Arguments
from paceline.collectives.ops import DTYPE_NUMBERS, FLOATING_DTYPES, ReduceOp
from paceline.errors import ConfigError

Array = npt.NDArray[Any]

_NO_ROOM_BYTES = 1 << 63  # too much for any region, but a value that the core's size_t can hold


def require_array(array: object, what: str, name: str = "array") -> None:
    """Raises ConfigError unless the argument `name` of the call `what` is an array."""
    if not isinstance(array, np.ndarray):
        hint = "numpy.asarray(...) makes one of a list or a number, tensor.numpy() of a tensor"
        raise Arguments(what).refuse(name, array, "a numpy array", hint, is_type=True) from None


def address_of(array: Array, what: str, name: str = "array", *, is_written: bool = True) -> int:
    """Address of a C-contiguous array, the argument `name` of the call `what`."""
    if type(array) is not np.ndarray:
        require_array(array, what, name)
    flags = array.flags
    if not flags.c_contiguous:
        raise ConfigError(
            f"{what} needs a C-contiguous array as {name}.",
            expected="elements one after the other, the last axis first",
            got=f"shape {array.shape}, strides {array.strides}",
            hint=f"np.ascontiguousarray({name}) makes a copy that is",
            argument=name,
        )
    if is_written and not flags.writeable:
        raise ConfigError(
            f"{what} writes into {name}, but it is read-only.",
            expected="an array that may be written to",
            got=f"read-only, shape {array.shape}, {array.dtype}",
            hint=f"pass a copy: {name}.copy()",
            argument=name,
        )
    if array.dtype.hasobject:
        raise _no_numbers(array, what, name)
    address: int = array.__array_interface__["data"][0]
    return address


def dtype_number(array: Array, op: ReduceOp, what: str) -> int:
    """The core's number for the array's type."""
    name = array.dtype.name
    number = DTYPE_NUMBERS.get(name)
    if number is None or not array.dtype.isnative:
        raise ConfigError(
            f"{what} can't reduce an array of this type.",
            expected=", ".join(DTYPE_NUMBERS),
            got=f"{array.dtype}, {array.dtype.str}" if number is None else f"{name} in foreign byte order",
            hint="array.astype(numpy.float32) makes a copy of another type",
            argument="array",
        )
    if op is ReduceOp.MEAN and name not in FLOATING_DTYPES:
        raise ConfigError(
            f"{what}: op='mean' needs an array of a floating type.",
            expected=", ".join(sorted(FLOATING_DTYPES)),
            got=name,
            argument="op",
            hint='use "sum", or array.astype(np.float32)',
        )
    return number


def _no_numbers(array: Array, what: str, name: str) -> ConfigError:
    return ConfigError(
        f"{what} can't send Python's objects, which {name} holds: another process has no use for addresses.",
        expected="numbers",
        got=f"{array.dtype}, shape {array.shape}",
        hint="numpy.asarray(..., dtype=float) where they are numbers; rows of one length",
        argument=name,
    )


def check_blocks(array: Array, world_size: int, what: str) -> None:
    """Raises ConfigError unless the first axis has one block per rank."""
    require_array(array, what)
    if array.ndim == 0 or array.shape[0] != world_size:
        raise ConfigError(
            f"{what}: the first axis of array must have one block per rank.",
            expected=f"shape ({world_size}, ...)",
            got=f"shape {array.shape}",
            hint=f"array.reshape({world_size}, -1) cuts it into blocks",
            argument="array",
        )


def take_or_make(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Array:
    """Return `out`, or a new array if it is None. Raises ConfigError if `out` does not fit."""
    if out is None:
        return np.empty(shape, dtype)
    require_array(out, what, "out")
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(
            f"{what}: out does not fit.",
            expected=f"shape {shape}, {dtype}",
            got=f"shape {out.shape}, {out.dtype}",
            hint="leave out out, for a new array",
            argument="out",
        )
    return out


def checked_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    check = Arguments("allocate")
    expected, hint = "a whole number, 0 or more, or several in a tuple", "for example shape=(2, 3)"
    try:
        is_one = hasattr(shape, "__index__") and np.ndim(shape) == 0
        sizes: Sequence[Any] = (shape,) if is_one else tuple(shape)  # type: ignore[arg-type]
        return tuple(check.whole("shape", size, least=0) for size in sizes)
    except (TypeError, ValueError) as error:  # also the ConfigError above, which shows only one size
        is_type = isinstance(error, TypeError)
        raise check.refuse("shape", shape, expected, hint, is_type=is_type) from None


def checked_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.hasobject or kind.itemsize == 0:
        hint = "a type of numbers, as dtype=numpy.float32"
        raise Arguments("allocate").refuse("dtype", dtype, "a type without Python's objects", hint)
    return kind


class _Block:
    """A block of this rank's memory in the region. It is freed when the last array on it is gone."""

    def __init__(
        self, core: _core.HostGroup, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._core = core
        self._offset = offset
        self.__array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (core.pointer(offset, core.rank), False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._core.free(self._offset)


def allocate(core: _core.HostGroup, shape: tuple[int, ...], dtype: np.dtype[Any], timeout_s: float) -> Array:
    """A zeroed array in the region, at the same place on every rank. Collective."""
    nbytes = math.prod(shape) * dtype.itemsize
    block = _Block(
        core,
        core.allocate(min(nbytes, _NO_ROOM_BYTES), timeout_s),
        shape,
        np.dtype(np.uint8) if dtype.kind == "V" else dtype,
    )
    if dtype.kind == "V":  # an extension type (such as ml_dtypes' bfloat16) has no typestr of its own
        block.__array_interface__["shape"] = (nbytes,)
        return np.asarray(block).view(dtype).reshape(shape)
    return np.asarray(block)
