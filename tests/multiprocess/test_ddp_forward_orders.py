"""A backward is averaged if its own forward ran outside no_sync(), whatever other forwards ran in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import SkippedPassError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.forward_orders import (
    EPISODES,
    ORDERS,
    SKIPS,
    expected,
    expected_of,
    run,
    run_alone,
)


class Scale(nn.Module):
    """A model with two weights, so that a backward has more than one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, *, raises: bool = False) -> torch.Tensor:
        if raises:
            raise MemoryError
        return self.a.sum() * x + self.b.sum() * x

    def detached(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).detach()


OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"reduce_through": "group"}],
    ids=["pointers", "views", "group"],
)


@OPTIONS
@kept_ranks(2, group="gloo")
def test_a_backward_is_averaged_as_its_forward_asks(rank: int, options: dict[str, Any]) -> None:
    for order in ORDERS:
        ddp = DistributedDataParallel(Scale(), **options)

        def backward(outputs: Sequence[torch.Tensor]) -> None:
            torch.stack(list(outputs)).sum().backward()  # type: ignore[no-untyped-call]

        run(order, rank, lambda value: ddp(torch.tensor(value)), backward, ddp.no_sync)  # noqa: B023
        wanted = float(expected(order, 2)[rank])
        for parameter in ddp.parameters():
            assert_close(parameter.grad, torch.full_like(parameter, wanted), msg=f"{order}: {parameter.grad}")


def run_one(ddp: DistributedDataParallel, order: str, rank: int) -> None:
    def fail(value: float) -> None:
        with pytest.raises(MemoryError):
            ddp(torch.tensor(value), raises=True)

    def backward(outputs: Sequence[torch.Tensor]) -> None:
        torch.stack(list(outputs)).sum().backward()  # type: ignore[no-untyped-call]

    run_alone(order, rank, lambda value: ddp(torch.tensor(value)), backward, fail)


@OPTIONS
@kept_ranks(2, group="gloo")
def test_ranks_may_make_episodes_of_different_lengths(rank: int, options: dict[str, Any]) -> None:
    """Ranks may also leave different outputs out of their losses."""
    for orders in EPISODES:
        ddp = DistributedDataParallel(Scale(), **options)
        run_one(ddp, orders[rank], rank)
        for parameter in ddp.parameters():
            wanted = torch.full_like(parameter, expected_of(orders))
            assert_close(parameter.grad, wanted, msg=f"{orders}: {parameter.grad}")


@OPTIONS
@kept_ranks(2, group="gloo")
def test_a_rank_that_skips_a_backward_is_reported_by_all(rank: int, options: dict[str, Any]) -> None:
    for orders in SKIPS:
        ddp = DistributedDataParallel(Scale(), **options)
        with pytest.raises(SkippedPassError) as caught:
            run_one(ddp, orders[rank], rank)
        made = [len(order) - 1 for order in orders]
        assert f"rank 0: {made[0]} forward" in str(caught.value)
        assert f"rank 1: {made[1]} forward" in str(caught.value)
        ddp.zero_grad()
        run_one(ddp, "Ff", rank)  # training continues on all ranks
        assert_close(ddp.module.a.grad, torch.tensor([expected_of(["Ff", "Ff"])]))


@kept_ranks(2, group="gloo")
def test_a_rank_that_runs_an_extra_backward_is_reported_by_all(rank: int) -> None:
    ddp = DistributedDataParallel(Scale())
    loss = ddp(torch.tensor(1.0 + rank))
    loss.backward(retain_graph=True)
    with pytest.raises(SkippedPassError, match="Rank 1 of 2 skipped") as caught:
        if rank == 0:
            loss = ddp(torch.tensor(1.0))
        loss.backward()
    assert "rank 1: 0 forwards" in str(caught.value) and "rank 0: 1 forward" in str(caught.value)
    assert "a backward that some ranks alone make" in str(caught.value)


@kept_ranks(2, group="gloo")
def test_a_rank_that_forgot_to_go_back_to_training_is_reported_by_all(rank: int) -> None:
    ddp = DistributedDataParallel(Scale())
    ddp.train(rank == 1)
    with pytest.raises(SkippedPassError, match="in evaluation mode on some ranks only"):
        ddp(torch.tensor(1.0)).backward()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor, *, is_sampled: bool = False) -> Any:
        found = torch.distributions.Independent(torch.distributions.Normal(self.logits(x), 1.0), 1)
        return found.sample() if is_sampled else found


