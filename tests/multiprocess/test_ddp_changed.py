"""Models that change after wrapping: frozen and trained again, rebuilt, or with ignored parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError, DeadlineError, UnusedParameterError
from paceline.torch import DistributedDataParallel, SyncBatchNorm
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import Blocked, bits, share, two_layers

PATHS = ["group", "memory"]
WORLD = 2


def step(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_on_all_ranks(module: nn.Module) -> None:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, bits(module))
    assert all(each == found[0] for each in found)


def train_gan(g: nn.Module, d: nn.Module, noise: torch.Tensor, real: torch.Tensor) -> None:
    """Train as pix2pix and its descendants do, with two backwards through D in each iteration."""
    for number in range(4):
        fake = g(noise + number)
        d.requires_grad_(False)
        g.zero_grad()
        (-d(fake)).mean().backward()
        step(g)
        d.requires_grad_(True)
        d.zero_grad(set_to_none=number % 2 == 0)
        loss = d(fake.detach()).square().mean() + (d(real) - 1).square().mean()
        loss.backward()
        step(d)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(WORLD, group="gloo")
def test_a_gan_trains_as_in_one_process(rank: int, path: str, view: bool) -> None:
    g = two_layers().double()
    d = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    alone = copy.deepcopy((g, d))
    options = {"reduce_through": path, "gradient_as_bucket_view": view}
    noise, real = numbers(4, 4, seed=3), numbers(4, 2, seed=4)
    wrapped = [DistributedDataParallel(module, **options) for module in (g, d)]
    train_gan(*wrapped, share(noise, rank, WORLD), share(real, rank, WORLD))
    train_gan(*alone, noise, real)
    for ours, reference in zip((g, d), alone):
        assert_same_on_all_ranks(ours)
        for parameter, expected in zip(ours.parameters(), reference.parameters(), strict=True):
            assert_close(parameter, expected)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo", deadline_s=240)
def test_layers_frozen_in_some_steps_train_as_with_torch(rank: int, path: str, find_unused: bool) -> None:
    """Also if they are frozen in the first backward, after which the hooks are made again."""
    x = numbers(2, 4, seed=rank)
    for frozen_in_steps in ([0, 1, 4], [2, 3]):
        ours = DistributedDataParallel(
            two_layers().double(),
            reduce_through=path,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=0 in frozen_in_steps,
        )
        theirs = TorchDDP(two_layers().double(), find_unused_parameters=True)
        for number in range(6):
            for model in (ours, theirs):
                model.module[0].requires_grad_(number not in frozen_in_steps)
                model.zero_grad()
                model(x).square().sum().backward()
                step(model)
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None), number
                assert_close(one, other)
        assert_same_on_all_ranks(ours)


def _freeze_around_forwards(model: nn.Module, x: torch.Tensor) -> list[list[torch.Tensor | None]]:
    """Freeze a layer between forwards and backwards, and return the gradients after each backward.

    `model` is wrapped and gets one rank's rows, or it is the reference and gets the whole batch. Forwards
    that never get a backward build a graph with all layers, or without the frozen one.
    """
    layer = (model.module if isinstance(model, DistributedDataParallel) else model)[0]
    found = []

    def backward(loss: torch.Tensor) -> None:
        loss.backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()

    def forward() -> torch.Tensor:
        return model(x).square().mean()

    for is_training in (True, False):
        model.train(is_training)
        unused = forward()  # evaluated with gradients, say
        model.train()
        layer.requires_grad_(False)
        backward(forward())
        unused = forward()
        layer.requires_grad_(True)
        backward(forward())
        del unused
    trained = forward()
    layer.requires_grad_(False)
    backward(trained)
    frozen = forward()
    layer.requires_grad_(True)
    backward(frozen)
    trained = forward()
    layer.requires_grad_(False)
    frozen = forward()
    layer.requires_grad_(True)
    backward(trained + frozen)
    backward(forward())
    return found


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_layers_frozen_between_a_forward_and_a_backward(
    rank: int, path: str, view: bool, find_unused: bool
) -> None:
    x = numbers(4, 4, seed=3)
    ddp = DistributedDataParallel(
        two_layers().double(),
        reduce_through=path,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=view,
    )
    ours = _freeze_around_forwards(ddp, share(x, rank, WORLD))
    theirs = _freeze_around_forwards(two_layers().double(), x)
    assert len(ours) == len(theirs) == 8
    for number, (found, expected) in enumerate(zip(ours, theirs)):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), number
            if one is not None:
                assert_close(one, other)


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_what_a_frozen_parameter_has_in_grad_stays(
    rank: int, path: str, view: bool, find_unused: bool
) -> None:
    ddp = DistributedDataParallel(
        two_layers(),
        reduce_through=path,
        gradient_as_bucket_view=view,
        find_unused_parameters=find_unused,
    )
    x = torch.full((1, 4), 1.0 + rank)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).sum().backward()
    before = ddp.module[0].weight.grad.clone()
    ddp.module[0].requires_grad_(False)
    for _ in range(3):
        ddp(x).sum().backward()
        assert torch.equal(ddp.module[0].weight.grad, before)
    assert_close(ddp.module[2].bias.grad, torch.full((2,), 4.0))
    loss = ddp(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(ddp.module[0].weight.grad, before)
    ddp.module[0].requires_grad_(True)
    ddp(x).sum().backward()
    assert_close(ddp.module[0].weight.grad, 2 * before)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_wholly_frozen_model_waits_for_no_rank(rank: int, path: str) -> None:
    """So one rank alone may compute gradients of the inputs."""
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    alone = two_layers()
    x = torch.full((1, 4), 1.0 + rank, requires_grad=True)
    for number in range(3):
        ddp.requires_grad_(False)
        if rank == number % 2:
            x.grad = None
            ddp(x).sum().backward()
            (expected,) = torch.autograd.grad(alone(x).sum(), x)
            assert_close(x.grad, expected)
        ddp.requires_grad_(True)
        ddp.zero_grad()
        ddp(x.detach()).sum().backward()
        assert_close(ddp.module[2].bias.grad, torch.ones(2))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_a_parameter_that_only_some_ranks_freeze_is_unused_there(rank: int, path: str) -> None:
    x = torch.full((1, 4), 1.0 + rank)
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path)
    for first in (True, False):
        for frozen_on, stale in [({1}, True), ({0, 2}, False)]:
            ddp.zero_grad(set_to_none=not stale)
            model[0].weight.requires_grad_(rank not in frozen_on)
            with pytest.raises(UnusedParameterError) as caught:
                ddp(x).sum().backward()
            assert caught.value.unused == {"0.weight": tuple(frozen_on)}, first
            assert "froze" in str(caught.value)
        # Each rank freezes another parameter.
        model[0].requires_grad_(True)
        ([model[0].weight, model[0].bias, model[2].weight][rank]).requires_grad_(False)
        with pytest.raises(UnusedParameterError) as caught:
            ddp(x).sum().backward()
        assert caught.value.unused == {"0.weight": (0,), "0.bias": (1,), "2.weight": (2,)}
        model.requires_grad_(True)
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert_close(model[2].bias.grad, torch.ones(2))
    # A layer that all ranks freeze does not excuse other unused parameters.
    model[0].requires_grad_(False)
    with pytest.raises(UnusedParameterError):
        (ddp(x) * 0 + model[2].bias if rank else model[2].bias * ddp(x).detach()).sum().backward()
    model.requires_grad_(True)

    ddp = DistributedDataParallel(model, reduce_through=path, find_unused_parameters=True)
    for _ in range(2):
        model[2].bias.requires_grad_(rank != 1)
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert_close(model[2].bias.grad, torch.full((2,), 2 / 3))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_rank_without_data_leaves_frozen_parameters_alone(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    ddp.module[0].requires_grad_(False)
    for _ in ddp.iterate(range(2 + rank)):
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        assert ddp.module[0].weight.grad is None
        assert_close(ddp.module[2].bias.grad, torch.ones(2))


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_what_a_frozen_parameter_has_in_grad_stays_while_a_rank_has_no_data(
    rank: int, path: str, view: bool, find_unused: bool
) -> None:
    """torch's DDP with find_unused_parameters halves this gradient in views, else it leaves it alone."""
    ddp = DistributedDataParallel(
        two_layers(),
        reduce_through=path,
        gradient_as_bucket_view=view,
        find_unused_parameters=find_unused,
    )
    ddp(torch.ones(1, 4)).sum().backward()
    before = ddp.module[0].weight.grad.clone()
    ddp.module[0].requires_grad_(False)
    with ddp.join(divide_by_initial_world_size=True):
        for _ in range(2 + rank):
            ddp.module[2].zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
            assert torch.equal(ddp.module[0].weight.grad, before)
    assert torch.equal(ddp.module[0].weight.grad, before)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_weights_and_accumulation_with_frozen_parameters(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    ddp.module[0].requires_grad_(False)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.weight(1 + 2 * rank):
            (ddp(torch.ones(1, 4)) * (1 + rank)).sum().backward()
        assert_close(ddp.module[2].bias.grad, torch.full((2,), 1.75))
        ddp.zero_grad()
        ddp.module[0].requires_grad_(True)
        with ddp.no_sync():
            ddp(torch.ones(1, 4)).sum().backward()
        ddp.module[0].requires_grad_(False)
        ddp(torch.ones(1, 4)).sum().backward()
        assert ddp.module[0].weight.grad is not None  # of the first micro-batch, which counts
        assert_close(ddp.module[2].bias.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_model_that_one_rank_freezes_whole_is_an_error_at_the_deadline(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, timeout_s=3)
    store = torch.distributed.distributed_c10d._get_default_store()
    ddp.requires_grad_(rank == 0)
    loss = ddp(torch.ones(1, 4)).sum()
    if rank == 1:
        store.wait(["rank 0 has raised"])
        return
    with pytest.raises(DeadlineError):
        loss.backward()
    store.set("rank 0 has raised", "")


@kept_ranks(WORLD, group="gloo")
def test_a_delayed_parameter_may_be_frozen(rank: int) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("2.weight", model[2].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )
    for frozen in (model[2], model[0], model[2]):
        ddp.zero_grad()
        frozen.requires_grad_(False)
        (ddp(torch.ones(1, 4)) * (1 + rank)).sum().backward()
        others = model[0] if frozen is model[2] else model[2]
        assert all(parameter.grad is not None for parameter in others.parameters())
        frozen.requires_grad_(True)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act: nn.Module = nn.Tanh()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.act(self.norm(self.first(x))))


@kept_ranks(WORLD, group="gloo")
def test_a_model_may_be_rebuilt_of_the_parameters_that_it_has(rank: int) -> None:
    net, alone = Normed().double(), Normed().double()
    ddp = DistributedDataParallel(net)
    x = numbers(8, 4, seed=7)

    def check() -> None:
        for module, batch in ((ddp, share(x, rank, WORLD)), (alone, x)):
            module.zero_grad()
            module(batch).square().mean().backward()
        for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(parameter.grad, expected.grad)

    SyncBatchNorm.convert_sync_batchnorm(ddp)
    check()
    net.act = alone.act = nn.ReLU()
    check()
    net.act = nn.Sequential(nn.ReLU(), nn.Identity())
    net.extra = nn.Dropout()
    net.register_module("no", None)
    check()
    del net.extra
    net.last = nn.Sequential(net.last)  # another name
    check()
    # Buffers of added modules are synchronised, too.
    net.register_buffer("count", torch.full((1,), 5.0))
    net.counter = nn.BatchNorm1d(2, affine=False)
    net.counter.running_mean += rank
    check()
    assert_close(net.counter.running_mean, torch.zeros(2))


@kept_ranks(WORLD, group="gloo", deadline_s=240)
def test_a_submodule_may_be_compiled_after_wrapping(rank: int) -> None:
    net = two_layers()
    ddp = DistributedDataParallel(net)
    ddp(torch.ones(1, 4)).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    net[0] = torch.compile(net[0], backend="eager")
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        assert all(torch.equal(p.grad, b) for p, b in zip(net.parameters(), before, strict=True))


class Proxied(nn.Module):
    """`fc2` is each rank's own, and has another shape on each rank at first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc1 = nn.Linear(1, 1, bias=False)
        self.fc2: nn.Module = nn.Linear(10 if rank else 1, 10, bias=False)
        self.fc2.register_buffer("own", torch.zeros(5 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


@pytest.mark.parametrize("find_unused", [False, True])
@kept_ranks(WORLD, group="gloo")
def test_what_is_ignored_may_change(rank: int, find_unused: bool) -> None:
    net = Proxied(rank)
    proxy = net.fc2.weight
    names = ["fc2.weight", "fc2.own", "fc3.weight", "fc3.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    ddp = DistributedDataParallel(net, find_unused_parameters=find_unused)
    net.fc2 = nn.Linear(1, 1, bias=False)  # materialised
    x = torch.full((1, 1), 1.0 + rank)
    for number in range(3):
        alone = copy.deepcopy(net)
        for model in (ddp, alone):
            model.zero_grad()
            model(x).sum().backward()
        assert_close(net.fc2.weight.grad, alone.fc2.weight.grad)  # this rank's
        both = [net.fc2.weight.clone().detach() for _ in range(WORLD)]
        torch.distributed.all_gather(both, net.fc2.weight.detach())
        assert_close(net.fc1.weight.grad, (both[0] * 1 + both[1] * 2) / 2)
        assert proxy.grad is None
        if number == 0:
            net.fc3 = nn.Linear(3, 3)  # added
        if number == 1:
            net.fc2.weight = nn.Parameter(torch.full((1, 1), 4.0 + rank))  # replaced
    net.fc3.more = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"added: fc3\.more"):
        ddp(x)


class MayBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, blocks: bool) -> torch.Tensor:
        hidden = self.a(x)
        return self.b(Blocked.apply(hidden) if blocks else hidden)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_an_undefined_gradient_is_one_more_unused_parameter(rank: int, path: str, view: bool) -> None:
    x = torch.ones(1, 2)
    options: dict[str, Any] = {"reduce_through": path, "gradient_as_bucket_view": view}
    ddp = DistributedDataParallel(MayBlock(), find_unused_parameters=True, **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x, True).sum().backward()
        assert ddp.module.a.weight.grad is None and ddp.module.a.bias.grad is None
        assert_close(ddp.module.b.bias.grad, torch.ones(2))
    ddp.zero_grad()
    ddp(x, rank == 1).sum().backward()
    assert_close(ddp.module.a.bias.grad, ddp.module.b.weight.sum(0).detach() / 2)
    ddp = DistributedDataParallel(MayBlock(), **options)
    for _ in range(2):
        ddp.zero_grad()
        with pytest.raises(UnusedParameterError) as caught:
            ddp(x, rank == 1).sum().backward()
        assert caught.value.unused == {"a.weight": (1,), "a.bias": (1,)}
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x, True).sum().backward()
        ddp(x, False).sum().backward()
        assert_close(ddp.module.a.bias.grad, ddp.module.b.weight.sum(0).detach())


def convert(module: nn.Module) -> None:
    """To another dtype and back: each parameter becomes another tensor, twice."""
    module.double()
    module.float()


def load(module: nn.Module) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})


def swap(module: nn.Module) -> None:
    for parameter in module.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


def swap_one(module: nn.Module) -> None:
    parameter = next(module.parameters())
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", [convert, load, swap, swap_one])
@kept_ranks(WORLD, group="gloo")
def test_parameters_that_become_other_tensors_train(rank: int, way: Any, path: str, unused: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.manual_seed(0)
    model = two_layers()
    whole = copy.deepcopy(model).double()
    ddp = DistributedDataParallel(
        model, reduce_through="auto" if path == "memory" else path, find_unused_parameters=unused
    )
    x = numbers(WORLD, 4, seed=1)
    for iteration in range(6):
        if iteration in (2, 3):
            way(model)
        ddp.zero_grad()
        whole.zero_grad()
        ddp(x[rank : rank + 1].float()).square().mean().backward()
        whole(x).square().mean().backward()
        for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert_close(parameter.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)
        step(model)
        step(whole)
    assert_same_on_all_ranks(model)


@kept_ranks(WORLD, group="gloo")
def test_a_weighted_parameter_that_becomes_another_tensor_is_named(rank: int) -> None:
    """The hook that multiplies its gradient by the weight was the old tensor's."""
    model = two_layers()
    ddp = DistributedDataParallel(model, weight=2.0 + rank)
    for iteration in range(3):
        if iteration == 1:
            swap_one(model)
        ddp.zero_grad()
        loss = ddp(torch.ones(1, 4)).sum()
        if iteration == 1:
            with pytest.raises(ConfigError, match=next(iter(dict(model.named_parameters())))):
                loss.backward()
        else:
            loss.backward()


CLEARS = {
    "to none": lambda ddp: ddp.zero_grad(),
    "to zeros": lambda ddp: ddp.zero_grad(set_to_none=False),
    "not": lambda ddp: None,
}


class Sum(nn.Module):
    """Adds up its parameters, which may have any dtype, or leaves `weight` out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))

    def forward(self, uses_weight: bool = True) -> torch.Tensor:
        return self.bias.sum() + (self.weight.sum() if uses_weight else 0.0)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_parameter_of_another_dtype_is_refused_on_every_rank(rank: int, path: str, view: bool) -> None:
    """Autograd adds to a kept gradient in the gradient's dtype, which therefore does not show the change."""
    expected = (r"'weight' cannot be averaged on rank 1 of 2", r"(?s)'weight'.*got .*torch.float64")[rank]
    for clear in CLEARS.values():
        for is_used in (True, False):
            model = Sum()
            ddp = DistributedDataParallel(
                model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=True
            )
            for _ in range(2):
                clear(ddp)
                ddp().backward()
            if rank == 1:
                model.weight.data = model.weight.detach().double()
            clear(ddp)
            with pytest.raises(ConfigError, match=expected):
                ddp(rank == 0 or is_used).backward()
            model.weight.data = model.weight.detach().float()
            ddp.zero_grad()
            ddp().backward()
            assert_close(model.weight.grad, torch.ones(3, 2))


class _Gated(nn.Module):
    """Each of two ranks leaves out one layer: rank 0 the first, rank 1 the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gates, self.head = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.head(torch.tanh(self.gates[1 - rank](x)))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_gradients_of_parameters_frozen_after_their_forward_stay(rank: int, path: str, view: bool) -> None:
    """Torch adds nothing to their gradients, but calls their hooks on the rank that has used them."""
    x = numbers(4, 4, seed=3)
    alone = _Gated().double()
    ddp = DistributedDataParallel(
        _Gated().double(), reduce_through=path, find_unused_parameters=True, gradient_as_bucket_view=view
    )
    for is_frozen in (False, True, True):
        ours = ddp(share(x, rank, 2), rank).square().mean()
        theirs = sum(alone(share(x, each, 2), each).square().mean() for each in range(2)) / 2
        for model in (ddp.module, alone):
            model.gates.requires_grad_(not is_frozen)
        ours.backward()
        theirs.backward()
        for model in (ddp.module, alone):
            model.gates.requires_grad_(True)
        for one, other in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            assert_close(one.grad, other.grad)


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_gradient_of_a_parameter_used_on_one_rank_in_no_sync_counts_when_it_is_frozen(
    rank: int, path: str, view: bool, is_alone: bool
) -> None:
    """Torch's DDP also averages what the ranks have left of it, if one has used it since the last step."""
    x = numbers(4, 4, seed=3)
    ours = DistributedDataParallel(
        _Gated().double(), reduce_through=path, find_unused_parameters=True, gradient_as_bucket_view=view
    )
    ranks_alone = [_Gated().double() for _ in range(2)]

    def micro_batch(each: int, model: nn.Module) -> None:
        model(share(x, each, 2), each).square().mean().backward()

    def average() -> None:
        for pair in zip(*(model.parameters() for model in ranks_alone), strict=True):
            left = [p.grad for p in pair if p.grad is not None]
            for p in pair:
                p.grad = sum(left[1:], left[0]) / 2

    micro_batch(rank, ours)
    for each in range(2):
        micro_batch(each, ranks_alone[each])
    average()
    for each in (0,) if is_alone else (0, 1):
        if each == rank:
            with ours.no_sync():
                micro_batch(each, ours)
        micro_batch(each, ranks_alone[each])
    for model in (ours.module, *ranks_alone):
        model.gates.requires_grad_(False)
    for _ in range(2):  # before the second backward no rank has used them: they stay
        micro_batch(rank, ours)
        for each in range(2):
            micro_batch(each, ranks_alone[each])
        average()
        for one, other in zip(ours.module.parameters(), ranks_alone[0].parameters(), strict=True):
            assert_close(one.grad, other.grad)
