"""DistributedDataParallel with parameters on a device whose streams run their work asynchronously.

References are one process with the whole batch, in float64 on the CPU. The special point of a device:
autograd runs a backward in a separate thread, collectives in a separate stream, and the host is ahead of
both.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import (
    ConfigError,
    DeadlineError,
    GraphChangedError,
    SkippedPassError,
    UnusedParameterError,
)
from paceline.torch import DataParallel, DistributedDataParallel, ShardedOptimizer, SyncBatchNorm
from paceline.torch.model.parameters import HAS_EXCHANGE_API
from tests import accelerator
from tests.accelerator import GLOO, KIND, NCCL, busy, no_waiting
from tests.harness import ranks, run_ranks

pytestmark = accelerator.needed
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(step: int, world_size: int) -> torch.Tensor:
    return torch.randn(4 * world_size, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int, world_size: int, **options: Any) -> None:
    optimizer = options.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(options.get("steps", STEPS)):
        optimizer.zero_grad()
        model(batch(step, world_size)[rank::world_size].to(KIND)).square().mean().backward()
        optimizer.step()


def assert_trained(model: nn.Module, world_size: int, rtol: float = 1e-4, make: Any = network) -> None:
    alone = make().double()
    _train_whole(alone, world_size)
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours.detach().double().cpu(), expected.detach(), rtol=rtol, atol=rtol / 10)
    for ours, expected in zip(model.buffers(), alone.buffers(), strict=True):
        assert_close(ours.double().cpu(), expected.double(), rtol=rtol, atol=rtol / 10)


def _train_whole(alone: nn.Module, world_size: int) -> None:
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        alone(batch(step, world_size).double()).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"batched_grad_copy": True},
        {"bucket_cap_mb": 1e-4},
        {"static_graph": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 1e-4},
        {"nonfinite": "raise"},
    ],
    ids=lambda options: ", ".join(options) or "default",
)
@pytest.mark.parametrize("group", [NCCL, GLOO], ids=["streams", "blocking"])
def test_two_ranks_train_as_one_process(group: str, options: dict[str, Any]) -> None:
    run_ranks(_train_as_one, 2, {"options": options}, group=group)


def _train_as_one(rank: int, options: dict[str, Any]) -> None:
    model = network().to(KIND)
    train(DistributedDataParallel(model, **options), rank, 2)
    assert_trained(model, 2)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=NCCL)
def test_gradients_are_copied_a_bucket_at_a_time(
    rank: int, view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if view and not HAS_EXCHANGE_API:
        pytest.skip("this torch has no DLPack exchange API")
    sizes: list[int] = []
    copy_all = torch._foreach_copy_

    def note(places: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        sizes.append(len(places))
        copy_all(places, gradients)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    model = network().to(KIND)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    sizes.clear()  # drops the calls that copied rank 0's values
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batch(step, 2)[rank::2].to(KIND)).square().mean().backward()
    # To the bucket, and back from there.
    assert sizes == ([6] if view else [6, 6]) * STEPS
    train(ddp, rank, 2)
    assert_trained(model, 2)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=NCCL)
def test_all_buckets_but_the_last_are_under_way_before_the_last_gradient(
    rank: int, view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network().to(KIND)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, gradient_as_bucket_view=view)
    train(ddp, rank, 2, steps=2)  # from now on the buckets are in the order of backward
    begun = 0
    begun_at: list[int] = []  # the number of buckets, at each gradient
    allreduce = Backend.allreduce

    def note(*args: Any) -> Any:
        nonlocal begun
        begun += 1
        return allreduce(*args)

    monkeypatch.setattr(Backend, "allreduce", note)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: begun_at.append(begun))
    train(ddp, rank, 2, steps=1)
    assert begun == len(ddp.bucket_layout()) > 4
    assert begun_at[-1] == begun - 1


@ranks(2, group=NCCL)
def test_communication_hooks(rank: int) -> None:
    def mean(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hooks = ((default_hooks.allreduce_hook, 1e-4), (default_hooks.bf16_compress_hook, 3e-2), (mean, 1e-4))
    for hook, rtol in hooks:
        model = network().to(KIND)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        ddp.register_comm_hook(None, hook)
        train(ddp, rank, 2)
        assert_trained(model, 2, rtol)


class Halves(nn.Module):
    """Its layers lie on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        whole = network()
        self.first, self.second = whole[:2].to(first), whole[2:].to(second)
        self.devices = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))