@pytest.mark.parametrize("variant", ["all", "some", "acts first"])
@kept_ranks(2, group="gloo")
def test_episodes_of_a_policy(rank: int, variant: str) -> None:
    """Policy gradients: forwards return distributions, or sampled actions that have no backward."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Policy())
    alone = [Policy() for _ in range(2)]
    for each in alone:
        each.load_state_dict(ddp.module.state_dict())

    def loss_of(policy: nn.Module, length: int) -> torch.Tensor:
        states = torch.arange(2.0 * length).reshape(length, 2)
        if variant == "acts first":
            for state in states:
                policy(state, is_sampled=True)
            return policy(states).log_prob(torch.zeros(length, 3)).sum()
        return torch.stack([policy(state).log_prob(torch.zeros(3)) for state in states]).sum()

    for _ in range(2):
        loss = loss_of(ddp, 2 + 3 * rank)
        loss.backward(inputs=list(ddp.parameters()) if variant == "some" else None)
        for number, each in enumerate(alone):
            loss_of(each, 2 + 3 * number).backward()
    for name, parameter in ddp.module.named_parameters():
        wanted = torch.stack([each.get_parameter(name).grad for each in alone]).mean(0)
        assert_close(parameter.grad, wanted)


@kept_ranks(2, group="gloo")
def test_a_skipped_backward_is_reported_after_one_that_asked_only_for_the_inputs_gradient(rank: int) -> None:
    ddp = DistributedDataParallel(Scale())
    x = torch.tensor(1.0, requires_grad=True)
    if rank == 0:  # it reaches no parameter, so this rank skips a backward
        ddp(x).backward(inputs=[x])
    loss = ddp(torch.tensor(1.0))
    with pytest.raises(SkippedPassError):
        loss.backward(inputs=list(ddp.parameters()))


@kept_ranks(2, group="gloo")
def test_a_forward_that_raised_adds_no_weight(rank: int) -> None:
    ddp = DistributedDataParallel(Scale(), weight=lambda x, **_: float(x))
    with pytest.raises(MemoryError):
        ddp(torch.tensor(5.0), raises=True)
    ddp(torch.tensor(1.0 + 2.0 * rank)).backward()
    assert_close(ddp.module.a.grad, torch.tensor([(1.0 * 1.0 + 3.0 * 3.0) / 4.0]))
    ddp.zero_grad()
    output = ddp(torch.tensor(1.0 + 2.0 * rank))
    assert not ddp.detached(torch.tensor(9.0)).requires_grad  # it bypasses the wrapper's forward
    output.backward()
    assert_close(ddp.module.a.grad, torch.tensor([(1.0 * 1.0 + 3.0 * 3.0) / 4.0]))


@kept_ranks(2, group="gloo")
def test_one_rank_may_run_an_extra_forward_in_no_sync(rank: int) -> None:
    """One rank runs a forward in no_sync() between forward and backward, for logging for example."""
    ddp = DistributedDataParallel(Scale())
    for _ in range(2):
        ddp.zero_grad()
        loss = ddp(torch.tensor(1.0 + rank))
        if rank == 0:
            with ddp.no_sync():
                ddp(torch.tensor(7.0)).detach()
        loss.backward()
        assert_close(ddp.module.a.grad, torch.tensor([1.5]))


@kept_ranks(2, group="gloo")
def test_a_backward_of_some_parameters_is_averaged_as_its_forward_asks(rank: int) -> None:
    ddp = DistributedDataParallel(Scale())
    x = torch.tensor(1.0 + rank)
    for _ in range(2):
        ddp.zero_grad()
        loss = ddp(x)
        with ddp.no_sync():
            ddp(x).detach()
        loss.backward(inputs=list(ddp.parameters()))
        assert_close(ddp.module.a.grad, torch.tensor([1.5]))
        with ddp.no_sync():
            loss = ddp(x)
        (other,) = torch.autograd.grad(ddp(x), ddp.module.a)
        assert_close(other, torch.tensor([1.0 + rank]))
        loss.backward(inputs=[ddp.module.a])  # type: ignore[no-untyped-call]
        assert_close(ddp.module.a.grad, torch.tensor([2.5 + rank]))


@kept_ranks(2, group="gloo")
def test_prepare_for_backward_has_the_next_backward_averaged(rank: int) -> None:
    ddp = DistributedDataParallel(Scale())
    with ddp.no_sync():
        loss = ddp(torch.tensor(1.0 + rank))
    ddp.reducer.prepare_for_backward([])
    loss.backward()
    assert_close(ddp.module.a.grad, torch.tensor([1.5]))
    with ddp.no_sync():
        loss = ddp(torch.tensor(1.0 + rank))
    loss.backward()
    assert_close(ddp.module.a.grad, torch.tensor([1.5 + 1.0 + rank]))
    with ddp.no_sync():
        loss = ddp(torch.tensor(1.0 + rank))
    ddp.reducer.prepare_for_backward([])
    with ddp.no_sync():
        pass  # an accumulation loop without batches
    ddp.zero_grad()
    loss.backward()
    assert_close(ddp.module.a.grad, torch.tensor([1.5]))


class Hidden:
    """An output object in which the wrapper finds no tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@kept_ranks(2, group="gloo")
