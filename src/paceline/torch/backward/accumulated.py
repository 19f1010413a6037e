"""Gradients that no_sync() has left behind, before the next backward adds to them.

Autograd may give two parameters one memory as their gradients (behind `stack`, `cat` or an addition).
Nobody notices after one backward; the next one adds to that memory once for each of them, so that both become
wrong. The same goes for a parameter and an input of the model, or whatever else gets a gradient. A
synchronised backward gives such gradients memory of their own at its end; here those are parted that it has
not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.torch.model.inner_tensors import extent


def part_accumulated(
    parameters: Sequence[torch.Tensor], indices: Iterable[int], shared: Iterable[int]
) -> None:
    """Give gradients that share memory, with each other or with another tensor, a copy each.

    Those that are sparse or part of a graph (create_graph=True) stay as they are.
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
    """Which of these pieces of memory overlap with any other. In a backward the core finds them."""
    found: set[int] = set()
    furthest, holder = 0, -1  # the end of the one that reaches furthest so far
    for begin, length, index in sorted(extents):
        if length and begin < furthest:
            found |= {index, holder}
        if begin + length > furthest:
            furthest, holder = begin + length, index
    return found
