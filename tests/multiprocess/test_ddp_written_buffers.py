"""Buffers that the program writes between two steps: gradients are correct, or every rank raises an error."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import ReplicasDifferError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
STEPS = 4
PATHS = ["memory", "group"]


class Scaled(nn.Module):
    """Multiplies by buffers. With `keeps_own`, forward writes the buffer `own` for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("own", torch.zeros(3))
        self.register_buffer("large", torch.ones(500))
        self.checkpoints = self.keeps_own = self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps_own:
            x = x - 0.1 * self.own.clone()
            with torch.no_grad():
                self.own.mul_(0.9).add_(x.mean(0))
        if self.raises:
            raise ValueError
        mask = getattr(self, "mask", 1.0)
        return self.linear(x) * self.factor * self.large.mean() * mask


def put(model: Scaled, value: float) -> None:
    model.factor.fill_(value)


def put_data(model: Scaled, value: float) -> None:
    model.factor.data = model.factor.data.fill_(value)
    model.factor.data.fill_(value)


def put_numpy(model: Scaled, value: float) -> None:
    model.factor.numpy()[...] = value


def put_anew(model: Scaled, value: float) -> None:
    model.factor = torch.tensor(value)


def put_in_a_part(model: Scaled, value: float) -> None:
    model.large[:40] = value


def put_data_in_a_part(model: Scaled, value: float) -> None:
    model.large.data[100:140] = value


def put_numpy_in_a_part(model: Scaled, value: float) -> None:
    model.large.numpy()[101] = value


def load(model: Scaled, value: float) -> None:
    model.load_state_dict(model.state_dict() | {"factor": torch.tensor(value)})


def add(model: Scaled, value: float) -> None:
    if "mask" in model._buffers:
        model.mask.fill_(value)
    else:
        model.register_buffer("mask", torch.tensor(value))


CHANGES: list[Callable[[Scaled, float], None]] = [
    put,
    put_data,
    put_numpy,
    put_anew,
    put_in_a_part,
    put_data_in_a_part,
    put_numpy_in_a_part,
    load,
    add,
]


def expected(change: Callable[[Scaled, float], None], first: int = 1) -> list[torch.Tensor]:
    """Returns the gradients of one process with the whole batch and rank 0's values."""
    model, found = Scaled().double(), []
    for step in range(STEPS):
        change(model, 2.0 ** (step + first))
        model._buffers.update({k: b.double() for k, b in model._buffers.items()})
        model.zero_grad()
        model(BATCH.double()).square().mean().backward()
        found.append(model.linear.weight.grad.clone())
    return found


def train(ddp: nn.Module, rank: int, write: Callable[[int], None]) -> list[torch.Tensor]:
    found = []
    for step in range(STEPS):
        write(step)
        ddp.zero_grad()
        ddp(BATCH[rank * 4 : rank * 4 + 4]).square().mean().backward()
        found.append(ddp.module.linear.weight.grad.clone())
    return found


def check(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for got, want in zip(found, right, strict=True):
        assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def without_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("who", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "each its own"])
@pytest.mark.parametrize("change", CHANGES)
@kept_ranks(2, group="gloo")
def test_different_values_on_some_ranks_raise_on_all(rank: int, change: Any, who: list[int]) -> None:
    path = PATHS[CHANGES.index(change) % 2]
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    train(ddp, rank, lambda step: None)
    if rank in who:
        change(ddp.module, 2.0 + rank)
    name = {add: "mask"}.get(change, "large" if change.__name__.endswith("in_a_part") else "factor")
    with pytest.raises(ReplicasDifferError, match=f"(?s)Buffer '{name}' was written.*sync_buffers") as caught:
        ddp(BATCH[:2]).mean().backward()
    assert caught.value.ranks == tuple(who)
    assert "forward_sync_buffers" in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("change", CHANGES)
@kept_ranks(2, group="gloo")
def test_equal_values_on_all_ranks_are_accepted(rank: int, change: Any, path: str) -> None:
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    with without_warnings():
        check(train(ddp, rank, lambda step: change(ddp.module, 2.0 ** (step + 1))), expected(change))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("change", [w for w in CHANGES if w is not add])
