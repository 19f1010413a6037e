"""Gradients that share memory with a gradient that autograd still needs, or with that of another parameter.

Autograd lets `.grad` share its storage with other gradients where a parameter is used through a view. If a
mean were written there during backward, the other gradients would change.
"""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.several_hosts import be_on_host

WAYS = {
    "unsqueeze": ((1,), lambda p, like: p.unsqueeze(0)),
    "view": ((1,), lambda p, like: p.view(like)),
    "reshape": ((1,), lambda p, like: p.reshape(like)),
    "expand": ((0,), lambda p, like: p.expand(like)),
    "as_it_is": ((0,), lambda p, like: p),
}


class Positions(nn.Module):
    """Two layers with one or more parameters added between them.

    Args:
        way: Name in WAYS of how a parameter gets its shape.
        size: Rows and columns.
        num_added: How many parameters are added; their gradients have the same values.
    """

    def __init__(self, way: str, size: int, num_added: int = 1) -> None:
        super().__init__()
        torch.manual_seed(5)
        (dropped,), self.shaped = WAYS[way]
        shape = (size, size) if dropped else (1, size, size)
        self.first = nn.Linear(size, size)
        self.added = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for _ in range(num_added)])
        self.last = nn.Linear(size, size)

    def forward(self, x: torch.Tensor, scales: tuple[float, ...] = ()) -> torch.Tensor:
        hidden = self.first(x)
        for parameter, scale in itertools.zip_longest(self.added, scales, fillvalue=1.0):
            added = self.shaped(parameter, hidden.shape)
            hidden = hidden + (added if scale == 1.0 else added * scale)
        return self.last(hidden)


def batch(rank: int, size: int) -> torch.Tensor:
    return torch.randn(1, size, size, generator=torch.Generator().manual_seed(rank)) / size


