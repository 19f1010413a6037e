"""A backward raises on one rank: every other rank raises once, whatever is called next, and all continue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.errors import SkippedPassError
from paceline.reducer.backward.state import EndOfBackward
from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import two_layers

PATHS = ["group", "memory"]


class Broken(torch.autograd.Function):
    """The identity; its backward raises while `is_broken` is not empty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_broken: list[bool]) -> torch.Tensor:
        ctx.is_broken = is_broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.is_broken:
            raise MemoryError("in a function's backward")
        return gradient, None


class Opaque:
    """An output that hides its tensor from DDP, so that the first parameter's hook begins a backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Model(nn.Module):
    """Two layers with a function between them that can raise. With `hides`, the output is an `Opaque`."""

    def __init__(self, *, hides: bool) -> None:
        super().__init__()
        self.first, _, self.second = two_layers()
        self.is_broken: list[bool] = []
        self.hides = hides

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(Broken.apply(self.first(x), self.is_broken))
        return Opaque(y) if self.hides else y


def loss_of(output: Any) -> torch.Tensor:
    return (output.tensor if isinstance(output, Opaque) else output).sum()


def raises(error: type[BaseException]) -> Callable[[Any], None]:
    def fail(_: Any) -> None:
        raise error("in a hook")

    return fail


def break_backward(model: Model, how: str) -> Callable[[], None]:
    """Makes the next backward raise. Returns a function that undoes this."""
    if how == "function":
        model.is_broken.append(True)
        return model.is_broken.clear
    if how == "a hook of the gradient":
        handle = model.first.weight.register_hook(raises(MemoryError))
    elif how == "a hook after it":
        handle = model.first.weight.register_post_accumulate_grad_hook(raises(MemoryError))
    else:
        handle = model.first.weight.register_hook(raises(KeyboardInterrupt))
    return handle.remove


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["function", "a hook of the gradient", "a hook after it", "Ctrl-C"])
@ranks(2, group="gloo")
def test_every_rank_raises_once_and_all_continue(rank: int, path: str, how: str) -> None:
    for view in (False, True):
        for hides in (False, True):
            model = Model(hides=hides)
            ddp = DistributedDataParallel(
                model, reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
            )
            x = torch.full((1, 4), 1.0 + rank)
            for again in ("backward", "backward, much later", "forward"):
                first, second = loss_of(ddp(x)), loss_of(ddp(2 * x))
                if rank == 0:
                    repair = break_backward(model, how)
                    with pytest.raises((MemoryError, KeyboardInterrupt)):
                        first.backward()
                    repair()
                    ddp.zero_grad()
                    if again == "backward, much later":
                        with ddp.no_sync():
                            loss_of(model(x)).backward()
                else:
                    with pytest.raises(SkippedPassError, match="rank 0 of 2 ended in an exception"):
                        first.backward()
                    ddp.zero_grad()
                if again != "forward":
                    ddp.zero_grad()
                    second.backward()
                    assert_close(model.second.bias.grad, torch.ones(2))
                del first, second
                for _ in range(2):
                    ddp.zero_grad()
                    loss_of(ddp(x)).backward()
                    assert_close(model.second.bias.grad, torch.ones(2))
                    assert_close(model.first.weight.grad[0], model.first.weight.grad[0, :1].expand(4))


@ranks(2, group="gloo")
def test_all_ranks_continue_after_every_rank_was_interrupted(rank: int) -> None:
    model = Model(hides=False)
    ddp = DistributedDataParallel(model)
    x = torch.full((1, 4), 1.0 + rank)
    first, second = ddp(x).sum(), 2 * ddp(x).sum()
    repair = break_backward(model, "function")
    with pytest.raises(MemoryError):
        first.backward()
    repair()
    ddp.zero_grad()
    second.backward()
    assert_close(model.second.bias.grad, torch.full((2,), 2.0))


@ranks(2, group="gloo")
def test_a_broken_backward_is_reported_by_a_rank_that_has_no_more_data(rank: int) -> None:
    model = Model(hides=False)
    ddp = DistributedDataParallel(model)
    loss = ddp(torch.ones(1, 4)).sum()
    if rank == 0:
        repair = break_backward(model, "function")
        with pytest.raises(MemoryError):
            loss.backward()
        repair()
    else:
        with pytest.raises(SkippedPassError, match="rank 0 of 2 ended in an exception"):
            loss.backward()
    ddp.finish()


@pytest.mark.parametrize("weighted", [False, True])
@ranks(2, group="gloo")
def test_the_end_of_an_interrupted_backward_does_not_affect_the_next_one(
    rank: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """autograd's device thread may drop `EndOfBackward` after the user's thread began the next backward."""
    kept: list[EndOfBackward] = []

    def keep(*arguments: Any) -> EndOfBackward:
        kept.append(EndOfBackward(*arguments))
        return kept[-1]

    for module in ("backward_sync", "micro_batch_weights"):
        monkeypatch.setattr(f"paceline.reducer.backward.{module}.EndOfBackward", keep)
    model = Model(hides=False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x = torch.full((1, 4), 1.0 + rank)

    def loss() -> torch.Tensor:
        if weighted:
            ddp.weight(1.0 + 2.0 * rank)
        return ddp(x).sum()

    for is_local in (False, True) if weighted else (False,):
        repair = break_backward(model, "function")
        with ddp.no_sync() if is_local else contextlib.nullcontext(), pytest.raises(MemoryError):
            loss().backward()
        repair()
        ddp.zero_grad()
        began = loss()
        drop = model.second.bias.register_hook(lambda _: kept.pop(0) and None)
        began.backward()
        drop.remove()
        assert_close(model.second.bias.grad, torch.ones(2))
        mean = (1.0 + 3.0 * 2.0) / 4.0 if weighted else 1.5
        assert_close(model.first.weight.grad[0], mean * model.second.weight.detach().sum(0)[0].expand(4))
        kept.clear()
