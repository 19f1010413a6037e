"""Gives gradients from no_sync() memory of their own, before the next backward adds to them.

Autograd may give two parameters the same memory for their gradients (behind `stack`, `cat` or an addition).
After one backward this does no harm. The next backward adds to that memory once for each parameter, so that
both gradients become wrong. The same holds for a parameter and an input of the model, or any other tensor
that gets a gradient. A synchronised backward gives such gradients memory of their own at its end; this module
does it for gradients of other backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.torch.model.inner_tensors import extent


def separate_accumulated(
    parameters: Sequence[torch.Tensor], indices: Iterable[int], shared: Iterable[int]
) -> None:
    """Give gradients that share memory, with each other or with another tensor, a copy each.

    Gradients that are sparse, or part of a graph (create_graph=True), stay as they are.
    """
    gradients = {index: parameters[index].grad for index in indices}
    dense = {
        index: gradient
        for index, gradient in gradients.items()
        if gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad
    }
    places = ((each.data_ptr(), extent(each), index) for index, each in dense.items())
    found = overlapping(place for place in places if place[0])  # 0: it consists of other tensors
    for index in found.union(shared).intersection(dense):
        parameters[index].grad = dense[index].clone()


def overlapping(extents: Iterable[tuple[int, int, int]]) -> set[int]:
    """The indices of memory ranges that overlap another one. In a synchronised backward the core finds them.

    Args:
        extents: (begin, length, index) of each range.
    """
    found: set[int] = set()
    furthest, holder = 0, -1  # the largest end so far, and the index of that range
    for begin, length, index in sorted(extents):
        if length and begin < furthest:
            found |= {index, holder}
        if begin + length > furthest:
            furthest, holder = begin + length, index
    return found
