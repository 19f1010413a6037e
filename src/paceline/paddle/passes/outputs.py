"""The tensors in what a forward returned, whatever it is built of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import numpy as np
import paddle

_PLAIN = (str, bytes, int, float, complex, np.ndarray, np.generic, type(None))


def tensors_in(output: object) -> Iterator[paddle.Tensor]:
    """All tensors in tuples, lists, mappings and dataclasses."""
    for leaf in _leaves(output):
        if isinstance(leaf, paddle.Tensor):
            yield leaf


def may_hide_tensors(output: object) -> bool:
    """Whether it holds an object that nobody here can look into."""
    return any(not isinstance(leaf, (paddle.Tensor, *_PLAIN)) for leaf in _leaves(output))


def _leaves(output: object) -> Iterator[object]:
    if isinstance(output, (list, tuple)):
        for item in output:
            yield from _leaves(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _leaves(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _leaves(getattr(output, field.name, None))
    else:
        yield output
