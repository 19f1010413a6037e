"""reduce="scatter": each rank gets the shard of the mean gradients that its ShardedOptimizer needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError, NonFiniteGradientError, PacelineError, UnusedParameterError
from paceline.torch import DistributedDataParallel, LocalSGD, ShardedOptimizer
from tests.harness import kept_ranks


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return one.shape == other.shape and first.equal(second)


class ManyKinds(nn.Module):
    """Tied, frozen, unused, empty, complex and transposed parameters, 16 bits, and several segments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 70)
        self.large = nn.Parameter(torch.randn(70, 700) / 30)  # 2.99 of the core's segments
        self.last = nn.Linear(700, 70)
        self.tied = nn.Linear(9, 70)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(300), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.randn(0))
        self.rotation = nn.Parameter(torch.randn(35, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(70, 33).t())
        self.bits16 = nn.Parameter(torch.randn(400).bfloat16())
        self.wide = nn.Parameter(torch.randn(70).double())

    def forward(self, x: torch.Tensor, uses_all: bool = False) -> torch.Tensor:
        h = torch.tanh(self.first(x) + self.tied(x))
        h = self.last(torch.tanh(h @ self.large)) * self.wide.float() + self.empty.sum()
        h = torch.view_as_real(torch.view_as_complex(h.reshape(-1, 35, 2)) * self.rotation).reshape(-1, 70)
        out = (h @ self.transposed.t()).square().mean() + (
            self.bits16.float() * self.frozen.repeat(2)[:400]
        ).mean()
        return out + self.unused.sum() if uses_all else out


def loop(ddp: Any, optimizer: Any, rank: int, steps: int, between: Callable[[Any, int], None]) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(1 + step % 2):
            with ddp.no_sync() if micro < step % 2 else contextlib.nullcontext():
                ddp(torch.randn(4, 9, generator=generator), uses_all=step == 2 and rank == 1).backward()
        norms.append(ddp.grad_norm())
        between(ddp, step)
        optimizer.step()
    return norms


@kept_ranks(3, group="gloo")
def test_the_bits_are_those_of_whole_gradients(rank: int) -> None:
    def clip(ddp: Any, step: int) -> None:
        """Clip by the norm that the backward computed, with either kind of gradients."""
        if step % 3 == 1:
            limit, norm = 0.5 * ddp.grad_norm(), ddp.grad_norm()
            if ddp._config.scatters:
                assert float(ddp.clip_grad_norm_(limit)) == pytest.approx(norm)
                assert float(ddp.clip_grad_norm_(2 * norm)) == pytest.approx(limit, rel=1e-4)
            else:
                factor = limit / (norm + 1e-6)
                torch._foreach_mul_([p.grad for p in ddp.parameters() if p.grad is not None], factor)

    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (optim.AdamW, {"lr": 0.01}, {"weight": rank + 1.0, "bucket_cap_mb": 0.05}),
        (Whole, {}, {}),
    ]
    for optimizer_class, options, more in cases:
        replica = DistributedDataParallel(ManyKinds(), find_unused_parameters=True, **more)
        norms = loop(replica, optimizer_class(replica.parameters(), **options), rank, 5, clip)
        for shares in (False, True):
            ddp = DistributedDataParallel(
                ManyKinds(), find_unused_parameters=True, reduce="scatter", share_parameters=shares, **more
            )
            optimizer = ShardedOptimizer(ddp.parameters(), optimizer_class, **options)
            assert loop(ddp, optimizer, rank, 5, clip) == norms
            for (name, ours), expected in zip(ddp.named_parameters(), replica.parameters(), strict=True):
                assert same_bits(ours, expected), (optimizer_class, shares, name)


