"""ShardedOptimizer against torch's optimizers that make the whole step on every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel, ShardedOptimizer
from tests.harness import kept_ranks

PATHS = pytest.mark.parametrize("path", ["memory", "group"])


class Lion(optim.Optimizer):
    """A third-party optimizer: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(momentum.lerp(p.grad, 1 - group["beta"]).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)


class Lamb(optim.Optimizer):
    """Scales updates by each parameter's norm, as LAMB and LARS do: elements depend on each other."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


ELEMENTWISE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.AdamW, {"lr": 0.01, "fused": True}),
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    (optim.Adam, {"lr": 0.01, "fused": True}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"lr": 0.01, "maximize": True}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (optim.Adagrad, {"lr": 0.1, "fused": True}),
    (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.RAdam, {"lr": 0.01}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.Adadelta, {"lr": 0.5}),
    (optim.ASGD, {"lr": 0.01, "t0": 3.0}),
    (optim.Rprop, {"lr": 0.01}),
    (Lion, {}),
]
WHOLE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [(optim.Adafactor, {"lr": 0.01}), (Lamb, {})]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters: cut, whole, of one element, empty, frozen, and in other memory orders."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        nn.Parameter(values(37, 41)),
        nn.Parameter(values()),
        nn.Parameter(values(6, 5, 8, 3).to(memory_format=torch.channels_last)),
        nn.Parameter(values(0, 4)),
        nn.Parameter(values(31, 29).t()),
        nn.Parameter(values(400), requires_grad=False),
        nn.Parameter(values(20, 9)[:, 2:5]),  # with gaps
        nn.Parameter(values(1537)),
    ]


def make_gradients(parameters: Sequence[nn.Parameter], count: int = 7) -> list[list[torch.Tensor | None]]:
    """Return gradients of several steps, with backward's strides; some parameters have none in some steps."""
    generator = torch.Generator().manual_seed(1)
    steps: list[list[torch.Tensor | None]] = []
    for step in range(count):
        gradients: list[torch.Tensor | None] = []
        for index, parameter in enumerate(parameters):
            values = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 4 - 2)
            gradient = torch.empty_like(parameter).copy_(values)
            has_none = not parameter.requires_grad or (index + step) % 6 == 5
            gradients.append(None if has_none else gradient)
        steps.append(gradients)
    return steps


def train(
    optimizer: optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    steps: int,
    after: Callable[[int], None] = lambda _: None,
) -> None:
    gradients = make_gradients(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients[step % len(gradients)], strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        after(step)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and first.equal(second)


def in_two_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.1}]


@kept_ranks(2)
def test_elementwise_optimizers_have_the_bits_of_the_whole_one(group: Any) -> None:
    """On many kinds of parameters; `test_sharded_optimizer_shared.py` compares more steps."""
    for optimizer_class, options in ELEMENTWISE:
        expected, parameters = make_parameters(), make_parameters()
        train(optimizer_class(expected, **options), expected, 16)
        ours = ShardedOptimizer(parameters, optimizer_class, process_group=group, **options)
        train(ours, parameters, 16)
        for index, (one, other) in enumerate(zip(parameters, expected, strict=True)):
            assert same_bits(one, other), (optimizer_class, options, index)
        dealt = {piece.parameter for piece in ours._shards.pieces if not piece.is_whole}
        trained = [index for index in dealt if parameters[index].requires_grad]
        assert len(trained) == 1, "one cut between two ranks"
        held = sum(
            value.numel()
            for state in ours.optim.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim()
        )
        kinds = held / sum(p.numel() for p in parameters if p.requires_grad)
        assert kinds == pytest.approx(round(2 * kinds) / 2, abs=0.2), "half of the state"


@kept_ranks(2, group="gloo")
def test_elementwise_optimizers_over_a_process_group(rank: int) -> None:
    for optimizer_class, options in ELEMENTWISE[:2]:
        expected, parameters = make_parameters(), make_parameters()
        train(optimizer_class(expected, **options), expected, 16)
        train(
            ShardedOptimizer(parameters, optimizer_class, reduce_through="group", **options), parameters, 16
        )
        assert all(map(same_bits, parameters, expected)), optimizer_class


