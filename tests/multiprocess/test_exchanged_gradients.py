"""Weighted gradients that norms and losses exchange between ranks, compared with one process in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel, ShardedOptimizer, SyncBatchNorm
from tests.harness import kept_ranks
from tests.several_hosts import be_on_host

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
SIZES = {2: [1, 4], 3: [1, 4, 2]}
WEIGHTS = {2: [2.5, 0.5], 3: [2.5, 0.5, 7.0]}


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 2),
        nn.BatchNorm1d(2, affine=False),
    ).double()


def rows(sizes: Sequence[int], seed: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(sizes), 3, dtype=torch.float64, generator=generator).split(list(sizes))


def plain_loss(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).pow(2).mean() + output.pow(3).sum() / 7


def expect(
    model: nn.Module, steps: Sequence[tuple[Sequence[torch.Tensor], Sequence[float]]], call: Any = None
) -> list[torch.Tensor]:
    """Returns the gradients of sum(w * loss) / sum(w) over all ranks and steps, of one process.

    Each step has the ranks' batches and weights. Norms see the batches of all ranks of a step at once.
    """
    alone = copy.deepcopy(model)
    alone.zero_grad()
    total = sum(sum(weights) for _, weights in steps)
    for parts, weights in steps:
        whole = torch.cat(list(parts))
        output = alone(whole) if call is None else call(alone, whole)
        outputs = output.split([len(part) for part in parts])
        losses = [plain_loss(part) * weight for part, weight in zip(outputs, weights) if weight]
        (torch.stack(losses).sum() / total).backward()
    return [parameter.grad for parameter in alone.parameters()]


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)), **options)


def assert_gradients(ddp: nn.Module, expected: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(ddp.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("path", ["memory", "group"])
@pytest.mark.parametrize("world_size", [2, 3])
@kept_ranks("world_size", group="gloo")
def test_a_norm_applies_the_weights_to_its_exchanges(rank: int, path: str, world_size: int) -> None:
    model, parts, weights = normed(), rows(SIZES[world_size]), WEIGHTS[world_size]
    expected = expect(model, [(parts, weights)])
    own, weight = parts[rank], weights[rank]

    for how in ("argument", "function", "scope", "scope of backward", "once"):
        given = {"argument": weight, "function": lambda _: weight}.get(how)
        ddp = wrap(model, reduce_through=path, weight=given)
        scope = ddp.weight(weight) if how == "scope" else contextlib.nullcontext()
        with scope:
            loss = plain_loss(ddp(own))
            if how == "scope of backward":
                with ddp.weight(weight):
                    loss.backward()
            else:
                if how == "once":
                    ddp.weight(weight)
                loss.backward()
        assert_gradients(ddp, expected)
        if given is None:  # the weight does not apply to the next backward
            ddp.zero_grad()
            plain_loss(ddp(own)).backward()
            assert_gradients(ddp, expect(model, [(parts, [1.0] * world_size)]))


@pytest.mark.parametrize("form", ["as it is", "deterministic", "sharded", "sharded over the group"])
@kept_ranks(4, group="gloo")
def test_a_norm_applies_the_weights_between_hosts(rank: int, form: str) -> None:
    be_on_host(rank // 2)
    options = {"deterministic": {"deterministic": "world"}, "sharded over the group": GROUP}.get(form, {})
    optimizer = options if form.startswith("sharded") else None
    for step, (model, parts, weights) in enumerate(cases(4)):
        ddp = wrap(model, weight=weights[rank], **options)
        assert ddp.gradient_path == ("group" if options is GROUP else "hosts")
        assert_trained(ddp, model, parts, weights, rank, optimizer, has_micro_batches=step == 1)


@pytest.mark.parametrize("reduce", ["scatter", "all"])
@kept_ranks(3, group="gloo")
def test_a_norm_applies_the_weights_for_a_sharded_optimizer(rank: int, reduce: str) -> None:
    options = {"reduce": "scatter"} if reduce == "scatter" else {}
    for step, (model, parts, weights) in enumerate(cases(3)):
        ddp = wrap(model, weight=weights[rank], **options)
        assert_trained(ddp, model, parts, weights, rank, {}, has_micro_batches=step == 1)


GROUP = {"reduce_through": "group"}


def cases(world_size: int) -> list[tuple[nn.Module, tuple[torch.Tensor, ...], list[float]]]:
    """Returns models, the ranks' batches, and the ranks' weights."""
    sizes, weights = [1, 4, 2, 3][:world_size], [2.5, 0.5, 7.0, 1.0][:world_size]
    return [(normed(), rows(sizes, seed), weights[seed:] + weights[:seed]) for seed in range(2)]


def assert_trained(
    ddp: DistributedDataParallel,
    model: nn.Module,
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    rank: int,
    options: dict[str, Any] | None,
    *,
    has_micro_batches: bool,
) -> None:
    """Compares a step with one process.

    Checks gradients and an SGD step if `options` is None, else the step of a ShardedOptimizer with `options`.
    """
    if options is None:
        optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    else:
        optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, **options)
    steps = [(parts, weights)] * (1 + has_micro_batches)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    for number in range(len(steps)):
        is_last = number == len(steps) - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            plain_loss(ddp(parts[rank])).backward()
    expected = expect(model, steps)
    if options is None:
        assert_gradients(ddp, expected)
    optimizer.step()
    for parameter, old, gradient in zip(ddp.parameters(), before, expected, strict=True):
        assert_close(parameter.detach(), old - 0.1 * gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("path", ["memory", "group"])
@kept_ranks(3, group="gloo")
def test_a_norm_of_16_bits_applies_the_weights(rank: int, path: str) -> None:
    """Tolerances fit bfloat16's 8 significant bits. Without weights, the error would be much larger."""
    model = normed().bfloat16()
    sizes, weights = [8, 24, 16], [2.5, 0.5, 7.0]
    parts = [part.bfloat16() for part in rows(sizes)]
    expected = expect(copy.deepcopy(model).double(), [([part.double() for part in parts], weights)])
    ddp = wrap(model, reduce_through=path, weight=weights[rank])
    plain_loss(ddp(parts[rank]).float()).backward()
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for parameter, gradient in zip(ddp.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert_close(parameter.grad.double(), gradient, rtol=0.05, atol=0.02 * largest)


@pytest.mark.parametrize("world_size", [2, 3])
@kept_ranks("world_size", group="gloo")
def test_micro_batches_and_empty_ones(rank: int, world_size: int) -> None:
    model = normed()
    sizes = [SIZES[world_size], SIZES[world_size][::-1], [0, 3, 2][:world_size]]
    steps = [(rows(size, seed), [float(each) for each in size]) for seed, size in enumerate(sizes)]
    ddp = wrap(model)
    for number, (parts, weights) in enumerate(steps):
        is_last = number == len(steps) - 1
        with contextlib.nullcontext() if is_last else ddp.no_sync(), ddp.weight(weights[rank]):
            plain_loss(ddp(parts[rank])).backward()
    assert_gradients(ddp, expect(model, steps))


@kept_ranks(2, group="gloo")
def test_a_rank_of_weight_0_has_an_empty_batch_or_every_rank_raises(rank: int) -> None:
    model = normed()
    ddp = wrap(model)
    parts = rows([5, 0])
    with ddp.weight(5 * (1 - rank)):
        plain_loss(ddp(parts[rank])).backward()
    assert_gradients(ddp, expect(model, [(parts, [5.0, 0.0])]))
    parts = rows([3, 2])
    for micro_batches in (1, 2):
        ddp.zero_grad()
        loss = plain_loss(ddp(parts[rank]))
        with pytest.raises(ConfigError, match=r"weigh 0.*\n.*rank 1 of 2"):
            if micro_batches == 2:
                with ddp.no_sync(), ddp.weight(1 - rank):
                    plain_loss(ddp(parts[rank])).backward()
            with ddp.weight(1 - rank if micro_batches == 1 else 1):
                loss.backward()
    ddp.zero_grad()
    ddp.weight(0)  # on all ranks: no rank's loss is ignored
    plain_loss(ddp(parts[rank])).backward()
    assert all(not parameter.grad.any() for parameter in ddp.parameters())
    ddp.zero_grad()
    with ddp.weight(1 + rank):
        plain_loss(ddp(parts[rank])).backward()
    assert_gradients(ddp, expect(model, [(parts, [1.0, 2.0])]))


@pytest.mark.parametrize("reentrant", [False, True])
@kept_ranks(2, group="gloo")
def test_a_norm_that_is_recomputed(rank: int, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = normed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](x)
            hidden = checkpoint(self.layers[1], hidden, use_reentrant=reentrant)
            return checkpoint(self.layers[2:], hidden, use_reentrant=reentrant)

    model, parts = Checkpointed(), rows([3, 4])
    expected = expect(model.layers, [(parts, [3.0, 1.0])])
    ddp = wrap(model, weight=lambda x: 3 - 2 * rank)
    plain_loss(ddp(parts[rank])).backward()
    assert_gradients(ddp, expected)


@kept_ranks(2, group="gloo")
def test_a_norm_outside_of_the_wrapper(rank: int) -> None:
    model, parts, weights = normed(), rows([3, 4]), [3.0, 1.0]
    expected = expect(model, [(parts, weights)])
    inner = wrap(model[:4])
    outer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model[4:]))
    with inner.weight(weights[rank]):
        plain_loss(outer(inner(parts[rank]))).backward()
    assert_gradients(inner, expected)
    # A norm whose graph has no weighted model uses no weights.
    bare = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
    inner.weight(weights[rank])
    plain_loss(bare(parts[rank])).backward()
    for parameter in bare.parameters():
        dist.all_reduce(parameter.grad)
    alone = expect(model, [(parts, [1.0, 1.0])])
    for parameter, gradient in zip(bare.parameters(), alone, strict=True):
        assert_close(parameter.grad, gradient * 2)


