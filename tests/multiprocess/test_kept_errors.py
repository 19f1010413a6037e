"""Compression residuals after backwards that fail, and of parameters that no rank uses.

With `compress_between_hosts`, with the compressing hooks, and in local SGD. The tests choose the gradients,
so the reference is their sum, in float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import nn

from paceline.errors import NonFiniteGradientError, SkippedPassError, UnusedParameterError
from paceline.torch import DistributedDataParallel, LocalSGD
from paceline.torch.compression import (
    Bf16Compression,
    EightBitCompression,
    Fp16Compression,
    bf16_hook,
    eight_bit_hook,
    fp16_hook,
)
from tests.harness import kept_ranks
from tests.multiprocess.test_hosts import ALONE, BLOCKS, Layout, place, sparse
from tests.stand_in_device import be_a_device

HOOKS = {
    "fp16 hook": (Fp16Compression, fp16_hook),
    "bf16 hook": (Bf16Compression, bf16_hook),
    "8 bit hook": (EightBitCompression, eight_bit_hook),
}
KINDS = ["bf16", "fp16", "int8", "topk"]
each_kind = pytest.mark.parametrize("kind", [*KINDS, *HOOKS])
# How much may be missing from a sum of many gradients of about 1: the residuals of a few of them.
MISSING = {"topk": 4.0, "int8": 0.03, "8 bit hook": 0.03, "fp16": 0.002, "fp16 hook": 0.002}


class Parts(nn.Module):
    """Each parameter's gradient is the input for it; a parameter without an input is unused."""

    SIZES = (700, 3, 5000, 40, 129)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in self.SIZES)

    def forward(self, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        return sum((self.parts[index] * value).sum() for index, value in gradients.items())


def gradients_of(step: int, rank: int, used: Any = range(5), scale: float = 1.0) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = [torch.randn(size, generator=generator) * scale for size in Parts.SIZES]
    return {index: drawn[index] for index in used}


def mean_of(step: int, world_size: int, index: int) -> np.ndarray:
    return np.mean([gradients_of(step, rank)[index].double().numpy() for rank in range(world_size)], axis=0)


def wrap(net: nn.Module, kind: str, **options: Any) -> DistributedDataParallel:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.02, **options}
    if kind in HOOKS:
        wrapped = DistributedDataParallel(net, **options)
        make, hook = HOOKS[kind]
        wrapped.register_comm_hook(make(), hook)
        return wrapped
    return DistributedDataParallel(net, compress_between_hosts=kind, **options)


def taken(net: nn.Module) -> list[np.ndarray | None]:
    """Return copies of the gradients."""
    return [None if p.grad is None else p.grad.numpy().copy() for p in net.parameters()]


# --- backwards that fail ---


class Failed(Exception):
    """Raised by a user's hook."""


@contextlib.contextmanager
def failing(parameter: nn.Parameter) -> Iterator[None]:
    def fail(_: torch.Tensor) -> None:
        raise Failed

    handle = parameter.register_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def not_finite(wrapped: Any, step: int, rank: int) -> None:
    """Large gradients, with one infinity on the last rank, which the other ranks learn of at the end."""
    given = gradients_of(step, rank, scale=1e4)
    if rank == wrapped.world_size_ - 1:
        given[1][2] = math.inf
    with contextlib.suppress(NonFiniteGradientError):
        wrapped(given).backward()


def left_out_by_one(wrapped: Any, step: int, rank: int) -> None:
    """One rank does not use a parameter, although none may be unused."""
    with pytest.raises(UnusedParameterError):
        wrapped(gradients_of(step, rank, range(5) if rank else [0, 1, 2, 3], scale=1e4)).backward()


def raised(wrapped: Any, step: int, rank: int) -> None:
    """A hook raises on all ranks, when some buckets may be sent already."""
    with failing(wrapped.module.parts[0]), pytest.raises(Failed):
        wrapped(gradients_of(step, rank, scale=1e4)).backward()


