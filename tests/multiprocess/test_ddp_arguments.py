"""Arguments of torch's DDP, with their meaning: against one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import two_layers


def inputs() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(5))


def train(ddp: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(x).pow(2).mean().backward()
        optimizer.step()
    return [p.detach() for p in ddp.parameters()]


@ranks(2, group="gloo")
def test_arguments_that_change_no_result(rank: int) -> None:
    alone = train(two_layers(), inputs())
    mesh = dist.init_device_mesh("cpu", (2,))
    for options in (
        {"bucket_cap_mb_list": [0.00001, 0.00005]},
        {"bucket_cap_mb_list": [0.00001], "gradient_as_bucket_view": True, "reduce_through": "group"},
        {"skip_all_reduce_unused_params": True, "batched_grad_copy": True, "dim": 1, "check_reduction": True},
        {"device_mesh": mesh, "device_ids": [torch.device("cpu")], "output_device": torch.device("cpu")},
    ):
        net = two_layers()
        assert_close(train(DistributedDataParallel(net, **options), inputs()[rank : rank + 1]), alone)
    net = two_layers()
    named = list(net.named_parameters())
    ddp = DistributedDataParallel(
        net, delay_all_reduce_named_params=named[:2], param_to_hook_all_reduce=named[2][1]
    )
    assert_close(train(ddp, inputs()[rank : rank + 1]), alone)


@ranks(2, group="gloo")
def test_caps_of_single_buckets(rank: int) -> None:
    net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])  # 1 KiB each
    kib = 1 / 1024
    ddp = DistributedDataParallel(net, bucket_cap_mb=25, bucket_cap_mb_list=[kib, 3 * kib, kib])
    sizes = [bucket.nbytes for bucket in ddp._passes.reduction.arena.plan.buckets]
    assert sizes == [1024, 3072, 1024]


@ranks(2, group="gloo")
def test_wrong_arguments_are_refused(rank: int) -> None:
    net = two_layers()
    stranger = nn.Parameter(torch.zeros(1))
    named = list(net.named_parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bucket_cap_mb": -1}, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket_cap_mb_list"),
        ({"device_ids": [0, 1]}, "one device"),
        ({"device_ids": [0]}, "where the module is not"),
        ({"delay_all_reduce_named_params": named[:1]}, "set at the same time"),
        ({"delay_all_reduce_named_params": [("x", stranger)], "param_to_hook_all_reduce": named[0][1]}, "x"),
        ({"delay_all_reduce_named_params": named[:1], "param_to_hook_all_reduce": stranger}, "param_to_hook"),
        ({"mixed_precision": _MixedPrecision(torch.int8)}, "param_dtype is torch.int8"),
        ({"device_mesh": dist.init_device_mesh("cpu", (2, 1))}, "one dimension"),
        ({"device_mesh": dist.init_device_mesh("cpu", (2,)), "process_group": dist.group.WORLD}, "both name"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(net, **options)
    with pytest.raises(TypeError, match="describes no precision"):
        DistributedDataParallel(net, mixed_precision=torch.float16)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group="gloo")
def test_mixed_precision_on_the_cpu(rank: int, view: bool) -> None:
    """The reference: autocast by hand, each rank's gradient rounded to the dtype in which it is averaged."""
    x = inputs()
    for precision in (
        _MixedPrecision(torch.bfloat16),
        _MixedPrecision(torch.bfloat16, torch.float32, torch.float64),
        _MixedPrecision(reduce_dtype=torch.float16),
    ):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        net.register_buffer("shift", torch.ones(2))
        reference = copy.deepcopy(net)
        ddp = DistributedDataParallel(net, mixed_precision=precision, gradient_as_bucket_view=view)
        assert net.shift.dtype is (precision.buffer_dtype or torch.float32)
        reference.load_state_dict({name: value.to(torch.float32) for name, value in net.state_dict().items()})
        low = precision.param_dtype or torch.float32
        reduced = precision.reduce_dtype or low
        for _ in range(2):
            for parameter in net.parameters():
                parameter.grad = None
            output = ddp(x[rank : rank + 1])
            assert output.dtype is low
            output.sum().backward()
            mean = [torch.zeros_like(p) for p in net.parameters()]
            for other in range(2):
                twin = copy.deepcopy(reference).to(low)
                twin(x[other : other + 1].to(low)).sum().backward()
                for total, parameter in zip(mean, twin.parameters(), strict=True):
                    total += parameter.grad.to(reduced).float() / 2
            for parameter, expected in zip(net.parameters(), mean, strict=True):
                assert parameter.dtype is parameter.grad.dtype is torch.float32
                assert_close(parameter.grad, expected.to(reduced).float())
    assert all(value.dtype is not torch.bfloat16 for value in ddp.module.state_dict().values())