class Whole(optim.Optimizer):
    """An update that depends on a whole parameter, so that none is cut."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.sub_(p.grad * (0.01 / (1 + p.grad.abs().max())))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 1))


def scattering(model: nn.Module | None = None, **options: Any) -> tuple[Any, ShardedOptimizer]:
    ddp = DistributedDataParallel(model or small(), reduce="scatter", **options)
    return ddp, ShardedOptimizer(ddp.parameters(), optim.SGD, lr=0.1)


def loss(ddp: Any, rank: int, step: int = 0) -> Any:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return ddp(torch.randn(4, 9, generator=generator)).square().mean()


@kept_ranks(2, group="gloo")
def test_a_sharded_gradient_cannot_be_read_as_a_whole_one(rank: int) -> None:
    """Reading such a gradient raises on every rank, and training continues afterwards."""
    for shares in (False, True):
        _read_in_each_way(rank, *scattering(share_parameters=shares))


def _read_in_each_way(rank: int, ddp: Any, optimizer: ShardedOptimizer) -> None:
    expected = DistributedDataParallel(small())
    whole = optim.SGD(expected.parameters(), lr=0.1)
    parameters = list(ddp.parameters())
    plain = optim.SGD(parameters, lr=0.1)

    def backward_(step: int) -> None:
        for model, theirs in ((ddp, optimizer), (expected, whole)):
            theirs.zero_grad()
            loss(model, rank, step).backward()

    def step_and_compare() -> None:
        optimizer.step()
        whole.step()
        assert all(map(same_bits, parameters, expected.parameters()))

    ways: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
        lambda: [p.grad.add_(0.1) for p in parameters if p.grad is not None],
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: ddp.zero_grad(set_to_none=False),
        lambda: ddp.clip_grad_norm_(1.0, norm_type=1.0),
        lambda: parameters[0].grad.numpy(),  # type: ignore[union-attr]
        plain.step,
    ]
    for step, read in enumerate(ways):
        backward_(step)
        stand_in = parameters[0].grad
        assert stand_in is not None
        assert stand_in.shape == parameters[0].shape
        assert "own part" in repr(stand_in)
        with pytest.raises(ConfigError, match=r"this rank has a part|2-norm|are shared by 2 ranks"):
            read()
        assert ddp.grad_norm() == expected.grad_norm()
        step_and_compare()
    with pytest.raises(ConfigError, match="this rank has a part"):  # without zero_grad()
        loss(ddp, rank).backward()
    with pytest.raises(ConfigError, match="not there any more"):
        optimizer.step()
    for step in range(2):
        backward_(step)
        step_and_compare()


@kept_ranks(2, group="gloo")
def test_gradients_are_freed_when_they_are_reduced(rank: int) -> None:
    """There is memory for one copy of the gradients, and no backward allocates a second one."""
    torch.manual_seed(0)
    sizes = (40, 300, 40, 300, 40)  # the core copies some of the gradients, and torch the others
    layers = [nn.Linear(first, second) for first, second in pairwise(sizes)]
    ddp, optimizer = scattering(nn.Sequential(*layers))
    parameters = list(ddp.parameters())
    seen: list[tuple[torch.nn.Parameter, StorageWeakRef]] = []

    def look(parameter: torch.Tensor) -> None:
        for other, memory in seen:
            assert memory.expired()
            assert "own part" in repr(other.grad)
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()  # this rank's whole gradient of this backward
        seen.append((parameter, StorageWeakRef(parameter.grad.untyped_storage())))  # type: ignore[arg-type]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        optimizer.zero_grad()
        seen.clear()
        ddp(torch.full((2, 40), 1.0 + rank + step)).square().mean().backward()
        assert len(seen) == len(parameters)
        optimizer.step()


class CheckpointedTwice(nn.Module):
    """In one backward, its layer gets a gradient from each of two recomputations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=reentrant)
        return x


@kept_ranks(2, group="gloo")
def test_a_second_gradient_in_one_backward(rank: int) -> None:
    """It is refused when it arrives; in a static graph, and without reentrant checkpoints, it counts."""
    x = torch.full((2, 9), 1.0 + rank, requires_grad=True)

    def train(ddp: Any, optimizer: Any, reentrant: bool) -> list[torch.Tensor]:
        for _ in range(3):
            optimizer.zero_grad()
            ddp(x, reentrant).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in ddp.parameters()]

    expected = DistributedDataParallel(CheckpointedTwice())
    bits = train(expected, optim.SGD(expected.parameters(), lr=0.1), False)
    assert all(map(same_bits, train(*scattering(CheckpointedTwice(), static_graph=True), True), bits))
    ddp, optimizer = scattering(CheckpointedTwice())
    with pytest.raises(ConfigError, match=r"this rank has a part[^?]*use_reentrant=False"):
        ddp(x, True).square().mean().backward()
    assert all(map(same_bits, train(ddp, optimizer, False), bits))  # all ranks raised, and can continue