def raised_on_one(wrapped: Any, step: int, rank: int) -> None:
    """A hook raises on one rank; the others learn of it at the end of their backward."""
    on_this = failing(wrapped.module.parts[0]) if rank == 1 else contextlib.nullcontext()
    with on_this, pytest.raises(Failed if rank == 1 else SkippedPassError):
        wrapped(gradients_of(step, rank, scale=1e4)).backward()


def accumulated(wrapped: Any, step: int, rank: int) -> None:
    """The NaN is in an earlier micro-batch, on one rank."""
    given = gradients_of(step, rank, scale=1e4)
    if rank == 0:
        given[4][0] = math.nan
    with wrapped.no_sync():
        wrapped(given).backward()
    with contextlib.suppress(NonFiniteGradientError):
        wrapped(gradients_of(step, rank)).backward()


FAULTS: dict[str, Any] = {
    "ignored": (not_finite, {"nonfinite": "ignore"}),
    "warned": (not_finite, {"nonfinite": "warn"}),
    "refused": (not_finite, {"nonfinite": "raise"}),
    "unused": (left_out_by_one, {"find_unused_parameters": False}),
    "raised": (raised, {}),
    "raised on one": (raised_on_one, {}),
    "accumulated": (accumulated, {"nonfinite": "ignore"}),
}


def check_discarded(rank: int, world_size: int, kind: str, fault: Any, **more: Any) -> None:
    """Failed backwards in between do not change the bits of the other backwards' gradients."""
    spoil, options = fault
    found = []
    for spoils in (False, True):
        net = Parts()
        wrapped = wrap(net, kind, **options, **more)
        wrapped.world_size_ = world_size
        for step in range(6):
            net.zero_grad()
            if spoils and step in (
                0,
                1,
                4,
            ):  # before the first good one, and before the buckets are laid out again
                spoil(wrapped, 100 + step, rank)
                net.zero_grad()
            wrapped(gradients_of(step, rank)).backward()
            found.append(taken(net))
    for plain, spoilt in zip(found[:6], found[6:], strict=True):
        for expected, got in zip(plain, spoilt, strict=True):
            assert_array_equal(got, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "kind, fault, world_size",
    [  # each fault between two hosts of two ranks, and with a hook, which does not know hosts
        ("int8", "warned", 4),
        ("int8", "unused", 4),
        ("int8", "raised on one", 4),
        ("topk", "ignored", 4),
        ("topk", "refused", 4),
        ("topk", "raised", 4),
        ("topk", "accumulated", 4),
        *(("8 bit hook", fault, 2) for fault in FAULTS),
    ],
)
@kept_ranks("world_size", group="gloo")
def test_a_failed_backward_leaves_no_residual(rank: int, kind: str, fault: str, world_size: int) -> None:
    place(rank, BLOCKS if world_size == 4 else ALONE, 2)
    check_discarded(rank, world_size, kind, FAULTS[fault])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp16 hook", "bf16 hook"])
@kept_ranks(2, group="gloo")
def test_it_leaves_no_residual_in_any_encoding_and_with_gradients_in_the_buffer(rank: int, kind: str) -> None:
    place(rank, ALONE, 2)
    for in_buffer in (False, True):
        check_discarded(rank, 2, kind, FAULTS["ignored"], gradient_as_bucket_view=in_buffer)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("layout", [ALONE, (0, 0, 1)])
