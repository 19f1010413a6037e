"""A copy of a training state in memory that another process reads.

The memory is an anonymous file. It holds the tensors, each at a multiple of 64 bytes, then a JSON description
that refers to tensors by number. Nothing is pickled. The memory is reused, so only the first copy pays for
page faults.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.reducer.framework_ops import dtype_name, nbytes

_ALIGNMENT = 64


class Described(NamedTuple):
    """Where the description of a state begins in the memory, and its size."""

    at: int
    nbytes: int


class SharedMemory:
    """Memory that another process can map if it inherits the file descriptor.

    Attributes:
        fd: The file descriptor.
        nbytes: How many bytes are reserved.
    """

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("paceline-checkpoint")
        except (AttributeError, OSError):  # the kernel, or a filter of system calls, does not allow it
            with tempfile.TemporaryFile(buffering=0) as file:
                self.fd = os.dup(file.fileno())
        self.nbytes = 0
        self._mapped: mmap.mmap | None = None

    def reserve(self, count: int) -> mmap.mmap:
        """Map at least so many bytes."""
        if self._mapped is None or count > self.nbytes:
            count = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fallocate(self.fd, 0, count)  # raises OSError now instead of a SIGBUS later
            self._mapped, self.nbytes = mmap.mmap(self.fd, count), count
        return self._mapped

    def close(self) -> None:
        self._mapped = None
        os.close(self.fd)


def copy_state(state: Mapping[str, Any], memory: SharedMemory, ops: CheckpointOps) -> Described:
    """Copy a state of plain values into the memory; see `plain_values`.

    Raises:
        OSError: There is not enough memory.
    """
    tensors: list[Any] = []
    tree = _spelled(state, tensors, {}, ops)
    forms: list[Any] = []
    end = 0
    for tensor in tensors:
        forms.append([end, nbytes(tensor), dtype_name(tensor), list(tensor.shape), ops.strides(tensor)])
        end += -(-nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT
    description = json.dumps([tree, forms]).encode()
    mapped = memory.reserve(end + len(description))
    for tensor, form in zip(tensors, forms):
        ops.ops.copy(tensor, ops.over(mapped, *form))
    mapped[end : end + len(description)] = description
    return Described(end, len(description))


def read_state(fd: int, described: Described, ops: CheckpointOps) -> dict[str, Any]:
    """The state that was copied; its tensors lie in that memory."""
    mapped = mmap.mmap(fd, os.fstat(fd).st_size)
    tree, forms = json.loads(mapped[described.at : described.at + described.nbytes])
    kinds = {kind.__name__: kind for kind in ops.containers}
    state: dict[str, Any] = _built(tree, [ops.over(mapped, *form) for form in forms], kinds)
    return state


def _spelled(value: Any, tensors: list[Any], known: dict[Any, int], ops: CheckpointOps) -> Any:
    """A value as JSON: a list of its kind and its content. A tensor that occurs twice is copied once."""
    if isinstance(value, ops.ops.tensor):
        key = value.data_ptr(), str(value.dtype), tuple(value.shape), str(ops.strides(value))
        if key not in known or not nbytes(value):
            known[key] = len(tensors)
            tensors.append(value)
        return ["tensor", known[key]]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, dict):
        entries = [
            [_spelled(key, tensors, known, ops), _spelled(each, tensors, known, ops)]
            for key, each in value.items()
        ]
        return [type(value).__name__, entries]
    if isinstance(value, ops.containers):
        return [type(value).__name__, [_spelled(each, tensors, known, ops) for each in value]]
    return ["plain", value]


def _built(described: Sequence[Any], tensors: Sequence[Any], kinds: Mapping[str, Any]) -> Any:
    name, *held = described
    if name == "tensor":
        return tensors[held[0]]
    if name == "complex":
        return complex(*held)
    if name == "plain":
        return held[0]
    kind = kinds[name]
    if issubclass(kind, dict):
        return kind({_built(key, tensors, kinds): _built(each, tensors, kinds) for key, each in held[0]})
    return kind(_built(each, tensors, kinds) for each in held[0])