@pytest.mark.skipif(accelerator.count() < 4, reason="needs four GPUs")
@ranks(2, group=NCCL)
def test_a_model_on_two_devices(rank: int) -> None:
    for view in (False, True):
        model = Halves(f"{KIND}:{2 * rank}", f"{KIND}:{2 * rank + 1}")
        train(DistributedDataParallel(model, gradient_as_bucket_view=view), rank, 2)
        assert_trained(model, 2)


@ranks(2, group=NCCL)
def test_the_host_is_ahead_of_the_device(rank: int) -> None:
    ddp = DistributedDataParallel(network().to(KIND))
    batches = [batch(step, 2)[rank::2].to(KIND) for step in range(4)]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    for x in batches:
        step(x)
    with no_waiting():
        for x in batches:
            step(x)
    accelerator.module().synchronize()
    busy(2000)
    behind = accelerator.module().Event()
    behind.record()
    step(batches[0])
    assert not behind.query()


def with_batch_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


@ranks(2, group=NCCL)
def test_batch_normalisation_over_all_ranks(rank: int) -> None:
    model = SyncBatchNorm.convert_sync_batchnorm(with_batch_norm()).to(KIND)
    train(DistributedDataParallel(model), rank, 2)
    assert_trained(model, 2, make=with_batch_norm)


@ranks(2, group=NCCL)
def test_norms(rank: int) -> None:
    model = network().to(KIND)
    ddp = DistributedDataParallel(model)
    ddp(batch(0, 2)[rank::2].to(KIND)).square().mean().backward()

    def norm() -> float:
        return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()

    whole = norm()
    assert ddp.grad_norm() == pytest.approx(whole, rel=1e-4)
    assert float(ddp.clip_grad_norm_(whole / 2)) == pytest.approx(whole, rel=1e-4)
    assert norm() == pytest.approx(whole / 2, rel=1e-3)


@ranks(2, group=NCCL)
def test_a_rank_with_more_data(rank: int) -> None:
    ddp = DistributedDataParallel(network().to(KIND))
    with ddp.join():
        for step in range(2 + 2 * rank):
            ddp.zero_grad()
            ddp(batch(step, 1).to(KIND)).square().mean().backward()
    found = [p.detach().cpu() for p in ddp.parameters()]
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, b"".join(each.numpy().tobytes() for each in found))
    assert gathered[0] == gathered[1]


@ranks(2, group=NCCL)
def test_a_sharded_optimizer(rank: int) -> None:
    model = network().to(KIND)
    ddp = DistributedDataParallel(model)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.5)
    train(ddp, rank, 2, optimizer=optimizer)
    assert_trained(model, 2)


@pytest.mark.parametrize("group", [NCCL, GLOO], ids=["streams", "blocking"])
def test_a_late_rank_is_named(group: str) -> None:
    run_ranks(_be_late, 2, {}, group=group)


def _be_late(rank: int) -> None:
    ddp = DistributedDataParallel(network().to(KIND), timeout_s=3)
    train(ddp, rank, 2, steps=2)
    if rank == 1:
        time.sleep(8)
        return
    with pytest.raises(DeadlineError, match="rank 1") as caught:
        train(ddp, rank, 2, steps=2)
    assert caught.value.late == (1,)


@pytest.mark.parametrize("what", ["buffers", "statistics"])
@ranks(2, group=GLOO)
def test_a_late_rank_is_named_outside_of_backward(rank: int, what: str) -> None:
    model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    ddp = DistributedDataParallel(model.to(KIND), timeout_s=3)
    x = batch(0, 1).to(KIND)
    ddp(x).square().mean().backward()
    if rank == 1:
        time.sleep(8)
        return
    with pytest.raises(DeadlineError, match="rank 1") as caught:
        ddp.sync_buffers() if what == "buffers" else ddp(x)
    assert caught.value.late == (1,)