@kept_ranks(2, group="gloo")
def test_several_models_in_one_backward(rank: int) -> None:
    model, parts = normed(), rows([3, 4])
    first, second = wrap(model[:2]), wrap(model[2:])
    expected = expect(model, [(parts, [3.0, 1.0])])
    with first.weight(3 - 2 * rank), second.weight(3 - 2 * rank):
        plain_loss(second(first(parts[rank]))).backward()
    assert_gradients(nn.ModuleList([first, second]), expected)
    # With different weights, each model would need its own sums.
    first.zero_grad(), second.zero_grad()
    first.weight(1 + rank), second.weight(3 - 2 * rank)
    with pytest.raises(ConfigError, match="other weights"):
        plain_loss(second(first(parts[rank]))).backward()


@pytest.mark.parametrize("path", ["memory", "group"])
@kept_ranks(2, group="gloo")
def test_norms_of_a_frozen_model_apply_the_weights_of_the_other(rank: int, path: str) -> None:
    """Like the generator's step of a GAN: the discriminator is frozen, and its forward has no weight."""
    model, parts = normed(), rows([3, 4])
    expected = expect(model, [(parts, [3.0, 4.0])])[:2]
    options = {"weight": lambda x: float(len(x)), "reduce_through": path}
    first, second = wrap(model[:1], **options), wrap(model[1:], **options)
    second.requires_grad_(False)
    plain_loss(second(first(parts[rank]))).backward()
    assert_gradients(first, expected)


