"""The number of tensors in a storage, read from torch's internals, compared with torch's own count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline._core import CountedStorageUses, HandedGradients
from paceline.torch.backward.storage_uses import _describe, uses_of_storages

pytestmark = pytest.mark.skipif(uses_of_storages() is None, reason="this torch does not say")


def both_counts() -> list[CountedStorageUses]:
    return [uses_of_storages(), CountedStorageUses([torch.empty(1)], _describe)]


def test_the_count_is_read_where_torch_keeps_it() -> None:
    direct, counted = both_counts()
    assert direct.is_direct and not counted.is_direct


@pytest.mark.parametrize("number", [0, 1])
def test_each_tensor_in_a_storage_counts(number: int) -> None:
    uses = both_counts()[number]
    tensor, other = torch.zeros(3, 4), torch.zeros(2)
    views = [tensor.t(), tensor[1:], tensor.detach()]
    storage, count = uses.of(tensor)
    assert count == 4 and storage == tensor.untyped_storage()._cdata
    assert [uses.of(view) for view in views] == 3 * [(storage, 4)]
    del views[0]
    assert uses.of(tensor) == (storage, 3)
    assert uses.of(other)[1] == 1
    assert uses.of(torch.zeros(2).to_sparse()) == (0, 0)
    assert uses.of(nn.Parameter(tensor)) == (0, 0)  # of another class than a gradient


def test_gradients_whose_memory_others_hold() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(5)]
    memory = torch.ones(4)
    handed = HandedGradients()
    handed.watch(parameters, "grad", "_version", uses_of_storages(), [0, 1, 2, 3])
    parameters[2].grad = kept = memory[:2]
    handed.begin()
    halves = torch.ones(4)
    parameters[0].grad, parameters[1].grad = halves[:2].detach(), halves[2:].detach()
    parameters[3].grad, parameters[4].grad = memory[2:], memory[:2].detach()
    for index, parameter in enumerate(parameters):
        handed[index] = parameter.grad
    assert kept is parameters[2].grad
    assert handed.look() == ([], [0, 1, 3])  # 2 was in this memory before, 4 is not looked at
    assert handed.shared_among([1, 2]) == [1]
    del halves
    assert handed.look() == ([], [3])  # the two share their memory with no other tensor
    assert handed.shared_among([0, 1]) == []
