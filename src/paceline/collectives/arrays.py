"""numpy arrays and the core: addresses, checks, and arrays that live in the region."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import _core
from paceline.collectives.ops import DTYPE_NUMBERS, FLOATING_DTYPES, ReduceOp
from paceline.errors import ConfigError

Array = npt.NDArray[Any]

_NO_ROOM_BYTES = 1 << 63  # what no region has room for, and the core's size_t can hold


def address_of(array: Array, what: str, *, is_written: bool = True) -> int:
    """Address of a C-contiguous array.

    Raises:
        ConfigError: It is no array, not contiguous, or read-only although it is written to.
    """
    if type(array) is not np.ndarray and not isinstance(array, np.ndarray):
        raise ConfigError(f"{what} needs a numpy array.", got=type(array).__name__)
    flags = array.flags
    if not flags.c_contiguous:
        raise ConfigError(
            f"{what} needs a C-contiguous array.",
            got=f"shape {array.shape}, strides {array.strides}",
            hint="np.ascontiguousarray(array) makes a copy that is",
        )
    if is_written and not flags.writeable:
        raise ConfigError(
            f"{what} writes into the array, but it is read-only.", hint="pass a copy: array.copy()"
        )
    address: int = array.__array_interface__["data"][0]
    return address


def dtype_number(array: Array, op: ReduceOp, what: str) -> int:
    """The core's number of the array's type.

    Raises:
        ConfigError: The core can't reduce this type, or not with this reduction.
    """
    name = array.dtype.name
    number = DTYPE_NUMBERS.get(name)
    if number is None or not array.dtype.isnative:
        raise ConfigError(
            f"{what} can't reduce arrays of this type.",
            expected=", ".join(DTYPE_NUMBERS),
            got=array.dtype.str if number is None else f"{name} in foreign byte order",
        )
    if op is ReduceOp.MEAN and name not in FLOATING_DTYPES:
        raise ConfigError(
            f"{what}: the mean needs a floating type.",
            got=name,
            hint='use "sum", or array.astype(np.float32)',
        )
    return number


def check_blocks(array: Array, world_size: int, what: str) -> None:
    """Raises ConfigError unless the first axis has one block per rank."""
    if array.ndim == 0 or array.shape[0] != world_size:
        raise ConfigError(
            f"{what}: the first axis must have one block per rank.",
            expected=f"shape ({world_size}, ...)",
            got=f"shape {array.shape}",
        )


def take_or_make(out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Array:
    """`out`, or a new array where it is None. Raises ConfigError when it does not fit."""
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype:
        raise ConfigError(
            f"{what}: `out` does not fit.",
            expected=f"shape {shape}, {dtype}",
            got=f"shape {out.shape}, {out.dtype}",
        )
    return out


class _Block:
    """A piece of this rank's share of the region; gives it back when the last array on it is gone."""

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
    if dtype.hasobject:
        raise ConfigError("allocate can't hold Python objects.", got=str(dtype))
    nbytes = math.prod(shape) * dtype.itemsize
    block = _Block(
        core,
        core.allocate(min(nbytes, _NO_ROOM_BYTES), timeout_s),
        shape,
        np.dtype(np.uint8) if dtype.kind == "V" else dtype,
    )
    if dtype.kind == "V":  # an extension type (ml_dtypes' bfloat16) has no typestr of its own
        block.__array_interface__["shape"] = (nbytes,)
        return np.asarray(block).view(dtype).reshape(shape)
    return np.asarray(block)