@kept_ranks(2, group="gloo")
def test_a_gradient_penalty_with_weights(rank: int) -> None:
    model, parts, weights = normed(), rows([3, 4]), [3.0, 1.0]

    def penalised(module: nn.Module, x: torch.Tensor, part: slice) -> torch.Tensor:
        x = x.clone().requires_grad_()
        output = module(x)
        (slope,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        return plain_loss(output[part]) + (slope[part].norm(dim=1) - 1).square().mean()

    alone = copy.deepcopy(model)
    whole = torch.cat(parts)
    for part, weight in ((slice(0, 3), 3.0), (slice(3, 7), 1.0)):
        (penalised(alone, whole, part) * weight / 4).backward()
    ddp = wrap(model)
    with ddp.weight(weights[rank]):
        penalised(ddp, parts[rank], slice(None)).backward()
    assert_gradients(ddp, [parameter.grad for parameter in alone.parameters()])


@kept_ranks(2, group="gloo")
def test_the_weight_of_a_failed_backward_does_not_apply_any_more(rank: int) -> None:
    """A norm of another model, which recomputes its forward in backward, must not use it."""
    model, parts = normed(), rows([3, 4])
    broken = wrap(model[:1])
    broken.module[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), broken.weight(1 + rank):
        broken(parts[rank]).sum().backward()
    norm = SyncBatchNorm(4).double()
    layers = [nn.Sequential(copy.deepcopy(model[0]), each) for each in (nn.BatchNorm1d(4).double(), norm)]
    whole, own = layers[0](torch.cat(parts)), checkpoint(layers[1], parts[rank], use_reentrant=False)
    own.pow(3).sum().backward()
    whole.pow(3).sum().backward()
    dist.all_reduce(layers[1][0].weight.grad)
    assert_close(layers[1][0].weight.grad, layers[0][0].weight.grad, rtol=1e-9, atol=1e-11)


class GatherLayer(torch.autograd.Function):
    """The all_gather with gradients that many contrastive losses use."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, x)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient).chunk(dist.get_world_size())[dist.get_rank()]


def summed(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient)
    return gradient


class Shortened(torch.autograd.Function):
    """Clamps its gradient, without an exchange."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1e9, 1e9)


def gathered_by(how: str, x: torch.Tensor) -> torch.Tensor:
    if how == "the user's":
        return GatherLayer.apply(x)
    if how == "torch.distributed.nn":
        from torch.distributed.nn.functional import all_gather

        return torch.cat(all_gather(x))
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


@pytest.mark.parametrize("how", ["the user's", "torch.distributed.nn", "functional collectives"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@kept_ranks(2, group="gloo")
def test_foreign_exchanges_are_refused_with_weights_and_correct_without(rank: int, how: str) -> None:
    model, parts = normed()[:1], rows([3, 3])

    def contrast(output: torch.Tensor) -> torch.Tensor:
        both = gathered_by(how, output)
        return (Shortened.apply(output) @ both.T).square().mean()

    alone = copy.deepcopy(model)
    whole = alone(torch.cat(parts))
    losses = [(part @ whole.T).square().mean() for part in whole.split(3)]
    (losses[0] * 0.75 + losses[1] * 0.25).backward()
    expected = [parameter.grad for parameter in alone.parameters()]

    ddp = wrap(model)
    plain_loss(Shortened.apply(ddp(parts[rank]))).backward()  # no exchange in this graph
    ddp.zero_grad()
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*rank 0 of 2") as caught:
        ddp.weight(3 if rank == 0 else 1)  # the weights differ
        contrast(ddp(parts[rank])).backward()
    assert "multiply the loss" in str(caught.value)
    ddp.zero_grad()
    (contrast(ddp(parts[rank])) * (1.5 - rank)).backward()
    assert_gradients(ddp, expected)
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
        with ddp.no_sync(), ddp.weight(2 + rank):
            contrast(ddp(parts[rank])).backward()
        with ddp.weight(2):
            plain_loss(ddp(parts[rank])).backward()
    ddp.zero_grad()
    with ddp.weight(2 + rank):  # the next step has no exchange
        plain_loss(ddp(parts[rank])).backward()
    assert_gradients(ddp, expect(model, [(parts, [2.0, 3.0])]))


class Deep(nn.Module):
    """Many layers, with a function near the input that may exchange gradients.

    Attributes:
        inner: This function; it gets the output of the second layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(8)]).double()
        self.inner: Callable[[torch.Tensor], torch.Tensor] = Shortened.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                x = self.inner(x)
        return x


class SummedGradient(torch.autograd.Function):
    """Sums its gradient over ranks; its forward exchanges nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient.clone())


def exchanging_in_a_closure(exchange: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    class Exchanging(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return exchange(gradient.clone())

    return Exchanging.apply


@torch.library.custom_op("paceline_tests::summed_gradient", mutates_args=())
def summed_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("paceline_tests::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


summed_gradient.register_fake(torch.empty_like)
sum_over_ranks.register_fake(torch.empty_like)
summed_gradient.register_autograd(lambda ctx, gradient: torch.ops.paceline_tests.sum_over_ranks(gradient))
EXCHANGING = {
    "in a function": SummedGradient.apply,
    "in a closure": exchanging_in_a_closure(summed),
    "in an operator": summed_gradient,
}


@pytest.mark.parametrize("how", list(EXCHANGING))
@kept_ranks(2, group="gloo")
def test_an_exchange_that_is_switched_on_later_is_refused(rank: int, how: str) -> None:
    model, parts = Deep(), rows([3, 3])
    ddp = DistributedDataParallel(model, weight=2 + 2 * rank)
    for _ in range(2):
        plain_loss(ddp(parts[rank])).backward()
        ddp.zero_grad()
        model.inner = EXCHANGING[how]  # the graph keeps its number of nodes
        with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
            plain_loss(ddp(parts[rank])).backward()
        ddp.zero_grad()
        model.inner = Shortened.apply


@kept_ranks(2, group="gloo")
def test_an_exchange_that_is_switched_on_later_in_a_block_that_is_recomputed(rank: int) -> None:
    model, parts = Deep(), rows([3, 3])
    inner = model.layers[1]
    model.layers[1] = nn.Identity()

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: exchange(inner(x)), x, use_reentrant=True)

    exchange: Callable[[torch.Tensor], torch.Tensor] = Shortened.apply
    model.inner, model.other = recomputed, inner
    ddp = DistributedDataParallel(model, weight=2 + 2 * rank)
    plain_loss(ddp(parts[rank])).backward()
    ddp.zero_grad()
    exchange = SummedGradient.apply
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
        plain_loss(ddp(parts[rank])).backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch.compile
@kept_ranks(2, group="gloo")
def test_compiled_code_is_refused_only_if_it_exchanges_gradients(rank: int) -> None:
    model, parts = Deep(), rows([3, 3])
    expected = expect(model, [(parts, [2.0, 4.0])])
    for backend, how in (("eager", None), ("eager", "in a function"), ("aot_eager", "in an operator")):
        module = copy.deepcopy(model)
        if how is not None:
            module.inner = EXCHANGING[how]
        ddp = DistributedDataParallel(torch.compile(module, backend=backend), weight=2 + 2 * rank)
        if how is None:
            plain_loss(ddp(parts[rank])).backward()
            assert_gradients(ddp, expected)
            continue
        with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
            plain_loss(ddp(parts[rank])).backward()


@kept_ranks(2, group="gloo")
def test_exchanges_are_correct_if_the_weights_of_a_micro_batch_are_equal(rank: int) -> None:
    model, parts = normed()[:1], rows([3, 3])

    def contrast(output: torch.Tensor, everything: torch.Tensor) -> torch.Tensor:
        return (output @ everything.T).square().mean()

    several = [(True, [0.1, 0.1]), (False, [2.0, 5.0]), (True, [7.0, 7.0])]
    for micro_batches in ([(True, [3.0, 3.0])], several):
        alone = copy.deepcopy(model)
        total = sum(sum(weights) for _, weights in micro_batches)
        ddp = wrap(model)
        for number, (is_gathered, weights) in enumerate(micro_batches):
            whole = alone(torch.cat(parts))
            losses = [contrast(part, whole if is_gathered else part) for part in whole.split(3)]
            sum(weight / total * loss for weight, loss in zip(weights, losses)).backward()
            is_last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync(), ddp.weight(weights[rank]):
                output = ddp(parts[rank])
                contrast(output, GatherLayer.apply(output) if is_gathered else output).backward()
        assert_gradients(ddp, [parameter.grad for parameter in alone.parameters()])
    # The ranks' total weights are equal, but not those of each micro-batch.
    ddp.zero_grad()
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
        for weight, is_last in ((2 + rank, False), (3 - rank, True)):
            with contextlib.nullcontext() if is_last else ddp.no_sync(), ddp.weight(weight):
                output = ddp(parts[rank])
                contrast(output, GatherLayer.apply(output)).backward()


@kept_ranks(2, group="gloo")
def test_an_exchange_in_a_block_that_is_recomputed_is_found(rank: int) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.exchange, self.first(x), use_reentrant=True)

        def exchange(self, x: torch.Tensor) -> torch.Tensor:
            return GatherLayer.apply(self.second(x))

    ddp = wrap(Block())
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
        ddp.weight(2 + rank)
        ddp(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("needs", [[True, False], [False, True], [False, False]])
@kept_ranks(2, group="gloo")
def test_inputs_that_need_a_gradient_on_some_ranks_only(rank: int, needs: list[bool]) -> None:
    torch.manual_seed(3)
    for affine in (True, False):
        model = nn.Sequential(nn.BatchNorm1d(3, affine=affine), nn.Linear(3, 2)).double()
        parts = rows([3, 4])
        whole = torch.cat(parts).requires_grad_()
        alone = copy.deepcopy(model)
        outputs = alone(whole).split([3, 4])
        (sum(plain_loss(output) for output in outputs) / 2).backward()
        ddp = wrap(model)
        own = parts[rank].clone().requires_grad_(needs[rank])
        plain_loss(ddp(own)).backward()
        assert_gradients(ddp, [parameter.grad for parameter in alone.parameters()])
        assert (own.grad is not None) == needs[rank]
        if own.grad is not None:
            assert_close(own.grad / 2, whole.grad.split([3, 4])[rank])


@kept_ranks(2, group="gloo")
def test_a_rank_without_gradients_is_named_at_once(rank: int) -> None:
    norm = SyncBatchNorm(3).double()
    own = rows([3, 4])[rank].requires_grad_()
    with torch.set_grad_enabled(rank == 0):
        output = norm(own)
    if rank == 0:
        with pytest.raises(ConfigError, match=r"rank 1.*without"):
            output.sum().backward()
    dist.barrier()
