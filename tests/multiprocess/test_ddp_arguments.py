"""Arguments of torch's DDP keep their meaning; the reference is one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import two_layers


def inputs() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(5))


def train(ddp: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).pow(2).mean().backward()
        with torch.no_grad():  # by hand: torch.optim makes torch import its compiler
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return [p.detach() for p in ddp.parameters()]


@kept_ranks(2, group="gloo")
def test_arguments_that_change_no_result(rank: int) -> None:
    alone = train(two_layers(), inputs())
    mesh = dist.init_device_mesh("cpu", (2,))
    for options in (
        {"bucket_cap_mb_list": [0.00001, 0.00005]},
        {"bucket_cap_mb_list": [0.00001], "gradient_as_bucket_view": True, "reduce_through": "group"},
        {"skip_all_reduce_unused_params": True, "batched_grad_copy": True, "dim": 1, "check_reduction": True},
        {"batched_grad_copy": True, "reduce_through": "group", "bucket_cap_mb": 0.00001},
        {"device_mesh": mesh, "device_ids": [torch.device("cpu")], "output_device": torch.device("cpu")},
    ):
        net = two_layers()
        assert_close(train(DistributedDataParallel(net, **options), inputs()[rank : rank + 1]), alone)


class Delayed(nn.Module):
    """`shared` gets its gradient in two additions, before `first` gets its own; `idle` gets none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.shared, self.idle = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def note_what_is_sent(ddp: DistributedDataParallel, *triggers: nn.Parameter) -> list[list[str]]:
    """Record the parameters whose gradients a communication hook receives.

    Each time all hooks of one of the triggers have been called, the returned list gets the names since the
    last time.
    """
    sent: list[list[str]] = []
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    got: list[str] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        got.extend(names[id(parameter)] for parameter in bucket.parameters())
        return allreduce_hook(None, bucket)

    def note(*_: Any) -> None:
        sent.append(got[:])
        got.clear()

    ddp.register_comm_hook(None, hook)
    nodes: list[Any] = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in triggers]
    for node in nodes:
        node.register_hook(note)
    ddp.nodes = nodes  # autograd itself does not keep them alive
    return sent


@pytest.mark.parametrize("path", ["memory", "group"])
@kept_ranks(2, group="gloo")
def test_delayed_parameters_wait_for_the_one_that_was_named(rank: int, path: str) -> None:
    expected = train(Delayed(), inputs())
    for view in (False, True):
        net = Delayed()
        ddp = DistributedDataParallel(
            net,
            delay_all_reduce_named_params=[
                (f"{name}.weight", getattr(net, name).weight) for name in ("shared", "idle")
            ],
            param_to_hook_all_reduce=net.first.weight,
            gradient_as_bucket_view=view,
            reduce_through=path,
            bucket_cap_mb=0.00001,
        )
        twin = copy.deepcopy(ddp)
        sent = note_what_is_sent(ddp, net.shared.weight, net.first.weight)
        assert_close(train(ddp, inputs()[rank : rank + 1]), expected)
        # They are sent at the trigger, neither sooner nor at the end; but the first plan has `idle` first.
        at_trigger, num_backwards = ["first.weight", "shared.weight"], len(sent) // 3
        first_backward, others = ["idle.weight", *reversed(at_trigger)], [["idle.weight"], [], at_trigger]
        assert sent == [[], [], [], first_backward, [], at_trigger, *others * (num_backwards - 2)]
        assert not net.idle.weight.grad.any()
        assert_close(train(twin, inputs()[rank : rank + 1]), expected)


@pytest.mark.parametrize("batched", [False, True])
@kept_ranks(2, group="gloo")
def test_gradients_are_copied_a_bucket_at_a_time(
    rank: int, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    copy_all = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda places, values: (sizes.append(len(places)), copy_all(places, values))
    )
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))  # the core copies small gradients
    ddp = DistributedDataParallel(model, batched_grad_copy=batched, reduce_through="group")
    assert ddp.batched_grad_copy == batched
    sizes.clear()  # forget the copies of rank 0's values
    (ddp(torch.ones(1, 300)).sum() * (1 + rank)).backward()
    assert sizes == [2, 2]  # to the bucket, and back
    assert_close(ddp.module[1].bias.grad, torch.full((300,), 1.5))


@kept_ranks(2, group="gloo")
def test_lazy_allocation_changes_nothing(rank: int) -> None:
    """An argument of torch 2.15, accepted with any torch."""
    ddp = DistributedDataParallel(two_layers(), lazy_bucket_allocation=True)
    assert ddp.lazy_bucket_allocation
    for _ in range(2):
        ddp.zero_grad()
        (ddp(torch.ones(1, 4)).sum() * (1 + rank)).backward()
        assert_close(ddp.module[2].bias.grad, torch.full((2,), 1.5))


@kept_ranks(2, group="gloo")
def test_wrong_arguments_are_refused(rank: int) -> None:
    net = two_layers()
    unknown_peer = nn.Parameter(torch.zeros(1))
    named = list(net.named_parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"bucket_cap_mb": -1}, "bucket_cap_mb"),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket_cap_mb_list"),
        ({"device_ids": [0, 1]}, "one device"),
        ({"device_ids": [0]}, "where the module is not"),
        ({"delay_all_reduce_named_params": named[:1]}, "set at the same time"),
        (
            {"delay_all_reduce_named_params": [("x", unknown_peer)], "param_to_hook_all_reduce": named[0][1]},
            "x",
        ),
        (
            {"delay_all_reduce_named_params": named[:1], "param_to_hook_all_reduce": unknown_peer},
            "param_to_hook",
        ),
        ({"mixed_precision": _MixedPrecision(torch.int8)}, "param_dtype is torch.int8"),
        ({"device_mesh": dist.init_device_mesh("cpu", (2, 1))}, "Only 1D device mesh"),
        (
            {"device_mesh": dist.init_device_mesh("cpu", (2,)), "process_group": dist.group.WORLD},
            "both process_group and device_mesh",
        ),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(net, **options)
    with pytest.raises(TypeError, match="describes no precision"):
        DistributedDataParallel(net, mixed_precision=torch.float16)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_mixed_precision_on_the_cpu(rank: int, view: bool) -> None:
    """The reference casts by hand, and rounds each rank's gradient to the dtype in which it is averaged."""
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
