"""Warns if all ranks train on the same samples, because each loader reads the whole data without a sampler.

In the first backward passes each rank reports a digest of its model's inputs. If all ranks had equal inputs,
and these changed from one backward to the next in several backward passes, a warning says so. Inputs that
never change are ignored, and so are inputs that a seed may have made: if a program draws random numbers
between a backward and the next forward, it reports nothing.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.errors import warn
from paceline.reducer.framework_ops import FrameworkOps, nbytes, numel
from paceline.reducer.reducer_interface import BackwardStatus

_BATCHES = 3
_MOST_BACKWARDS = 12
_DEPTH = 4  # of nested containers in the arguments
_MOST_TENSORS = 8
_ELEMENTS = 1024  # per tensor, approximately
_LEAST_ELEMENTS = 8  # fewer may be equal by chance


class SameInputs:
    """Compares the inputs of all ranks in the first backward passes of a model.

    Args:
        ops: The framework's operations.
    """

    def __init__(self, ops: FrameworkOps[Any]) -> None:
        self._ops = ops
        self._digest: int | None = None  # of the inputs of the first forward since the last backward
        self._same: set[int] = set()
        self._left = _MOST_BACKWARDS
        self._drawn = self._random_state()

    def begin_forward(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Digest the inputs of the first forward since the last backward; later ones are ignored."""
        if self._digest is None:
            state = self._random_state()
            is_drawn = state is None or state != self._drawn
            self._digest = 0 if is_drawn else digest_of(self._ops, inputs, kwargs)

    def report(self) -> int:
        """The digest that this rank reports at the end of the backward; 0: none."""
        return self._digest or 0

    def end_backward(self, statuses: Sequence[BackwardStatus]) -> bool:
        """Compare the digests of all ranks, and warn. Returns False if there is nothing more to compare.

        Args:
            statuses: By rank; empty: no rank has reported a digest.
        """
        self._digest = None
        self._drawn = self._random_state()
        self._left -= 1
        reported = {status.inputs for status in statuses}
        if reported and 0 not in reported:
            if len(reported) > 1:
                return False
            self._same |= reported
            if len(self._same) == _BATCHES:
                self._warn(len(statuses))
                return False
        return self._left > 0

    def _warn(self, world_size: int) -> None:
        warn(
            f"All {world_size} ranks train on the same samples: in {_BATCHES} batches, what the model was "
            f"called with was the same on every rank.\n"
            "  likely   the loader of each rank reads all of the data, because it has no sampler\n"
            f"  hint     {self._ops.names.sampling}; nothing is wrong if it is meant to be so\n"
            "  (reported once)"
        )

    def _random_state(self) -> object:
        """A value that changes when the program draws random numbers; None if the framework has none."""
        state = self._ops.random_state()
        if state is None:
            return None
        _, words, place, *_ = np.random.get_state()
        return state, random.getstate()[1][-1], place, zlib.crc32(np.asarray(words).tobytes())


def digest_of(ops: FrameworkOps[Any], inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A digest of some elements of each tensor among the inputs; 0 if they are too few or all equal.

    Example:
        model(images, mask=None) digests about 1024 of the pixels. model(torch.ones(8, 8)) gives 0.
    """
    digest, elements = 0, 0
    for count, tensor in enumerate(_tensors_in((*inputs, *kwargs.values()), ops.tensor, _DEPTH)):
        if count == _MOST_TENSORS:
            break
        data = _some_bytes(ops, tensor)
        size = tensor.element_size() if data else 1
        if data != data[:size] * (len(data) // size):  # a tensor of equal elements is ignored
            digest, elements = zlib.crc32(data, digest), elements + len(data) // size
    return digest % (1 << BackwardStatus.DIGEST_BITS) if elements >= _LEAST_ELEMENTS else 0


def _tensors_in(values: Iterable[Any], kind: type[Any], depth: int) -> Iterator[Any]:
    for value in values:
        if isinstance(value, kind):
            yield value
        elif depth and isinstance(value, (tuple, list, Mapping)):
            inner = value.values() if isinstance(value, Mapping) else value
            yield from _tensors_in(inner, kind, depth - 1)


def _some_bytes(ops: FrameworkOps[Any], tensor: Any) -> bytes:
    """Elements from all over a tensor, on the host; empty if they cannot be read."""
    if not numel(tensor) or not ops.has_values(tensor):
        return b""
    step = max(1, round((numel(tensor) / _ELEMENTS) ** (1 / max(1, sum(size > 1 for size in tensor.shape)))))
    picked = ops.data(tensor)
    if step > 1:
        picked = picked[tuple(slice(None, None, min(step, size)) for size in tensor.shape)]
    held = ops.on_host(picked)
    return ctypes.string_at(held.data_ptr(), nbytes(held))