@kept_ranks(3, group="gloo")
def test_it_leaves_no_residual_of_sums_over_all_hosts(rank: int, layout: Layout, monkeypatch: Any) -> None:
    """Three hosts and large shards: each value is encoded twice."""
    monkeypatch.setattr(Parts, "SIZES", (40_000, 3, 50_000, 40, 129))
    place(rank, layout, 3)
    for kind in ("topk", "int8"):
        check_discarded(rank, 3, kind, FAULTS["ignored"], bucket_cap_mb=1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("policy", ["ignored", "refused"])
@kept_ranks(4, group="gloo")
def test_it_leaves_no_residual_of_device_shards(rank: int, policy: str, monkeypatch: Any) -> None:
    """The infinity is in the shard of one rank of a host, and the other ranks have to learn of it."""
    place(rank, BLOCKS, 2)
    be_a_device(monkeypatch)
    for kind in ("topk", "int8"):
        check_discarded(rank, 4, kind, FAULTS[policy], reduce_through="hosts")


@kept_ranks(2, group="gloo")
def test_a_scaler_skips_a_step_as_a_whole(rank: int) -> None:
    """GradScaler checks the means; a run with a bad batch ends like a run without it."""
    place(rank, ALONE, 2)
    ends = []
    for has_bad in (False, True):
        net = Parts()
        wrapped = wrap(net, "topk", nonfinite="ignore")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, backoff_factor=0.999999)
        for step in range(8):
            if has_bad and step == 4:
                optimizer.zero_grad()
                given = gradients_of(99, rank, scale=1e4)
                given[2][17] = math.inf if rank == 1 else given[2][17]
                scaler.scale(wrapped(given)).backward()
                scaler.step(optimizer)
                scaler.update(8.0)
            optimizer.zero_grad()
            scaler.scale(wrapped(gradients_of(step, rank))).backward()
            scaler.step(optimizer)
            scaler.update(8.0)
        ends.append([parameter.detach().numpy().copy() for parameter in net.parameters()])
    for expected, got in zip(*ends, strict=True):
        assert_array_equal(got, expected)


# --- parameters that no rank uses ---


def check_sums(rank: int, world_size: int, kind: str, how: str, **options: Any) -> None:
    """Leave parameters out of some backwards; at most the residuals of a few are missing from their sums."""
    net = Parts()
    wrapped = wrap(net, kind, **options)
    arrived = [np.zeros(size) for size in Parts.SIZES]
    exact = [np.zeros(size) for size in Parts.SIZES]
    by_rank = [gradients_of(0, each) for each in range(world_size)]
    if kind == "topk":
        by_rank = [{index: sparse(value) for index, value in each.items()} for each in by_rank]
    given = by_rank[rank]
    means = [np.mean([each[index].double().numpy() for each in by_rank], axis=0) for index in given]
    for step in range(24):
        left_out = {0: [0, 3], 1: [1], 2: []}[step % 3]
        net.zero_grad()
        for index, parameter in enumerate(net.parameters()):
            parameter.requires_grad_(not (how == "frozen" and index in left_out))
        used = [index for index in range(5) if how == "frozen" or index not in left_out]
        wrapped({index: given[index] for index in used}).backward()
        for index, parameter in enumerate(net.parameters()):
            if index not in left_out:
                arrived[index] += parameter.grad.double().numpy()
                exact[index] += means[index]
    allowed = MISSING.get(kind, 0.01)
    for index, (got, expected) in enumerate(zip(arrived, exact, strict=True)):
        assert np.abs(got - expected).max() < allowed, (index, np.abs(got - expected).max())


@each_kind
@pytest.mark.parametrize("how", ["unused", "frozen"])
@kept_ranks(2, group="gloo")
def test_residuals_of_unused_parameters_are_kept(rank: int, kind: str, how: str) -> None:
    place(rank, ALONE, 2)
    check_sums(rank, 2, kind, how)


@pytest.mark.parametrize("layout", [ALONE, (0, 0, 1, 2)])
@kept_ranks(4, group="gloo")
def test_they_are_kept_of_sums_over_all_hosts(rank: int, layout: Layout, monkeypatch: Any) -> None:
    monkeypatch.setattr(Parts, "SIZES", (40_000, 3, 50_000, 40, 129))
    place(rank, layout, 4)
    check_sums(rank, 4, "topk", "unused", bucket_cap_mb=1)


@kept_ranks(4, group="gloo")
def test_they_are_kept_of_device_shards(rank: int, monkeypatch: Any) -> None:
    place(rank, BLOCKS, 2)
    be_a_device(monkeypatch)
    for kind in ("topk", "int8"):
        check_sums(rank, 4, kind, "unused", reduce_through="hosts")