@kept_ranks(2, group="gloo")
def test_forward_sync_buffers_broadcasts_rank_0s_values(rank: int, change: Any, path: str) -> None:
    ddp = DistributedDataParallel(Scaled(), reduce_through=path, forward_sync_buffers=True)
    assert ddp.forward_sync_buffers
    with without_warnings():
        found = train(ddp, rank, lambda step: change(ddp.module, 2.0 ** (step + 1) + 7 * rank))
    check(found, expected(change))


@kept_ranks(2, group="gloo")
def test_buffers_registered_after_wrapping_are_broadcast_in_forward(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    check(train(ddp, rank, lambda step: add(ddp.module, 2.0 ** (step + 1) + 7 * rank)), expected(add))


@kept_ranks(2, group="gloo")
def test_sync_buffers_after_the_write_is_enough(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled())

    def write(step: int) -> None:
        if rank == 0:
            put(ddp.module, 2.0 ** (step + 1))
        ddp.sync_buffers()

    check(train(ddp, rank, write), expected(put))


@kept_ranks(2, group="gloo")
def test_a_schedule_on_rank_0_that_begins_with_the_current_value_is_followed(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled())

    def write(step: int) -> None:
        if rank == 0:
            put(ddp.module, 2.0**step)

    check(train(ddp, rank, write), expected(put, first=0))


@kept_ranks(2, group="gloo")
def test_the_error_is_raised_again_until_buffers_are_synchronised(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled())
    if rank == 0:
        put(ddp.module, 3.0)
    for _ in range(2):
        with pytest.raises(ReplicasDifferError):
            ddp(BATCH[:2]).mean().backward()
    ddp.sync_buffers()
    ddp(BATCH[:2]).mean().backward()
    assert ddp.module.factor == 3.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"buffers": {"factor": "local"}},
        {"buffers": {"factor": "average"}},
    ],
    ids=str,
)
@kept_ranks(2, group="gloo")
def test_buffers_that_are_not_broadcast_may_differ(rank: int, arguments: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(Scaled(), **arguments)
    with without_warnings():
        train(ddp, rank, lambda step: put(ddp.module, float(step + rank)))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_writes_by_forward_are_not_reported(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    model = ddp.module
    model.keeps_own = True
    x = BATCH[rank * 4 : rank * 4 + 4]
    with without_warnings():
        for step in range(8):
            model.checkpoints = step % 2 == 1
            for _ in range(1 + rank):
                with ddp.no_sync():
                    ddp(x).mean().backward()
            if rank == 0:
                ddp.eval()
                with torch.no_grad():
                    ddp(x)
                ddp.train()
            model.raises = True
            with contextlib.suppress(ValueError):
                ddp(x)
            model.raises = False
            (ddp(x).mean() + ddp(2 * x).mean()).backward()
            own = dict(model.named_buffers())["own"]
            swapped = {"module.own": own.clone(), "module.factor": model.factor.clone()}
            torch.func.functional_call(ddp, swapped, (x,)).mean().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_swapped_for_an_evaluation_and_back_are_not_reported(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    ddp.module.keeps_own = True
    x = BATCH[rank * 4 : rank * 4 + 4]
    with without_warnings():
        for _ in range(4):
            ddp(x).mean().backward()
            if rank == 0:
                before = {name: buffer.clone() for name, buffer in ddp.module.named_buffers()}
                for buffer in ddp.module.buffers():
                    buffer.fill_(0.5)
                with torch.no_grad():
                    ddp(x)
                for name, buffer in ddp.module.named_buffers():
                    buffer.copy_(before[name])


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@kept_ranks(2, group="gloo")
def test_running_statistics_that_are_being_trained_are_not_read(rank: int) -> None:
    """Writing them on some ranks changes no gradient. Rank 0's values are kept, as in torch."""
    ddp = DistributedDataParallel(normed())
    with without_warnings():
        for step in range(3):
            if rank == 0 or step == 1:
                ddp.module[1].reset_running_stats()
            ddp(BATCH[rank * 4 : rank * 4 + 4]).mean().backward()
            assert ddp.module[1].num_batches_tracked == 1
    ddp.check_replicas()


@kept_ranks(2, group="gloo")
def test_running_statistics_that_are_read_are_compared(rank: int) -> None:
    ddp = DistributedDataParallel(normed())
    ddp.module[1].eval()
    with without_warnings():
        ddp.module[1].running_var.fill_(4.0)
        ddp(BATCH[:4]).mean().backward()
    if rank == 0:
        ddp.module[1].running_var.fill_(9.0)
    with pytest.raises(ReplicasDifferError, match=r"1\.running_var"):
        ddp(BATCH[:4]).mean().backward()


@kept_ranks(2, group="gloo")
def test_broadcasts_in_forward_with_uneven_data(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    for step, x in enumerate(ddp.iterate([BATCH[:2]] * (2 + rank))):
        ddp.module.factor.fill_(float(step + 5 * rank))
        with ddp.no_sync():
            ddp(x).mean().backward()
        ddp(x).mean().backward()
    ddp.check_replicas()


@pytest.mark.parametrize("path", ["auto", "group"])
@kept_ranks(2, group="gloo")
def test_wrapping_a_second_model_with_the_same_module_is_not_reported(rank, path):
    shared = Scaled()
    shared.keeps_own = True
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    shared.large.mul_(2.0)  # on every rank
    second = DistributedDataParallel(nn.Sequential(shared, nn.Linear(1, 1)), reduce_through=path)
    for model in (first, second, first):
        model(BATCH[rank::2]).sum().backward()
    if rank == 1:
        shared.large.mul_(3.0)
    with pytest.raises(ReplicasDifferError, match="large"):
        first(BATCH[rank::2]).sum().backward()


@kept_ranks(2, group="gloo")
def test_a_write_that_the_program_broadcasts_itself_is_accepted(rank):
    """torch does not count writes by collectives, and the middle of a large buffer is not compared."""
    ddp = DistributedDataParallel(Scaled())
    for step in range(STEPS):
        if step == 2:
            if rank == 0:
                ddp.module.large[200:300] = 0
            torch.distributed.broadcast(ddp.module.large, 0)
        ddp(BATCH[rank::2]).sum().backward()
    assert ddp.module.large.sum() == 400


@kept_ranks(2, group="gloo")
def test_sync_buffers_of_another_wrapper_of_the_same_module_is_enough(rank):
    shared = Scaled()
    first = DistributedDataParallel(nn.Sequential(shared))
    second = DistributedDataParallel(nn.Sequential(shared))
    for step in range(STEPS):
        if step == 2:
            if rank == 0:
                put(shared, 0.5)
            second.sync_buffers()
        first(BATCH[rank::2]).sum().backward()
    assert shared.factor == 0.5


@kept_ranks(2, group="gloo")
def test_forward_sync_buffers_with_uneven_data_and_evaluation(rank):
    """The rank without data joins the broadcast, although its last forward was in evaluation mode."""
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    for batch in ddp.iterate([BATCH[rank::2]] * (3 if rank == 0 else 1)):
        ddp(batch).sum().backward()
        ddp.eval()
        ddp(batch)
        ddp.train()


@kept_ranks(2, group="gloo")
def test_forward_sync_buffers_with_an_evaluation_before_backward(rank: int) -> None:
    """The rank without data repeats the forwards of the last backward, not the evaluation after them."""
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    loss = ddp(BATCH[rank::2]).square().mean()
    if rank == 0:
        ddp.eval()
        ddp(BATCH[:4])
        ddp.train()
    loss.backward()
    for _ in ddp.iterate(range(2 * rank)):
        ddp(BATCH[rank::2]).square().mean().backward()
    losses = [ddp(BATCH[rank::2]).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    for _ in ddp.iterate(range(2 * rank)):
        ddp(BATCH[rank::2]).square().mean().backward()


@pytest.mark.parametrize("more", [0, 1])
@kept_ranks(2, group="gloo")
def test_rank_0s_values_are_broadcast_in_the_first_forward_after_uneven_data(rank: int, more: int) -> None:
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    for epoch in range(3):
        if rank == 0:
            put(ddp.module, 2.0 + epoch)
        for number, _ in enumerate(ddp.iterate(range(2 + more * rank))):
            ddp.zero_grad()
            ddp(BATCH[rank::2]).square().mean().backward()
            assert number or ddp.module.factor == 2.0 + epoch


@kept_ranks(2, group="gloo")
def test_forward_sync_buffers_with_data_that_ends_during_accumulation(rank):
    """The forward in no_sync() has already broadcast the buffers when the data of a rank ends."""
    ddp = DistributedDataParallel(Scaled(), forward_sync_buffers=True)
    for number, batch in enumerate(ddp.iterate([BATCH[rank::2]] * (4 - rank))):
        with contextlib.nullcontext() if number % 2 else ddp.no_sync():
            ddp(batch).sum().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_equal_values_that_only_rank_0_loads_before_the_first_step(rank: int, path: str) -> None:
    """Includes a buffer that the first forward writes, so that its values have changed when ranks compare."""
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    ddp.module.keeps_own = True
    if rank == 0:
        ddp.module.load_state_dict({name: each.clone() for name, each in ddp.module.state_dict().items()})
    with without_warnings():
        train(ddp, rank, lambda step: None)


@kept_ranks(2, group="gloo")
def test_different_values_before_the_first_step_in_a_buffer_that_forward_writes(rank: int) -> None:
    ddp = DistributedDataParallel(Scaled())
    ddp.module.keeps_own = True
    if rank == 0:
        ddp.module.own.fill_(0.5)
    with pytest.raises(ReplicasDifferError, match="Buffer 'own' was written"):
        ddp(BATCH[:4]).mean().backward()


@kept_ranks(2, group="gloo")
def test_a_write_is_reported_if_ranks_began_with_different_buffers(rank: int) -> None:
    model = Scaled()
    model.factor.fill_(1.0 + rank)
    ddp = DistributedDataParallel(model, init_sync_buffers=False)
    if rank == 0:
        model.factor.fill_(1.0)  # its current value, which differs from rank 1's
    with pytest.raises(ReplicasDifferError, match="Buffer 'factor' was written"):
        ddp(BATCH[:4]).mean().backward()


def with_parametrization() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(slowly_estimated())


def with_hook() -> nn.Module:
    return nn.utils.spectral_norm(slowly_estimated())


def slowly_estimated() -> nn.Linear:
    """A layer with nearly equal largest singular values, for which the power iteration converges slowly."""
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.mul_(0.05).add_(torch.eye(3))
    return linear


def spectral(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make(), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("make", [with_parametrization, with_hook])
@kept_ranks(2, group="gloo")
def test_a_spectral_norm_that_only_one_rank_iterates(rank: int, make: Any, reader: int) -> None:
    """From the second such step on, gradients equal those of one process that iterates like rank 0."""
    ddp = DistributedDataParallel(spectral(make))
    right = spectral(make).double()
    with without_warnings():
        for step in range(5):
            if step and rank == reader:
                ddp.module[0](BATCH)  # runs one power iteration
            if step and reader == 0:
                right[0](BATCH.double())
            ddp.zero_grad()
            right.zero_grad()
            ddp(BATCH[rank * 4 : rank * 4 + 4]).square().mean().backward()
            right(BATCH.double()).square().mean().backward()
            if step != 1:
                for got, want in zip(ddp.module.parameters(), right.parameters(), strict=True):
                    assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-6)
            ddp.check_replicas()


@kept_ranks(2, group="gloo")
def test_a_spectral_norm_that_is_evaluated_is_compared(rank: int) -> None:
    ddp = DistributedDataParallel(spectral(with_parametrization))
    ddp.eval()
    if rank == 0:
        ddp.module[0].parametrizations.weight[0]._u.mul_(-1.0)
    with pytest.raises(ReplicasDifferError, match="_u"):
        ddp(BATCH).mean().backward()


@kept_ranks(2, group="gloo")
def test_a_wrapper_with_a_local_buffer_does_not_settle_a_write_to_it(rank: int) -> None:
    shared = Scaled()
    first = DistributedDataParallel(nn.Sequential(shared))
    second = DistributedDataParallel(nn.Sequential(shared), buffers={"*.factor": "local"})
    if rank == 0:
        put(shared, 3.0)
        shared.large.fill_(3.0)
    second.sync_buffers()
    with pytest.raises(ReplicasDifferError, match="factor") as caught:
        first(BATCH[rank::2]).sum().backward()
    assert "large" not in str(caught.value)


@kept_ranks(4, group="gloo")
def test_a_wrapper_over_some_ranks_does_not_settle_a_write_for_all(rank: int) -> None:
    shared = Scaled()
    groups = [torch.distributed.new_group(each) for each in ([0, 1], [2, 3])]
    first = DistributedDataParallel(nn.Sequential(shared))
    second = DistributedDataParallel(nn.Sequential(shared), process_group=groups[rank // 2])
    if rank == 0:
        put(shared, 3.0)
    second.sync_buffers()
    with pytest.raises(ReplicasDifferError, match="factor"):
        first(BATCH[rank::2]).sum().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_statistics_written_after_their_training_are_compared(rank: int, path: str) -> None:
    """While the statistics are trained, their bytes are not compared."""
    ddp = DistributedDataParallel(normed(), reduce_through=path)
    with without_warnings():
        for _ in range(2):
            ddp(BATCH[rank * 4 : rank * 4 + 4]).mean().backward()
        with ddp.no_sync():
            ddp(BATCH[rank * 4 : rank * 4 + 4]).mean().backward()
        ddp.module[1].eval()
        ddp(BATCH[:4]).mean().backward()
    ddp.module[1].train()
    ddp(BATCH[rank * 4 : rank * 4 + 4]).mean().backward()
    ddp.module[1].eval()
    if rank == 0:
        ddp.module[1].running_var.fill_(9.0)
    with pytest.raises(ReplicasDifferError, match=r"1\.running_var"):
        ddp(BATCH[:4]).mean().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_are_broadcast_from_their_new_memory(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    model = ddp.module
    model.keeps_own = True
    x = BATCH[rank * 4 : rank * 4 + 4]
    moves: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(model.own, "data", model.own.data.clone()),
        lambda: setattr(model, "own", model.own.clone()),
        lambda: model.own.data.set_(model.own.data.clone()),
        lambda: setattr(model.own, "data", torch.stack([model.own, model.own], 1)[:, 0]),
        lambda: model._buffers.update({"own": model.own.double().float().contiguous()}),
    ]
    with without_warnings():
        for move in [*moves, *moves]:
            move()
            ddp(x + rank).mean().backward()
            ddp.check_replicas()


@kept_ranks(1, group="gloo")
def test_one_rank_broadcasts_no_buffers(rank: int) -> None:
    ddp = DistributedDataParallel(normed(), reduce_through="group", weight=1.0)
    with torch.profiler.profile() as profile:
        ddp(BATCH).mean().backward()
        ddp.sync_buffers()
    assert not [event.key for event in profile.key_averages() if "broadcast" in event.key]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("end", ["finish", "join"])
@kept_ranks(2, group="gloo")
def test_the_broadcast_after_uneven_data_is_not_reported_as_a_write(rank: int, end: str, path: str) -> None:
    """Over a process group, torch counts a copy as a write. The evaluation writes other values per rank."""
    ddp = DistributedDataParallel(Scaled(), reduce_through=path)
    ddp.module.keeps_own = True
    with without_warnings():
        with ddp.join() if end == "join" else contextlib.nullcontext():
            for _ in range(2 + rank):
                ddp(BATCH[rank::2]).square().mean().backward()
        if end == "finish":
            ddp.finish()
        with torch.no_grad():
            ddp(BATCH[rank::2])
        for _ in range(2):
            ddp(BATCH[rank::2]).square().mean().backward()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_in_training", [False, True])
@kept_ranks(2, group="gloo")
def test_a_forward_overwrites_a_buffer_that_all_ranks_have_written(
    rank: int, is_in_training: bool, path: str
) -> None:
    """The forward is a no_grad evaluation in training mode, or that of another wrapped model."""
    shared = Scaled()
    shared.keeps_own = True
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    second = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    with without_warnings():
        for step in range(3):
            shared.own.fill_(step + 1.0)
            if is_in_training:
                other = second(BATCH[rank::2]).square().mean()
            else:
                other = torch.zeros(())
                with torch.no_grad():
                    first(BATCH[rank::2])
            (first(BATCH[rank::2]).square().mean() + other).backward()
    if rank == 0:
        shared.own.fill_(7.0)
    with torch.no_grad():
        first(BATCH[rank::2])
    with pytest.raises(ReplicasDifferError, match="own' was written between two steps on rank 0 of 2"):
        first(BATCH[rank::2]).square().mean().backward()


def of_each(shared: Scaled, shares: list[torch.Tensor]) -> torch.Tensor:
    """Returns the mean gradient of each rank's second forward, which reads what its first one wrote."""
    found = []
    for x in shares:
        alone = copy.deepcopy(shared).double()
        alone.zero_grad()
        alone(x.double())
        alone(x.double()).square().mean().backward()
        found.append(alone.linear.weight.grad)
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", ["uneven data", "a schedule"])
@kept_ranks(2, group="gloo")
def test_a_forward_reads_the_local_write_of_another_models_forward(rank: int, before: str, path: str) -> None:
    """No broadcast runs in between, neither after uneven data nor for a schedule on rank 0."""
    shared = Scaled()
    shared.keeps_own = True
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    second = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    for _ in first.iterate(range(2 + rank)):
        optimizer.zero_grad()
        first(BATCH[rank::2]).square().mean().backward()
        optimizer.step()
    if before == "a schedule" and rank == 0:
        shared.factor.fill_(1.0)
    first(BATCH[rank::2]).square().mean().backward()
    shared.zero_grad()
    if before == "a schedule":
        shared.factor.fill_(2.0)
    right = of_each(shared, [BATCH[::2], BATCH[1::2]])
    if before == "a schedule" and rank:
        shared.factor.fill_(1.0)  # rank 0's value replaces it
    second(BATCH[rank::2])
    first(BATCH[rank::2]).square().mean().backward()
    check([shared.linear.weight.grad], [right])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("before", ["the second model is wrapped", "rank 0 writes the same value"])
@kept_ranks(2, group="gloo")
def test_a_broadcast_in_forward_spares_what_another_models_forward_has_written(
    rank: int, before: str, path: str
) -> None:
    shared = Scaled()
    shared.keeps_own = True
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    second = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    if before == "rank 0 writes the same value":
        first(BATCH[rank::2]).square().mean().backward()
        if rank == 0:
            shared.own.copy_(shared.own.clone())
    first(BATCH[rank::2]).square().mean().backward()
    shared.zero_grad()
    right = of_each(shared, [BATCH[::2], BATCH[1::2]])
    second(BATCH[rank::2])
    first(BATCH[rank::2]).square().mean().backward()
    check([shared.linear.weight.grad], [right])


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_wrapping_settles_the_values_of_a_model_that_has_the_buffers(rank: int, path: str) -> None:
    """Wrapping gives every rank the values of rank 0, in place of those that an evaluation has left."""
    shared = Scaled()
    shared.keeps_own = True
    first = DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    first(BATCH[rank::2]).square().mean().backward()
    with torch.no_grad():
        first(BATCH[rank::2])
    if rank == 0:
        put(shared, 3.0)
    DistributedDataParallel(nn.Sequential(shared), reduce_through=path)
    assert shared.factor == 3.0
    first(BATCH[rank::2]).square().mean().backward()
    if rank == 0:
        put(shared, 5.0)
    with pytest.raises(ReplicasDifferError, match="factor' was written between two steps on rank 0 of 2"):
        first(BATCH[rank::2]).square().mean().backward()


@kept_ranks(2, group="gloo")
def test_running_statistics_that_all_ranks_write_and_one_evaluates(rank: int) -> None:
    """The other rank trains its statistics and does not read them, so the values are not compared."""
    ddp = DistributedDataParallel(normed())
    with without_warnings():
        for step in range(3):
            for buffer in ddp.module.buffers():
                buffer.fill_(step + 2)
            if rank == 0:
                ddp.eval()
                ddp(BATCH[:4])
                ddp.train()
            ddp(BATCH[rank::2]).square().mean().backward()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("who", ["all", "rank 0"])
@kept_ranks(2, group="gloo")
def test_equal_statistics_that_one_rank_loads_before_an_evaluation(
    rank: int, who: str, writer: int, path: str
) -> None:
    """Ranks keep no hash of running statistics in training. Loading different values is an error."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model, reduce_through="auto" if path == "memory" else path)

    def train_and_load(change: float) -> torch.Tensor:
        ddp(BATCH[rank::2]).sum().backward()
        if rank == writer:
            state = {name: each.clone() for name, each in model.state_dict().items()}
            state["1.running_mean"] += change
            model.load_state_dict(state)
        model.eval()
        loss = ddp(BATCH[rank::2]).sum() if who == "all" or rank == 0 else torch.zeros(())
        model.train()
        return loss

    for _ in range(2):
        train_and_load(0.0)
        ddp(BATCH[rank::2]).sum().backward()
    if who == "all":
        loss = train_and_load(1.0)
        with pytest.raises(ReplicasDifferError, match="running_mean"):
            (loss + ddp(BATCH[rank::2]).sum()).backward()
