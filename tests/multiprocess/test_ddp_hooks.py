"""Users' gradient hooks run before ours and their result is averaged; a later change raises on every rank."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import two_layers

PATHS = ["group", "memory"]
CAPS_MB = [25, 0.0001]  # one bucket, whose hooks stay; several, whose hooks are registered again


def clamp_in_place(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1, 1)


def clamp(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clamp(-1, 1)


def train(ddp: nn.Module, rank: int, before_step: Callable[[int], Any]) -> list[torch.Tensor]:
    """Runs three steps of SGD; returns all gradients."""
    found = []
    for step in range(3):
        ddp.zero_grad()
        loss = (ddp(torch.full((1, 4), 0.5 + 4 * rank)) * (1 + step)).sum()
        before_step(step)
        loss.backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.data.add_(parameter.grad, alpha=-0.1)
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap_mb", CAPS_MB)
@kept_ranks(2, group="gloo")
def test_a_hook_after_wrapping_runs_before_ours_as_in_torch(
    rank: int, path: str, view: bool, cap_mb: float
) -> None:
    for hook in (clamp, clamp_in_place):
        for moment in ("before forward", "before backward", "in the second step", "around one of before"):
            found = []
            for wrap in (functools.partial(DistributedDataParallel, reduce_through=path), TorchDDP):
                model = two_layers()
                before = [p.register_post_accumulate_grad_hook(lambda p: None) for p in model.parameters()]
                # With views, torch would apply the in-place hook twice; torch without views is the reference.
                ddp = wrap(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=view and wrap is not TorchDDP)

                def add(model: nn.Module = model) -> None:
                    for parameter in model.parameters():
                        parameter.register_post_accumulate_grad_hook(hook)  # noqa: B023

                if moment == "before forward":
                    add()
                if moment == "around one of before":
                    add()
                    for handle in before:
                        handle.remove()

                def before_step(step: int, add: Callable[[], None] = add) -> None:
                    first = {"before backward": 0, "in the second step": 1}.get(moment)  # noqa: B023
                    if step == first:
                        add()

                found.append(train(ddp, rank, before_step))
            assert_close(*found)
            gathered: list[Any] = [None, None]
            dist.all_gather_object(gathered, [gradient.numpy().tobytes() for gradient in found[0]])
            assert gathered[0] == gathered[1]


def node_of(parameter: torch.Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_a_gradient_changed_after_it_was_handed_over_raises_on_every_rank(
    rank: int, path: str, view: bool
) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    head = model[2].weight  # its gradient is ready first, that of the first layer last

    def forget(parameter: torch.Tensor) -> None:
        parameter.grad = None

    x = torch.full((1, 4), 1.0 + rank)
    for change, got in ((clamp, "another tensor"), (clamp_in_place, "in place"), (forget, "no gradient")):
        for changed_on in ([1], [0, 1]):
            handles, node = [], node_of(head)
            if rank in changed_on:
                handles = [
                    node.register_hook(lambda *_: change(head)),  # noqa: B023
                    model[0].weight.register_hook(lambda _: change(head)),  # noqa: B023
                ]
            for handle in handles or [None]:
                ddp.zero_grad()
                with pytest.raises(ConfigError, match=r"2\.weight") as caught:
                    ddp(x).sum().backward()
                assert (got in str(caught.value)) == (rank in changed_on)
                if handle is not None:
                    handle.remove()
            if not handles:  # the other rank runs two backwards, so this one does, too
                ddp.zero_grad()
                with pytest.raises(ConfigError, match=r"2\.weight"):
                    ddp(x).sum().backward()
            ddp.zero_grad()
            ddp(x).sum().backward()
            assert_close(model[2].bias.grad, torch.ones(2))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_two_models_in_one_backward_share_a_parameter(rank: int, path: str) -> None:
    """The mean that the first model writes into a shared gradient is not reported as a foreign change."""
    shared = nn.Linear(4, 2)
    nn.init.ones_(shared.weight)
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    second = DistributedDataParallel(nn.Sequential(shared, nn.Linear(2, 1)), reduce_through=path)
    x = torch.full((1, 4), 1.0 + rank)
    for _ in range(3):
        shared.zero_grad()
        (first(x).sum() + 0 * second(x).sum()).backward()
        assert_close(shared.weight.grad, torch.full((2, 4), 1.5))


class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=sparse)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def kinds() -> Iterator[tuple[str, dict[str, Any], bool]]:
    yield "pointer", {}, False
    yield "view", {"gradient_as_bucket_view": True}, False
    yield "batched", {"batched_grad_copy": True}, False
    yield "late", {"static_graph": True}, False
    yield "unused allowed", {"find_unused_parameters": True}, False
    yield "sparse", {}, True


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [2, 20])
@kept_ranks(2, group="gloo")
def test_a_parameter_of_another_shape_is_refused_on_every_rank(rank: int, path: str, rows: int) -> None:
    """A mean of the old size would fill only part of a larger gradient, or write beyond a smaller one."""
    x = torch.tensor([0, 1])
    for kind, options, sparse in kinds():
        for changed_on in ([1], [0, 1]):
            model = Words(sparse=sparse)
            ddp = DistributedDataParallel(model, reduce_through=path, **options)
            ddp(x).sum().backward()
            ddp.zero_grad()
            old = model.table.weight.data
            if rank in changed_on:
                model.table.weight.data = torch.ones(rows, 4)
            loss = ddp(x).sum()
            guards = [torch.full((rows * 4,), 3.0) for _ in range(50)]
            with pytest.raises(ConfigError, match=r"'table\.weight'") as caught:
                loss.backward()
            assert all(torch.equal(guard, torch.full((rows * 4,), 3.0)) for guard in guards)
            message = str(caught.value)
            if rank in changed_on:
                assert "(8, 4)" in message and f"({rows}, 4)" in message, (kind, message)
                assert "wrap" in message
            else:
                assert "rank 1 of 2" in message
            del loss, caught
            gc.collect()  # while the graph lives, autograd keeps the other shape
            ddp.zero_grad()
            model.table.weight.data = old
            (ddp(x).sum() * (1 + rank)).backward()
            assert_close(model.head.bias.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_an_unused_parameter_of_another_shape_is_refused_too(rank: int, path: str) -> None:
    model = nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2)})

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = model

        def forward(self, x: torch.Tensor, side: str) -> torch.Tensor:
            return self.branches[side](x)

    ddp = DistributedDataParallel(Branch(), reduce_through=path, find_unused_parameters=True)
    if rank == 1:
        model["left"].weight.data = torch.ones(5, 3)
    with pytest.raises(ConfigError, match=r"branches\.left\.weight"):
        ddp(torch.ones(1, 3), "right" if rank else "left").sum().backward()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_another_shape_is_refused_in_no_sync_or_at_the_next_backward(
    rank: int, path: str, view: bool
) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    x = torch.ones(1, 4)
    ddp(x).sum().backward()
    ddp.zero_grad()
    model[2].weight.data, model[2].bias.data = torch.ones(3, 5), torch.ones(3)
    with pytest.raises(ConfigError, match=r"'2\.(weight|bias)'"):
        with ddp.no_sync():
            ddp(x).sum().backward()
        assert not view  # with views, the first backward raises
        ddp(x).sum().backward()


@kept_ranks(2, group="gloo")
def test_data_of_the_same_shape_may_be_swapped(rank: int) -> None:
    """The conversion through another dtype makes autograd drop the parameter's AccumulateGrad node."""
    model = two_layers()
    ddp = DistributedDataParallel(model)
    x = torch.full((1, 4), 1.0 + rank)
    for swap in (lambda p: p.data.clone(), lambda p: p.data.double().float()):
        for parameter in model.parameters():
            parameter.data = swap(parameter)
        ddp.zero_grad()
        ddp(x).sum().backward()
        model.double().float()
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert_close(model[2].bias.grad, torch.ones(2))
