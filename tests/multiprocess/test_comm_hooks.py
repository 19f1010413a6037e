"""Communication hooks: torch's own, unmodified, against torch's DDP with the same hook; and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import two_layers
from tests.multiprocess.torch_groups import needs_backend, torch_group

Make = Callable[[], tuple[Any, Any]]


def power(**options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


def local_sgd() -> Any:
    return post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.new_group([dist.get_rank()]), 2)


# Each call makes a new state and hook, since states remember earlier gradients.
HOOKS: dict[str, Make] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "PowerSGD": lambda: (power(), powerSGD_hook.powerSGD_hook),
    "PowerSGD, fp16": lambda: (
        power(),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post-localSGD": lambda: (local_sgd(), post_localSGD_hook.post_localSGD_hook),
}

# Their arithmetic expects futures like NCCL's: over Gloo they fail, in torch's DDP as well.
QUANTIZED: dict[str, Make] = {
    "quantized": lambda: (None, quantization_hooks.quantization_pertensor_hook),
    "quantized by channel": lambda: (None, quantization_hooks.quantization_perchannel_hook),
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(24, 16, bias=False)  # one parameter: its place in a bucket is the same for both


def gradients_of(ddp: Any, make: Make, rank: int) -> list[torch.Tensor]:
    """The gradients of four steps; the weights do not change."""
    ddp.register_comm_hook(*make())
    found = []
    for step in range(4):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp.zero_grad()
        ddp(x).pow(2).mean().backward()
        found.append(ddp.module.weight.grad.clone())
    return found


# Torch's own DDP makes torch import its compiler, which takes a minute on a busy machine.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@kept_ranks(2, group="gloo", deadline_s=240)
def test_torchs_hooks_give_what_they_give_in_torch(rank: int) -> None:
    for name, make in HOOKS.items():
        for view in (False, True):
            ours = gradients_of(DistributedDataParallel(model(), gradient_as_bucket_view=view), make, rank)
            theirs = gradients_of(TorchDDP(model()), make, rank)
            for mine, other in zip(ours, theirs, strict=True):
                assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


@needs_backend
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@ranks(2, group=None)
def test_torchs_hooks_over_our_backend(rank: int) -> None:
    with torch_group(rank):
        x = torch.full((2, 24), 1.0 + rank)
        plain = gradients_of(DistributedDataParallel(model()), HOOKS["allreduce"], rank)
        for name, make in {**HOOKS, **QUANTIZED}.items():
            if name in ("noop", "post-localSGD"):
                continue  # these leave each rank its own gradient
            ddp = DistributedDataParallel(model())
            found = gradients_of(ddp, make, rank)
            if name in QUANTIZED:
                assert_close(found, plain, rtol=0, atol=0.02)
            both = [torch.empty_like(ddp.module.weight) for _ in range(2)]
            dist.all_gather(both, ddp.module.weight.grad)
            assert torch.equal(*both), name
        wrapped = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
        for hook in (default_hooks.bf16_compress_hook, wrapped):  # torch refuses them on the CPU
            ddp = DistributedDataParallel(model())
            ddp.register_comm_hook(None, hook)
            ddp(x).sum().backward()
            assert_close(ddp.module.weight.grad, torch.full((16, 24), 3.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@kept_ranks(2, group="gloo")
def test_builtin_hooks_and_the_fused_optimizer(rank: int) -> None:
    ddp = DistributedDataParallel(model())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ddp(torch.full((1, 24), 1.0 + 2 * rank)).sum().backward()
    assert_close(ddp.module.weight.grad, torch.full((16, 24), 2.0))

    ddp = DistributedDataParallel(model())
    before = ddp.module.weight.detach().clone()
    ddp._register_fused_optim(torch.optim.SGD, 0.5)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 24), 1.0 + 2 * rank)).sum().backward()
    assert_close(ddp.module.weight.detach(), before - 2 * 0.5 * 2.0)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_a_hook_may_lengthen_its_buffer_for_a_while(rank: int, view: bool) -> None:
    """Batched PowerSGD does this. It fails itself in torch 2.13, whose _orthogonalize refuses the shape."""

    def hook(state: Any, bucket: Any) -> Any:
        flat, count = bucket.buffer(), bucket.buffer().numel()
        flat.resize_(count + 1000)[count:] = 7
        flat.resize_(count)
        return default_hooks.allreduce_hook(None, bucket)

    net = two_layers()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.00001, gradient_as_bucket_view=view)
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
        expected = torch.autograd.grad(net(torch.ones(1, 4)).sum(), list(net.parameters()))
        assert_close([p.grad for p in net.parameters()], list(expected))


@kept_ranks(2, group="gloo")
def test_a_weighted_mean_through_a_hook(rank: int) -> None:
    ddp = DistributedDataParallel(model())
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with ddp.weight(3 - 2 * rank):
        ddp(torch.full((1, 24), 1.0 + 4 * rank)).sum().backward()
    assert_close(ddp.module.weight.grad, torch.full((16, 24), 2.0))


def returning(value: Any) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        if isinstance(value, torch.Tensor):
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(value)
            return future
        return value

    return hook


@kept_ranks(2, group="gloo")
def test_a_hook_with_another_annotation_is_refused(rank: int) -> None:
    annotated = returning(None)
    annotated.__annotations__ = {"bucket": int}
    with pytest.raises(ValueError, match="bucket annotation should be"):
        DistributedDataParallel(model()).register_comm_hook(None, annotated)


@kept_ranks(2)
def test_a_group_of_ours_has_no_hooks(group: Any) -> None:
    with pytest.raises(ValueError, match="needs a process group of torch"):
        DistributedDataParallel(model(), process_group=group).register_comm_hook(None, returning(None))


@needs_backend
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@ranks(2, group=None)
def test_optimizers_within_backward_step_with_the_mean(rank: int) -> None:
    """torch's ZeRO hook, which torch refuses over Gloo, and its optimizers in backward."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

    def zero(ddp: Any, make_hook: Any = hook_with_zero_step) -> int:
        sharded = ZeroRedundancyOptimizer(
            ddp.module.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
        )
        ddp.register_comm_hook(None, make_hook(default_hooks.allreduce_hook, ddp, sharded))
        return 2  # backward passes in which it only learns the buckets

    def interleaved(ddp: Any) -> int:
        return zero(ddp, hook_with_zero_step_interleaved)

    def in_backward(ddp: Any) -> int:
        _apply_optimizer_in_backward(torch.optim.SGD, ddp.module.parameters(), {"lr": 0.1})
        return 0

    with torch_group(rank):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
        # torch before 2.9 allows it over backends of GPUs only.
        overlapped = [(zero, False), (interleaved, False)] if torch.__version__ >= "2.9" else []
        for install, view in (*overlapped, (in_backward, False), (in_backward, True)):
            net = two_layers()
            alone = copy.deepcopy(net)
            ddp = DistributedDataParallel(net, bucket_cap_mb=0.00001, gradient_as_bucket_view=view)
            idle = install(ddp)
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
            for step in range(5):
                alone.zero_grad()
                alone(x).mean().backward()
                if step >= idle:
                    optimizer.step()
                ddp.zero_grad()
                ddp(x[rank : rank + 1]).mean().backward()
                assert install is not in_backward or all(p.grad is None for p in net.parameters())
            assert_close(list(net.parameters()), list(alone.parameters()))


@kept_ranks(2, group="gloo")
def test_a_hook_keeps_buffers_in_step(rank: int) -> None:
    def add(state: str, buffers: dict[str, torch.Tensor]) -> Any:
        assert state == "state"
        called.append(set(buffers))
        return [dist.all_reduce(buffers["running_mean"], async_op=True).get_future()]

    for location in (None, _BufferCommHookLocation.PRE_FORWARD):
        called: list[set[str]] = []
        ddp = DistributedDataParallel(nn.BatchNorm1d(2, momentum=1.0))
        ddp._register_buffer_comm_hook("state", add, *([] if location is None else [location]))
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + rank
        ddp(x).sum().backward()
        mean = [5.0, 7.0] if location is None else [2.0 + rank, 3.0 + rank]
        assert_close(ddp.module.running_mean, torch.tensor(mean))
        with ddp.no_sync():
            ddp(x).sum().backward()
        assert called == [{"running_mean", "running_var", "num_batches_tracked"}]
    with pytest.raises(TypeError, match="hook=3 is not usable"):
        ddp._register_buffer_comm_hook(None, 3)