class Branches(nn.Module):
    """One of its parameters is used only if `uses_all`."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(200))

    def forward(self, x: float, uses_all: bool = True) -> torch.Tensor:
        return x * (self.always.square().sum() + (self.sometimes.square().sum() if uses_all else 0))


@kept_ranks(2, group="gloo")
def test_unused_and_frozen_parameters_and_uncleared_gradients(rank: int) -> None:
    """As with whole gradients; what is left of an earlier backward is refused."""

    def train_without_clearing() -> None:
        ddp, optimizer = scattering(Branches(), find_unused_parameters=True)
        ddp(1.0).backward()
        optimizer.step()
        ddp.module.always.grad = None
        with pytest.raises(ConfigError, match="gradient of 'sometimes' once more"):
            ddp(1.0, uses_all=False).backward()
        with pytest.raises(ConfigError, match="not there any more"):
            optimizer.step()

    results = [train_cleared(reduce, rank) for reduce in ("mean", "scatter")]
    assert all(map(same_bits, *results))
    train_without_clearing()
    ddp, optimizer = scattering(Branches())
    with pytest.raises(UnusedParameterError, match="sometimes"):
        ddp(1.0, uses_all=False).backward()
    optimizer.zero_grad()
    ddp(1.0).backward()
    optimizer.step()
    ddp.check_replicas()


def train_cleared(reduce: str, rank: int) -> list[torch.Tensor]:
    """Train with parameters that are unused on one rank, or on all, or frozen for a while."""
    ddp = DistributedDataParallel(Branches(), reduce=reduce, find_unused_parameters=True)
    optimizer = ShardedOptimizer(ddp.parameters(), optim.AdamW, lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        ddp.module.always.requires_grad_(step != 3)
        uses_all = step == 3 or (step < 4 and step % 2 == rank)
        ddp(0.5 + rank, uses_all).backward()
        assert (ddp.module.sometimes.grad is None) is (step >= 4)
        assert (ddp.module.always.grad is None) is (step == 3)
        optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


@kept_ranks(2, group="gloo")
def test_shards_follow_the_optimizers(rank: int) -> None:
    """Optimizers may be made before wrapping, for some of the parameters each, and again."""
    expected = DistributedDataParallel(small())
    whole = optim.AdamW(expected.parameters(), lr=0.01)

    def step(ddp: Any, number: int, *optimizers: Any) -> None:
        for model, theirs in ((ddp, optimizers), (expected, (whole,))):
            for optimizer in theirs:
                optimizer.zero_grad()
            loss(model, rank, number).backward()
            for optimizer in theirs:
                optimizer.step()
        assert all(map(same_bits, ddp.parameters(), expected.parameters())), number

    module = small()
    before = ShardedOptimizer(module.parameters(), optim.AdamW, lr=0.01)
    ddp = DistributedDataParallel(module, reduce="scatter")
    for number in range(2):
        step(ddp, number, before)

    module.load_state_dict(expected.module.state_dict())
    whole = optim.AdamW(expected.parameters(), lr=0.01)
    first, *rest = module.parameters()
    parts = [ShardedOptimizer(each, optim.AdamW, lr=0.01) for each in (rest, [first])]
    for number in range(2, 4):
        step(ddp, number, *parts)
    before.zero_grad()
    loss(ddp, rank).backward()
    with pytest.raises(ConfigError, match="another optimizer"):
        before.step()
    parts[0].zero_grad()
    parts[1].zero_grad()

    ddp = DistributedDataParallel(small(), reduce="scatter")
    with pytest.raises(ConfigError, match=r"no ShardedOptimizer has some parameters[^?]*0.weight, 0.bias"):
        ddp(torch.ones(1, 9))
    with torch.no_grad():
        ddp(torch.ones(1, 9))
    expected = DistributedDataParallel(small())
    whole = optim.AdamW(expected.parameters(), lr=0.01)
    head, *others = ddp.parameters()
    optimizer = ShardedOptimizer([head], optim.AdamW, lr=0.01)
    with pytest.raises(ConfigError, match=r"has some parameters[^?]*0.bias, 2.weight, 2.bias"):
        ddp(torch.ones(1, 9))
    optimizer.add_param_group({"params": others})
    for number in range(3):
        step(ddp, number, optimizer)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with pytest.raises(ConfigError, match="among other ranks than those that train the model"):
        ShardedOptimizer(ddp.parameters(), optim.SGD, process_group=alone, lr=0.1)


@kept_ranks(2, group="gloo")
def test_options_that_exclude_it_are_refused_on_every_rank(rank: int) -> None:
    module = small()
    first, *_, last = module.named_parameters()
    for options in (
        {"gradient_as_bucket_view": True},
        {"reduce_through": "group"},
        {"mixed_precision": Reduced()},
        {"local_sgd": LocalSGD(every=2)},
        {"delay_all_reduce_named_params": [first], "param_to_hook_all_reduce": last[1]},
    ):
        with pytest.raises(ConfigError, match=r"reduce='scatter'|reduce_through"):
            scattering(module, **options)
    with pytest.raises(ConfigError, match="scatter"):
        DistributedDataParallel(small(), reduce="sum")
    with pytest.raises(ConfigError, match=r"dense gradients[^?]*weight"):
        DistributedDataParallel(nn.Embedding(5, 3, sparse=True), reduce="scatter")
    ddp, _ = scattering()
    with pytest.raises(ConfigError, match="communication hook"):
        ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ConfigError, match="Join"), ddp.join():
        pass
    converted, _ = scattering()
    converted.module.bfloat16()
    with pytest.raises(ConfigError, match="after it had been wrapped"):
        converted(torch.ones(2, 9).bfloat16()).sum().backward()
    loss(ddp, rank).backward()
    other = DistributedDataParallel(ddp.module)
    with pytest.raises(ConfigError, match="another wrapped model"):
        loss(ddp, rank)
    del other
    with pytest.raises(PacelineError):
        DistributedDataParallel(small(), reduce="scatter" if rank else "mean")


class Reduced:
    param_dtype, reduce_dtype, buffer_dtype = None, torch.bfloat16, None


@kept_ranks(2, group="gloo")
def test_uneven_data_infinities_and_scaled_losses(rank: int) -> None:
    def uneven(reduce: str) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(small(), reduce=reduce, static_graph=True)
        optimizer = ShardedOptimizer(ddp.parameters(), optim.AdamW, lr=0.01)
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
        ddp.finish(optimizer.step)
        if reduce == "scatter":  # the rank's last gradients are not cleared yet
            with pytest.raises(ConfigError, match="this rank has a part"):
                loss(ddp, rank).backward()
        optimizer.zero_grad()
        loss(ddp, rank).backward()
        optimizer.step()
        return [parameter.detach() for parameter in ddp.parameters()]

    def scaled(reduce: str, fused: bool) -> tuple[list[torch.Tensor], float]:
        ddp = DistributedDataParallel(small(), reduce=reduce, nonfinite="ignore")
        scatters = reduce == "scatter"
        make: Any = ShardedOptimizer if scatters else (lambda params, cls, **options: cls(params, **options))
        optimizer = make(ddp.parameters(), optim.AdamW, lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(5):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 and rank == 1 else 1.0
            scaler.scale(loss(ddp, rank, step) * factor).backward()
            assert bool(ddp.nonfinite()) is (step == 2)
            if step == 3 and not fused:
                norm = ddp.grad_norm()
                scaler.unscale_(optimizer)
                if scatters:
                    assert float(ddp.clip_grad_norm_(1e9)) == pytest.approx(norm / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach() for parameter in ddp.parameters()], scaler.get_scale()

    assert all(map(same_bits, uneven("mean"), uneven("scatter")))
    for fused in (False, True):
        (ours, scale), (expected, same) = (scaled(reduce, fused) for reduce in ("scatter", "mean"))
        assert scale == same == 2.0**9
        assert all(map(same_bits, ours, expected)), fused

    ddp, optimizer = scattering(nonfinite="raise")
    with pytest.raises(NonFiniteGradientError):
        (loss(ddp, rank) * (float("nan") if rank else 1)).backward()
    with pytest.raises(ConfigError, match="not there any more"):
        optimizer.step()
    optimizer.zero_grad()
    loss(ddp, rank).backward()
    optimizer.step()
    ddp.check_replicas()
