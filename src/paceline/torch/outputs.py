"""The tensors in what a forward returned, whatever it is built of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
from torch.utils import _pytree as pytree


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists, dicts, dataclasses and what is registered with torch's pytree."""
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