@each_kind
@kept_ranks(2, group="gloo")
def test_a_parameter_that_one_rank_uses_gets_the_residuals_of_all(rank: int, kind: str) -> None:
    """All ranks use it once, then one rank with zeros only: the residuals of all ranks arrive in time."""
    place(rank, ALONE, 2)
    net = Parts()
    wrapped = wrap(net, kind)
    wrapped(gradients_of(0, rank)).backward()
    arrived = net.parts[0].grad.double().numpy()
    for step in range(60):
        net.zero_grad()
        used = [0, 1, 2, 3, 4] if step % 2 and rank == 0 else [1, 2, 3, 4]
        wrapped({index: value * 0 for index, value in gradients_of(0, rank, used).items()}).backward()
        assert (net.parts[0].grad is None) == (step % 2 == 0)
        arrived += 0 if step % 2 == 0 else net.parts[0].grad.double().numpy()
    if kind == "topk":  # of zeros only, no rank knows until the end of backward that they are used
        assert np.abs(arrived - mean_of(0, 2, 0)).max() < 4
    else:
        assert np.abs(arrived - mean_of(0, 2, 0)).max() < 0.02


@kept_ranks(2, group="gloo")
def test_a_users_hook_is_notified_of_good_backwards(rank: int) -> None:
    reported: list[list[int]] = []

    def hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        bucket.when_good(lambda unused: reported[-1].extend(index[id(parameter)] for parameter in unused))
        bucket.when_good(lambda unused: reported[-1].append(-1 - bucket.index()))
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / 2)

    net = Parts()
    index = {id(parameter): number for number, parameter in enumerate(net.parameters())}
    options: dict[str, Any] = {"nonfinite": "ignore", "bucket_cap_mb": 0.002}
    wrapped = DistributedDataParallel(net, find_unused_parameters=True, **options)
    wrapped.register_comm_hook(None, hook)
    for used, value in (([0, 1, 2, 3, 4], 1.0), ([1, 3], 1.0), ([0, 1], math.nan), ([0, 2], 1.0)):
        reported.append([])
        net.zero_grad()
        given = gradients_of(0, rank, used)
        given[used[0]] *= value if rank == 1 else 1.0
        wrapped(given).backward()
    buckets = len(wrapped.bucket_layout())
    assert buckets > 1
    for got, unused in zip(reported, ([], [0, 2, 4], None, [1, 3, 4]), strict=True):
        assert sorted(got) == ([] if unused is None else [*range(-buckets, 0), *unused])


# --- local SGD ---


class Halves(nn.Module):
    """Two halves, of which one is trained at a time, with given gradients."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.halves = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(2))

    def forward(self, which: int, gradient: torch.Tensor) -> torch.Tensor:
        return (self.halves[which] * gradient).sum()


@pytest.mark.parametrize("kind", ["topk", "int8"])
@pytest.mark.parametrize("how", ["unused", "frozen"])
@pytest.mark.parametrize("world_size, layout, num_hosts", [(2, ALONE, 2), (4, BLOCKS, 2)])
@kept_ranks("world_size", group="gloo")
def test_local_sgd_of_halves_that_train_in_turns(
    rank: int, world_size: int, layout: Layout, num_hosts: int, how: str, kind: str
) -> None:
    """The updates of all hosts arrive, except for the residuals of a few syncs."""
    place(rank, layout, num_hosts)
    net = Halves(1000)
    options = LocalSGD(1, outer_lr=1, outer_momentum=0)
    wrapped = DistributedDataParallel(
        net, compress_between_hosts=kind, local_sgd=options, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    given = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    if kind == "topk":
        given = [sparse(each) for each in given]
    counts = [0, 0]
    for step in range(36):
        which = step // 3 % 2
        counts[which] += 1
        if how == "frozen":
            for number, half in enumerate(net.halves):
                half.requires_grad_(number == which)
        optimizer.zero_grad()
        wrapped(which, given[rank]).backward()
        optimizer.step()
    for half in net.halves:
        half.requires_grad_(True)
    wrapped.sync_parameters()
    mean = np.mean([each.double().numpy() for each in given], axis=0)
    for half, count in zip(net.halves, counts, strict=True):
        missing = np.abs(half.detach().double().numpy() + count * mean).max()
        assert missing < MISSING[kind], missing