class Recomputed(nn.Module):
    """All of it is recomputed in backward, by a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.layers[:2], self.layers[2:]):
            x = checkpoint(part, x, use_reentrant=True)
        return x


@ranks(2, group=NCCL)
def test_reentrant_checkpoints_around_all_layers(rank: int) -> None:
    """The first gradient comes in an inner backward, and the backward must end with the outer one."""
    for view in (False, True):
        model = Recomputed().to(KIND)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.5)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, 2)[rank::2].to(KIND).requires_grad_()
            ddp(x).square().mean().backward()
            optimizer.step()
        assert_trained(model.layers, 2)


@ranks(2, group=NCCL)
def test_a_gradient_that_comes_twice_is_refused(rank: int) -> None:
    ddp = DistributedDataParallel(Recomputed().to(KIND), find_unused_parameters=True)
    x = batch(0, 2)[rank::2].to(KIND).requires_grad_()
    with pytest.raises(GraphChangedError, match="came twice in one backward"):
        (ddp(x).sum() + ddp(x).sum()).backward()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("wrapped_on", "moved_to"), [("cpu", KIND), (KIND, "cpu"), (f"{KIND}:0", f"{KIND}:1")]
)
@ranks(2, group=NCCL)
def test_a_model_that_was_moved_is_noticed(rank: int, wrapped_on: str, moved_to: str, view: bool) -> None:
    for keep in (False, True):
        model = network().to(wrapped_on)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
        ddp(batch(0, 1).to(wrapped_on)).sum().backward()
        model.to(moved_to)
        ddp.zero_grad(set_to_none=not keep)
        # If .to() replaces the parameters, forward notices; otherwise each gradient shows it.
        noticed = r"had not when it was wrapped|lie in the memory|one on"
        with pytest.raises(ConfigError, match=noticed) as caught:
            ddp(batch(0, 1).to(moved_to)).sum().backward()
        assert "again, on every rank" in str(caught.value)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=NCCL)
def test_a_parameter_that_was_pruned_is_noticed(rank: int, view: bool) -> None:
    """Its memory and that of its gradient have the old shape."""
    model = network().to(KIND)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    train(ddp, rank, 2, steps=2)
    ddp.zero_grad()
    with torch.no_grad():
        model[0].weight.data = model[0].weight[:8].clone()
        model[0].bias.data = model[0].bias[:8].clone()
        model[2].weight.data = model[2].weight[:, :8].clone()
    with pytest.raises(ConfigError, match="it has another shape") as caught:
        ddp(batch(0, 1).to(KIND)).sum().backward()
    assert "again, on every rank" in str(caught.value)


@ranks(2, group=NCCL)
def test_an_unused_parameter_in_a_recorded_graph_raises_on_all_ranks(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise, and none waits for the device, which would end the recording."""
    model = network().to(KIND)
    ddp = DistributedDataParallel(model)
    train(ddp, rank, 2, steps=2)
    unused = model[2]
    model[2] = nn.Identity()
    ddp.zero_grad()
    x = batch(0, 1).to(KIND)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with no_waiting(), pytest.raises(UnusedParameterError, match="got no gradient"):
        ddp(x).square().mean().backward()
    monkeypatch.undo()
    model[2] = unused
    model.zero_grad()
    train(ddp, rank, 2, steps=2)


def most_held(step: Callable[[], object]) -> int:
    """The most memory of the device that is in use within a step, in bytes."""
    accelerator.module().synchronize()
    accelerator.module().reset_peak_memory_stats()
    step()
    accelerator.module().synchronize()
    return int(accelerator.module().max_memory_allocated())


@pytest.mark.parametrize("view", [False, True])
@ranks(1, group=NCCL)
def test_a_backward_takes_no_more_memory_than_torchs(rank: int, view: bool) -> None:
    found = []
    x = torch.ones(2, 256).to(KIND)
    for wrap, options in ((TorchDDP, {}), (DistributedDataParallel, {"weight": 1.0})):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))).to(KIND)
        size = sum(parameter.nbytes for parameter in model.parameters())
        ddp = wrap(model, gradient_as_bucket_view=view, **options)

        def step(ddp: nn.Module = ddp) -> None:
            ddp.zero_grad()
            ddp(x).square().mean().backward()

        for _ in range(3):
            step()
        found.append(most_held(step) / size)
        del ddp, model, step
        gc.collect()
    theirs, ours = found
    assert ours <= theirs + 0.06, found  # the finite checks' results


@ranks(2, group=NCCL)
def test_a_rank_on_which_no_parameter_gets_a_gradient(rank: int) -> None:
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, uses_it: bool) -> torch.Tensor:
            return self.layer(x) if uses_it else 2 * x

    for options in ({}, {"find_unused_parameters": True}):
        ddp = DistributedDataParallel(Maybe().to(KIND), **options)
        x = batch(0, 2)[rank::2].to(KIND).requires_grad_()
        loss = ddp(x, uses_it=rank == 0).sum()
        if not options:
            with pytest.raises(UnusedParameterError, match="got no gradient"):
                loss.backward()
        else:
            loss.backward()
            assert all(p.grad is not None for p in ddp.parameters())


