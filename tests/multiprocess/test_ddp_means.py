"""DistributedDataParallel's gradients, compared with one process with the whole batch and with torch's."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks, run_ranks
from tests.multiprocess.ddp_models import bits, gradients, mixed, share, train, two_layers

PATHS = ["group", "memory"]
WORLD = 2


# torch's DDP imports torch's compiler, which takes up to a minute on a busy machine.
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo", deadline_s=240)
def test_bits_equal_those_of_torch(rank: int, path: str) -> None:
    """Halving is exact, so with two ranks all bits must be equal."""
    x = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(rank))
    ours = DistributedDataParallel(mixed(), reduce_through=path, bucket_cap_mb=0.001)
    # torch before 2.13 has no such argument.
    is_chosen = "forward_sync_buffers" in inspect.signature(TorchDDP).parameters
    theirs = TorchDDP(mixed(), **({"forward_sync_buffers": True} if is_chosen else {}))
    for model in (ours, theirs):
        train(model, x)
    assert gradients(ours).keys() == gradients(theirs).keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, theirs.get_parameter(name).grad), name


def train_with_caps(rank: int, path: str) -> list[list[bytes]]:
    """Returns one rank's weights after training with each bucket size and layout, the first of them twice."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    found = []
    for cap, view in [(0.01, False), (1, False), (1, True), (25, False), (1000, False), (0.01, False)]:
        model = two_layers(9000)  # a little more than three blocks
        train(
            DistributedDataParallel(
                model, reduce_through=path, bucket_cap_mb=cap, gradient_as_bucket_view=view
            ),
            x,
        )
        found.append(bits(model))
    return found


def test_bits_do_not_depend_on_rank_or_bucket_size() -> None:
    for path in PATHS:
        results = run_ranks(train_with_caps, 3, {"path": path}, group="gloo")
        if path == "group":  # gloo's order of summation depends on the size of the array
            assert results[0] == results[1] == results[2]
        else:
            assert all(weights == results[0][0] for result in results for weights in result)


@kept_ranks(3)
def test_twenty_runs_give_the_same_bits(group: object) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(group.rank))
    seen = set()
    for _ in range(20):
        model = two_layers()
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.0001)
        train(ddp, x, steps=2)
        seen.add((*bits(model), ddp.grad_norm()))
    assert len(seen) == 1


class NegatedLazily(torch.autograd.Function):
    """The identity; its gradient has torch's negative bit, so the memory holds the negated values."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch._neg_view(-gradient)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(WORLD, group="gloo")
def test_a_gradient_that_one_rank_negates_lazily(rank: int, path: str, view: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            second = NegatedLazily.apply(self.second) if rank == 0 else self.second
            return (second * x).sum() + (self.first * x).sum()  # the gradient of `first` is ready first

    model = Model()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((3,), rank + 1.0)).backward()
        assert_close(model.second.grad, torch.full((3,), 1.5))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_layouts_of_memory(rank: int, path: str) -> None:
    """Gradients keep their parameter's layout: channels last, transposed, expanded."""
    for view in (False, True):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5, bias=True))
        model = model.to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(16, 5).t())
        ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(7))
        alone = copy.deepcopy(model)
        for _ in range(2):
            ddp(share(x, rank, WORLD)).sum(1).mean().backward()
            alone(x).sum(1).mean().backward()
        for ours, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert_close(ours.grad, expected.grad)
            assert ours.grad.stride() == ours.stride()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(WORLD, group="gloo")
def test_the_order_of_the_first_backward_becomes_the_plan(rank: int, path: str, view: bool) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Module()
    model.second, model.first = second, first  # registered in the reverse order of use
    model.forward = lambda x: second(first(x))
    ddp = DistributedDataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    x = torch.full((2, 3), 1.0 + rank)
    orders = []
    for _ in range(3):
        orders.append([name for bucket in ddp.bucket_layout() for name in bucket.parameters])
        ddp(x).sum().backward()
        assert_close(second.bias.grad, torch.full((3,), 2.0 * len(orders)))
    assert orders[0] == ["first.bias", "first.weight", "second.bias", "second.weight"]
    # The gradients of `second` are ready first in backward, in either order.
    assert set(orders[1][:2]) == {"second.bias", "second.weight"} and orders[2] == orders[1]