def test_ranks_must_run_equally_many_forwards_if_outputs_hide_their_tensors(rank: int) -> None:
    ddp = DistributedDataParallel(Hiding())
    for _ in range(2):
        sum(ddp(torch.tensor(1.0)).tensor for _ in range(3)).backward()
    assert_close(ddp.module.a.grad, torch.tensor([6.0]))
    with pytest.raises(SkippedPassError, match="objects in which no tensor is found"):
        sum(ddp(torch.tensor(1.0)).tensor for _ in range(1 + rank)).backward()


class Hiding(Scale):
    def forward(self, x: torch.Tensor) -> Any:
        return Hidden(super().forward(x))


@kept_ranks(2, group="gloo")
def test_a_backward_that_reaches_no_known_output_is_averaged_if_one_is_due(rank: int) -> None:
    """torch does the same: its hooks wait for gradients from the forward on."""
    for runs_extra_forward in (True, rank == 0):  # on all ranks, and on one rank only
        for net in (Hiding(), Scale()):
            ddp = DistributedDataParallel(net)
            for _ in range(2):
                ddp.zero_grad()
                loss = ddp(torch.tensor(1.0 + rank))
                if runs_extra_forward:
                    with ddp.no_sync():
                        ddp(torch.tensor(7.0))
                if isinstance(loss, Hidden):
                    loss.tensor.backward()
                    assert_close(net.a.grad, torch.tensor([1.5]))
                else:  # a loss of parameters only, as for a batch that is skipped
                    sum(p.sum() for p in net.parameters()).backward()
                    assert_close(net.a.grad, torch.ones(1))


@kept_ranks(2, group="gloo")
def test_a_loss_that_outlives_its_wrapper_keeps_no_hooks_of_it(rank: int) -> None:
    net = Scale()
    ddp = DistributedDataParallel(net)
    with ddp.no_sync():
        loss = ddp(torch.tensor(1.0))
    loss.backward(retain_graph=True)
    ddp(torch.tensor(1.0)).backward()
    del ddp
    if rank == 0:  # this backward waits for no other rank
        net.zero_grad()
        net(torch.tensor(3.0)).backward()
        assert_close(net.a.grad, torch.tensor([3.0]))
    assert loss.item() == 4.0


@pytest.mark.parametrize("use_reentrant", [True, False])
@kept_ranks(2, group="gloo")
def test_a_checkpointed_forward_is_averaged_like_any_other(rank: int, use_reentrant: bool) -> None:
    ddp = DistributedDataParallel(Scale())
    x = torch.tensor(1.0 + rank, requires_grad=True)
    for _ in range(2):
        ddp.zero_grad()
        loss = checkpoint(ddp, x, use_reentrant=use_reentrant)
        with ddp.no_sync():
            ddp(x).detach()
        loss.backward()
        assert_close(ddp.module.a.grad, torch.tensor([1.5]))
    if not use_reentrant:  # reentrant checkpoints record the forward in backward
        with ddp.no_sync():
            loss = checkpoint(ddp, x, use_reentrant=use_reentrant)
        ddp.zero_grad()
        loss.backward()
        assert_close(ddp.module.a.grad, torch.tensor([1.0 + rank]))