@ranks(2, group=NCCL)
def test_a_gradient_by_autograd_grad_is_no_backward(rank: int) -> None:
    model = network().to(KIND)
    ddp = DistributedDataParallel(model)
    x = batch(0, 2)[rank::2].to(KIND).requires_grad_()
    (found,) = torch.autograd.grad(ddp(x).square().mean(), x)
    own = x.detach().cpu().double().requires_grad_()
    (expected,) = torch.autograd.grad(network().double()(own).square().mean(), own)
    assert_close(found.double().cpu(), expected, rtol=1e-4, atol=1e-6)


class Stop(Exception):
    """An exception of the program in its backward."""


def raise_stop(gradient: torch.Tensor) -> None:
    raise Stop


def assert_gradients(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=NCCL)
def test_a_backward_that_raises(rank: int, view: bool, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread drops the exception when the user has it already, and may have continued."""
    if not waits:  # as if the drop takes longer than the wait for it
        monkeypatch.setattr("paceline.torch.backward.autograd._DROPPED_WITHIN_S", 0.0)
    model = network().to(KIND)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    x = batch(0, 2)[rank::2].to(KIND)

    expected = copy.deepcopy(model)
    expected(batch(0, 2).to(KIND)).square().mean().backward()
    for number in range(30):
        everywhere = number % 2 == 0
        if everywhere or rank == 1:
            hook = model[2].weight.register_hook(raise_stop)
            with pytest.raises(Stop):
                ddp(x).square().mean().backward()
            hook.remove()
        elif rank == 0:
            with pytest.raises(SkippedPassError):
                ddp(x).square().mean().backward()
        ddp.zero_grad(set_to_none=number % 3 != 0)
        ddp(x).square().mean().backward()
        assert_gradients(model, expected)
        ddp.zero_grad()


@ranks(2, group=NCCL)
def test_no_more_data_after_a_backward_that_raised(rank: int) -> None:
    """Its gradients are views of in-flight buckets, and finish() sets gradients aside."""
    model = network().to(KIND)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    x = batch(0, 2)[rank::2].to(KIND)
    expected = copy.deepcopy(model)
    expected(batch(0, 2).to(KIND)).square().mean().backward()

    for _ in range(5):
        hook = model[0].weight.register_hook(raise_stop)
        with pytest.raises(Stop):
            ddp(x).square().mean().backward()
        hook.remove()
        ddp.zero_grad(set_to_none=False)
        ddp.finish()
        ddp(x).square().mean().backward()
        assert_gradients(model, expected)
        ddp.zero_grad(set_to_none=False)


@ranks(2, group=NCCL)
def test_another_model_after_a_backward_that_raised(rank: int) -> None:
    """All ranks give up the first model's work on the group before the other model makes a call."""
    models = [network().to(KIND) for _ in range(2)]
    first, second = (DistributedDataParallel(each, bucket_cap_mb=1e-4) for each in models)
    x = batch(0, 2)[rank::2].to(KIND)
    expected = network().to(KIND)
    expected(batch(0, 2).to(KIND)).square().mean().backward()

    for _ in range(20):
        hook = models[0][0].weight.register_hook(raise_stop)
        with pytest.raises(Stop):
            first(x).square().mean().backward()
        hook.remove()
        second.finish()
        for ddp in (second, first):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
            assert_gradients(ddp, expected)
            ddp.zero_grad()


@ranks(2, group=NCCL)
def test_weights_after_a_backward_in_no_sync_that_raised(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.torch.backward.autograd._DROPPED_WITHIN_S", 60.0)
    model = network().to(KIND)
    ddp = DistributedDataParallel(model)
    expected = network().to(KIND)
    whole = batch(0, 2).to(KIND)
    weights = (1.0, 3.0)
    losses = [w * expected(whole[r::2]).square().mean() for r, w in enumerate(weights)]
    (sum(losses) / sum(weights)).backward()

    for _ in range(10):
        hook = model[2].weight.register_hook(raise_stop)
        ddp.weight(5.0)
        began = time.monotonic()
        with pytest.raises(Stop), ddp.no_sync():
            ddp(whole[rank::2]).square().mean().backward()
        hook.remove()
        ddp.zero_grad()
        ddp.weight(weights[rank])
        ddp(whole[rank::2]).square().mean().backward()
        assert time.monotonic() - began < 30.0  # no rank has waited for data that does not come
        assert_gradients(model, expected)
        ddp.zero_grad()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_replicas_on_several_devices(count: int) -> None:
    if accelerator.count() < count:
        pytest.skip(f"needs {count} GPUs")
    model = network().to(f"{KIND}:0")
    train(DataParallel(model, device_ids=list(range(count))), 0, 1)
    assert_trained(model, 1)
