"""Gradients that no_sync() has left behind, before the next backward adds to them.

Autograd may give two parameters one memory as their gradients (behind `stack`, `cat` or an addition). Nobody
notices after one backward; the next one adds to that memory once for each of them, so that both become wrong.
A synchronised pass gives such gradients memory of their own at its end; here those are parted that it has not
seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.reducer.overlaps import overlapping
from paceline.torch.communicator.arena import extent


def part_accumulated(parameters: Sequence[torch.Tensor], indices: Iterable[int]) -> None:
    """Give gradients that share memory a copy each.

    Those that are sparse or part of a graph (create_graph=True) stay as they are.

    Args:
        parameters: The parameters of the model.
        indices: Those that have accumulated gradients.
    """
    gradients = {index: parameters[index].grad for index in indices}
    dense = {
        index: gradient
        for index, gradient in gradients.items()
        if gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad
    }
    places = ((each.data_ptr(), extent(each), index) for index, each in dense.items())
    for index in overlapping(place for place in places if place[0]):  # 0: it consists of other tensors
        parameters[index].grad = dense[index].clone()