@PATHS
@kept_ranks(3, group="gloo")
def test_other_optimizers_get_whole_parameters_and_have_the_same_bits(rank: int, path: str) -> None:
    for optimizer_class, options in WHOLE:
        expected, parameters = [
            [parameter for parameter in make_parameters() if parameter.numel()] for _ in range(2)
        ]  # torch's Adafactor divides by the number of elements
        train(optimizer_class(expected, **options), expected, 20)
        ours = ShardedOptimizer(parameters, optimizer_class, reduce_through=path, **options)
        train(ours, parameters, 20)
        assert all(map(same_bits, parameters, expected))
        assert all(piece.is_whole for piece in ours._shards.pieces)
        assert {piece.rank for piece in ours._shards.pieces} == {0, 1, 2}


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon since 2.9")
@kept_ranks(2, group="gloo")
def test_an_optimizer_that_takes_only_matrices(rank: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 20, bias=False), nn.Linear(20, 5, bias=False))

    expected, actual = model(), model()
    whole = optim.Muon(expected.parameters(), lr=0.1)
    sharded = ShardedOptimizer(actual.parameters(), optim.Muon, lr=0.1)
    for step in range(3):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
        for module, optimizer in ((expected, whole), (actual, sharded)):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert all(map(same_bits, actual.parameters(), expected.parameters()))
    assert [piece.rank for piece in sharded._shards.pieces] == [0, 1]


@kept_ranks(2)
def test_all_dtypes(group: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        for optimizer_class, options in ((optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.AdamW, {})):
            expected, parameters = make_parameters(dtype), make_parameters(dtype)
            train(optimizer_class(expected, **options), expected, 10)
            ours = ShardedOptimizer(parameters, optimizer_class, group, **options)
            train(ours, parameters, 10)
            assert all(map(same_bits, parameters, expected)), (dtype, optimizer_class)


@kept_ranks(4, group="gloo")
def test_groups_schedulers_and_added_groups_on_four_ranks(rank: int) -> None:
    results = []
    for make in (optim.AdamW, lambda params, **options: ShardedOptimizer(params, optim.AdamW, **options)):
        parameters = make_parameters()
        optimizer = make(in_two_groups(parameters[:6]), lr=0.1, betas=(0.8, 0.9))
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=30)
        train(optimizer, parameters[:6], 8, after=lambda _, scheduler=scheduler: scheduler.step())
        optimizer.add_param_group({"params": parameters[6:], "lr": 0.5})
        train(optimizer, parameters, 8)
        results.append((parameters, optimizer.param_groups))
    (expected, groups), (actual, our_groups) = results
    assert all(map(same_bits, actual, expected))
    for group, own in zip(groups, our_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in own.items() if k != "params"
        }