def loss_of(output: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss with different gradients on each rank."""
    return (output * torch.arange(1.0, 1.0 + output.shape[-1])).sum() * (1 + rank)


def backward_behind(late: int, rank: int, ddp: nn.Module, *inputs: object) -> None:
    """Run a backward that rank `late` begins when the other rank has handed over all its gradients."""

    def send_or_wait(_: torch.Tensor) -> None:
        token = torch.zeros(1)
        dist.recv(token, 1 - rank) if rank == late else dist.send(token, 1 - rank)

    x = inputs[0].requires_grad_()
    output = ddp(*inputs)
    (output if rank == late else x).register_hook(send_or_wait)  # the gradient of x is the last
    loss_of(output, rank).backward()


def expected_gradients(model: nn.Module, size: int, *inputs: tuple[object, ...]) -> list[torch.Tensor]:
    """Mean gradients, computed in one process in float64; `inputs` has each rank's inputs beside its batch.

    It uses autograd.grad, because backward() adds a second gradient twice to two `.grad` that share memory.
    """
    alone = copy.deepcopy(model).double()
    parameters = list(alone.parameters())
    by_rank = [
        torch.autograd.grad(loss_of(alone(batch(rank, size).double(), *own), rank), parameters)
        for rank, own in enumerate(inputs)
    ]
    return [sum(gradients) / len(inputs) for gradients in zip(*by_rank, strict=True)]


def check(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for (name, parameter), mean in zip(model.named_parameters(), expected, strict=True):
        error = float((parameter.grad.double() - mean).abs().max() / mean.abs().max())
        assert error < 1e-5, f"{name}: {error}"


def places_of_gradients(rank: int, num_hosts: int) -> list[dict[str, object]]:
    """Wrapper options that put gradients in different places. With two hosts, each rank becomes one."""
    if num_hosts > 1:
        be_on_host(rank)
        return [{}, {"gradient_as_bucket_view": True}]
    return [{}, {"gradient_as_bucket_view": True}, {"reduce_through": "group"}]


# Gradients of 384 x 384 elements have five chunks, which are assigned to ranks if each rank has a core.
# Between hosts torch copies gradients of this size, and the core copies smaller ones. Only autograd depends
# on the way, so a view of the parameter and the parameter itself are tried with each number of hosts and each
# size, and the other ways once.
each_size = pytest.mark.parametrize("size", [8, 384])
each_way = pytest.mark.parametrize(
    "way, size, num_hosts",
    [
        *((way, 8, 1) for way in WAYS),
        *(
            (way, size, num_hosts)
            for way in ("unsqueeze", "as_it_is")
            for size, num_hosts in ((384, 1), (8, 2), (384, 2))
        ),
    ],
)


@each_way
@kept_ranks(2, group="gloo")
def test_no_gradient_flows_on_from_a_mean(rank: int, way: str, size: int, num_hosts: int) -> None:
    model = Positions(way, size)
    expected = expected_gradients(model, size, (), ())
    for options in places_of_gradients(rank, num_hosts):
        ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1e-6, **options)
        for step in range(3):
            ddp.zero_grad()
            backward_behind(step % 2, rank, ddp, batch(rank, size))
            check(ddp.module, expected)


@each_way
@kept_ranks(2, group="gloo")
def test_gradients_that_share_memory_get_their_own_means(
    rank: int, way: str, size: int, num_hosts: int
) -> None:
    """On one rank two gradients share memory; on the other they do not."""
    model = Positions(way, size, num_added=2)
    scales = ((), (2.0, 0.5))
    expected = expected_gradients(model, size, *((own,) for own in scales))
    places = places_of_gradients(rank, num_hosts)
    for cap in (1e-6, 25):
        for options in places:
            ddp = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=cap, **options)
            for step in range(3):
                ddp.zero_grad()
                backward_behind(step % 2, rank, ddp, batch(rank, size), scales[rank])
                check(ddp.module, expected)
                pointers = {p.grad.untyped_storage().data_ptr() for p in ddp.module.added}
                assert len(pointers) == 2 or options.get("gradient_as_bucket_view")
                # Their memory is separate now: the next backward adds to each once.
            backward_behind(0, rank, ddp, batch(rank, size), scales[rank])
            check(ddp.module, [2 * mean for mean in expected])


@each_size
@pytest.mark.parametrize("num_hosts", [1, 2])
@kept_ranks(2, group="gloo")
def test_models_whose_gradients_share_memory(rank: int, size: int, num_hosts: int) -> None:
    """Two wrapped models in one backward: the backward of one ends before that of the other."""
    if num_hosts > 1:
        be_on_host(rank)
    encoder, decoder = Positions("unsqueeze", size), Positions("view", size)
    del encoder.last, decoder.first
    encoder.last, decoder.first = nn.Identity(), nn.Identity()
    both = nn.Sequential(encoder, decoder)
    expected = expected_gradients(both, size, (), ())
    chain = nn.Sequential(*(DistributedDataParallel(part, bucket_cap_mb=1e-6) for part in both))
    for step in range(3):
        both.zero_grad()
        backward_behind(step % 2, rank, chain, batch(rank, size))
        check(both, expected)
        assert_close(chain[0].module.added[0].grad, chain[1].module.added[0].grad)


class _Same(torch.autograd.Function):
    """Passes its gradient on as the same tensor."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Joined(nn.Module):
    """Adds two halves of a row to its input. Their gradients are views of the gradient of the sum.

    The gradient of the input has the same memory, and so has, with `keeps`, the tensor that a hook keeps.

    Args:
        size: Elements of a row.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.halves = nn.ParameterList([nn.Parameter(torch.zeros(size // 2)) for _ in range(2)])
        self.keeps = False
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = _Same.apply(x) + torch.cat(list(self.halves)).view(1, -1)
        if self.keeps:
            added.register_hook(self.seen.append)
        return added


def backward_with_outsiders(rank: int, size: int, ddp: nn.Module, first: str) -> list[torch.Tensor]:
    """Run two backwards through one graph. Returns the gradients of tensors outside the model."""
    before = torch.zeros(1, size, requires_grad=True)
    after = torch.zeros(1, size, requires_grad=True)
    loss = loss_of(ddp(before) + after, rank)
    with ddp.no_sync() if first == "local" else contextlib.nullcontext():
        loss.backward(retain_graph=True)
    loss.backward()
    return [before.grad, after.grad]


# The chunks of a gradient of 200,000 elements are assigned to ranks.
@pytest.mark.parametrize("size", [8, 200_000])
@pytest.mark.parametrize("first", ["averaged", "local"])
@pytest.mark.parametrize("num_hosts", [1, 2])
@kept_ranks(2, group="gloo")
def test_memory_of_a_gradient_that_other_tensors_hold(
    rank: int, num_hosts: int, first: str, size: int
) -> None:
    """No mean is written to that memory, and no gradient is added to it twice."""
    for places, keeps in itertools.product(places_of_gradients(rank, num_hosts), (False, True)):
        model = Joined(size)
        model.keeps = keeps
        ddp = DistributedDataParallel(model, **places)
        own = torch.arange(1.0, 1.0 + size) * (1 + rank)
        mean = torch.arange(1.0, 1.0 + size) * 1.5
        outside = backward_with_outsiders(rank, size, ddp, first)
        for gradient in outside:
            assert_close(gradient, 2 * own[None])
        for gradient in model.seen:
            assert_close(gradient, own[None])
        expected = [mean[: size // 2], mean[size // 2 :]]
        for parameter, each in zip(model.halves, expected, strict=True):
            assert_close(parameter.grad, 2 * each)


class Beside(nn.Module):
    """Has parameters that it does not use, and scales its input by one of its own."""

    def __init__(self, unused: nn.ParameterList, size: int) -> None:
        super().__init__()
        self.unused = unused
        self.factor = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("other", ["wrapper", "behind", "before"])
@pytest.mark.parametrize("first", ["averaged", "local"])
@kept_ranks(2, group="gloo")
def test_memory_of_a_gradient_of_two_wrapped_models_that_other_tensors_hold(
    rank: int, first: str, other: str
) -> None:
    """A model is wrapped twice, or another wrapped model has its parameters and is in the same backward."""
    size = 8
    for places in places_of_gradients(rank, 1):
        model = Joined(size)
        model.keeps = other == "before"
        one = DistributedDataParallel(model, **places)
        beside = model if other == "wrapper" else Beside(model.halves, size)
        two = DistributedDataParallel(beside, find_unused_parameters=other != "wrapper", **places)
        parts = {"wrapper": [two], "behind": [one, two], "before": [two, one]}
        whole = nn.Sequential(*parts[other])
        own = torch.arange(1.0, 1.0 + size) * (1 + rank)
        mean = torch.arange(1.0, 1.0 + size) * 1.5
        for _ in range(2):
            whole.zero_grad()
            x = torch.zeros(1, size, requires_grad=True)
            loss = loss_of(whole(x), rank)
            with contextlib.ExitStack() as stack:
                for each in (one, two) if first == "local" else ():
                    stack.enter_context(each.no_sync())
                loss.backward(retain_graph=True)
            loss.backward()
            assert_close(x.grad, 2 * own[None])
            for gradient in model.seen:
                assert_close(gradient, own[None])
            for parameter, each in zip(model.halves, mean.split(size // 2), strict=True):
                assert_close(parameter.grad, 2 * each)


@kept_ranks(2, group="gloo")
def test_gradients_that_the_program_has_put_into_one_tensor_stay_there(rank: int) -> None:
    """Means are written to the memory that the user has given gradients, so its other tensors show them."""
    size = 8
    for places in ({}, {"reduce_through": "group"}):
        model = Joined(size)
        ddp = DistributedDataParallel(model, **places)
        flat = torch.zeros(size)
        parts = [flat[:4], flat[4:]]
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part
        mean = torch.arange(1.0, 1.0 + size) * 1.5
        for _ in range(2):
            flat.zero_()
            backward_with_outsiders(rank, size, ddp, "averaged")
            assert_close(flat, 2 * mean)
        aliases = [parameter.grad.data for parameter in model.parameters()]
        ddp.zero_grad(set_to_none=False)
        backward_with_outsiders(rank, size, ddp, "local")
        for parameter, alias in zip(model.parameters(), aliases, strict=True):
            assert_close(alias, parameter.grad)
        ddp.zero_grad()
        backward_with_outsiders(rank, size, ddp, "averaged")
        aliases = [parameter.grad.data for parameter in model.parameters()]
        ddp.zero_grad(set_to_none=False)
        backward_with_outsiders(rank, size, ddp, "averaged")
        assert_close(torch.cat(aliases), 2 * mean)