@PATHS
@kept_ranks(2, group="gloo")
def test_it_trains_like_zero_redundancy_optimizer(rank: int, path: str) -> None:
    """A few steps on different data have the same losses and weights, with clipping and a closure."""
    with warnings.catch_warnings():  # from torch, about itself
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))
    other = copy.deepcopy(model)
    ddp, theirs = DistributedDataParallel(model), nn.parallel.DistributedDataParallel(other)
    ours = ShardedOptimizer(
        ddp.parameters(), optim.Adam, parameters_as_bucket_view=True, reduce_through=path, lr=0.01
    )
    zero = ZeroRedundancyOptimizer(other.parameters(), optim.Adam, lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        x = torch.randn(4, 8, generator=generator)
        losses = []
        for wrapped, optimizer in ((ddp, ours), (theirs, zero)):

            def closure(wrapped: nn.Module = wrapped, optimizer: Any = optimizer, x: Any = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
                return loss

            losses.append(optimizer.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert_close(one, another)
    ddp.check_replicas(ours)


@kept_ranks(2, group="gloo")
def test_writes_are_counted_alike_on_all_ranks_and_autograd_sees_them(rank: int) -> None:
    parameters = make_parameters()
    optimizer = ShardedOptimizer(parameters, optim.SGD, lr=0.1)
    before = [parameter._version for parameter in parameters]
    out = parameters[0] @ parameters[0].detach().t().clone()
    out = (out * parameters[0][:, :1]).sum()
    train(optimizer, parameters, 1)
    gradients = make_gradients(parameters)[0]
    written = [parameter._version - count for parameter, count in zip(parameters, before, strict=True)]
    assert written == [0 if gradient is None else 1 for gradient in gradients]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@kept_ranks(2, group="gloo")
def test_gradients_with_other_strides_than_their_parameter(rank: int) -> None:
    """Transposed, expanded or conjugated, as users may set them."""
    for values in (
        torch.arange(899.0).reshape(31, 29),
        torch.ones(1, 29).expand(31, 29),
        torch.arange(899.0).mul(1j).reshape(29, 31).t().conj(),
    ):
        expected = nn.Parameter(torch.ones(29, 31, dtype=values.dtype).t())
        parameter = nn.Parameter(expected.detach().clone())
        assert parameter.stride() == (1, 31)
        for tensor, optimizer in (
            (expected, optim.SGD([expected], lr=0.1)),
            (parameter, ShardedOptimizer([parameter], optim.SGD, lr=0.1)),
        ):
            for _ in range(3):
                tensor.grad = values
                optimizer.step()
        assert same_bits(parameter, expected)


@kept_ranks(2, group="gloo")
def test_gradients_are_freed_and_parameters_may_get_other_memory(rank: int) -> None:
    expected, parameters = make_parameters(), make_parameters()
    whole, sharded = optim.Adam(expected, lr=0.1), ShardedOptimizer(parameters, optim.Adam, lr=0.1)
    train(whole, expected, 3)
    train(sharded, parameters, 3)
    sharded.zero_grad()
    assert all(tensor.grad is None for tensor in sharded._shards.tensors)
    for parameter in parameters:
        parameter.data = torch.empty_strided(parameter.shape, parameter.stride()).copy_(parameter.data)
    train(whole, expected, 3)
    train(sharded, parameters, 3)
    assert all(map(same_bits, parameters, expected))


@kept_ranks(2, group="gloo")
def test_hooks_are_called_once_and_a_scaler_skips_a_step_on_all_ranks(rank: int) -> None:
    calls: list[str] = []
    for fused in (False, True):
        parameter, expected = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(1000))
        ours = ShardedOptimizer([parameter], optim.AdamW, lr=0.1, fused=fused)
        theirs = optim.AdamW([expected], lr=0.1, fused=fused)
        handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
        ours.register_step_pre_hook(lambda *_: calls.append("pre"))
        for gradient in (1.0, float("inf"), 3.0):
            for tensor, optimizer in ((parameter, ours), (expected, theirs)):
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                optimizer.zero_grad()
                scaler.scale((tensor * gradient).sum()).backward()
                del calls[:]
                scaler.step(optimizer)
                if optimizer is ours and (fused or gradient != float("inf")):
                    assert calls == ["pre", "global"]
                scaler.update()
        handle.remove()
        assert same_bits(parameter, expected)


@PATHS
@kept_ranks(3, group="gloo")
def test_a_rank_without_data_updates_its_shard_in_the_others_steps(rank: int, path: str) -> None:
    """torch's Join, against one process that takes the mean over the ranks that still have a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 70), nn.Tanh(), nn.Linear(70, 1))
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(ddp.parameters(), optim.Adam, lr=0.01, reduce_through=path)
    data = [
        [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * r + i)) for i in range(1 + 2 * r)]
        for r in range(3)
    ]
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for x in data[rank]:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    reference = optim.Adam(alone.parameters(), lr=0.01)
    for step in range(5):
        active = [rows[step] for rows in data if step < len(rows)]
        reference.zero_grad()
        for x in active:
            (alone(x).square().mean() / len(active)).backward()
        reference.step()
    for one, another in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(one, another, rtol=1e-4, atol=1e-6)


@kept_ranks(2)
def test_over_a_paceline_group_and_two_models(group: Any) -> None:
    both = [make_parameters(), make_parameters()]
    expected = make_parameters()
    train(optim.NAdam(expected), expected, 6)
    optimizers = [ShardedOptimizer(each, optim.NAdam, process_group=group) for each in both]
    for optimizer, parameters in zip(optimizers, both, strict=True):
        train(optimizer, parameters, 6)
        assert all(map(same_bits, parameters, expected))
    assert optimizers[0].process_group is None


@kept_ranks(1, group="gloo")
def test_alone(rank: int) -> None:
    expected, parameters = make_parameters(), make_parameters()
    whole, ours = optim.Adamax(expected), ShardedOptimizer(parameters, optim.Adamax)
    train(whole, expected, 4)
    train(ours, parameters, 4)
    assert all(map(same_bits, parameters, expected))
    assert list(ours.state_dict()["state"]) == list(whole.state_dict()["state"])
    assert dist.get_world_size() == 1
