"""Gradients on devices over several hosts, `reduce_through="hosts"`: within each host first, then between.

The devices are simulated: CPU tensors, with Gloo within each host (`tests.stand_in_device`).
`test_ddp_gpu.py` has a test with real ones.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from paceline.errors import (
    ConfigError,
    DeadlineError,
    GroupClosedError,
    NonFiniteGradientError,
    PeerLostError,
    SkippedPassError,
    UnusedParameterError,
)
from paceline.reducer.between_hosts.messages import InFlightBucket
from paceline.torch import DistributedDataParallel, LocalSGD
from paceline.torch.communicator.device_shard_transport import DeviceShardTransport
from paceline.torch.communicator.local_group import LocalCalls
from paceline.torch.compression import EightBitCompression, eight_bit_hook
from tests.harness import kept_ranks, ranks
from tests.multiprocess.files_and_threads import files_and_threads, until_no_more_than
from tests.multiprocess.rank_signals import publish, wait_until_published
from tests.multiprocess.test_hosts import (
    BLOCKS,
    ROUND_ROBIN,
    Branches,
    backward,
    digest,
    in_one_process,
    network,
    place,
    rows,
    sparse,
)
from tests.stand_in_device import be_a_device

THREE_PER_HOST = (6, BLOCKS, 2)
"""Bucket sizes are 16 elements times a power of two, or nearly: three ranks cannot divide them evenly."""


def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(net, reduce_through="hosts", **{"timeout_s": 60, **options})
    assert wrapped.gradient_path == "hosts" and wrapped.bits == "engine"
    return wrapped


def assert_same_on_all_ranks(net: nn.Module) -> None:
    assert_same_digests([digest(net)])


def assert_same_digests(digests: list[str]) -> None:
    """Compare the digests of many backwards in one exchange, which costs less than one for each."""
    by_rank: list[list[str]] = [[]] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(by_rank, digests)
    differ = [number for number, each in enumerate(zip(*by_rank, strict=True)) if len(set(each)) != 1]
    assert not differ


def assert_means(net: nn.Module, step: int, world_size: int, weights: list[float] | None = None) -> None:
    for parameter, expected in zip(net.parameters(), in_one_process(step, world_size, weights), strict=True):
        assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "world_size, layout, num_hosts, in_buffer",
    [
        (4, BLOCKS, 2, False),
        (4, ROUND_ROBIN, 2, True),
        (*THREE_PER_HOST, False),
        (*THREE_PER_HOST, True),
        (6, BLOCKS, 3, False),
    ],
)
@kept_ranks("world_size", group="gloo")
def test_means_are_those_of_the_whole_batch(rank, world_size, layout, num_hosts, in_buffer, monkeypatch):
    place(rank, layout, num_hosts)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net, bucket_cap_mb=0.01, gradient_as_bucket_view=in_buffer)
    sizes = [bucket.nbytes // 4 for bucket in wrapped.bucket_layout()]
    assert len(sizes) > 2
    if world_size // num_hosts == 3:
        assert any(size % 3 for size in sizes)
    for step in range(4):
        backward(wrapped, step, rank, world_size)
        assert_means(net, step, world_size)
        assert_same_on_all_ranks(net)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
    assert math.isclose(float(wrapped.clip_grad_norm_(math.inf)), norm, rel_tol=1e-6)


@kept_ranks(4, group="gloo")
def test_weighted_means(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net)
    for step, weights in enumerate([[1.0, 2.5, 0.0, 7.0], [1.0, 2.5, 0.0, 7.0], [1e-3, 3.0, 0.5, 1.0]]):
        net.zero_grad()
        with wrapped.weight(weights[rank]):
            wrapped(rows(step, 4)[rank::4]).square().mean().backward()
        assert_means(net, step, 4, weights)
        assert_same_on_all_ranks(net)


class Products(nn.Module):
    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: float) -> torch.Tensor:
        return sum((p * x).sum().abs().float() for p in self.parameters())


@pytest.mark.parametrize("world_size, layout, num_hosts", [(4, BLOCKS, 2), THREE_PER_HOST])
@kept_ranks("world_size", group="gloo")
def test_dtypes_side_by_side(rank, world_size, layout, num_hosts, monkeypatch):
    place(rank, layout, num_hosts)
    be_a_device(monkeypatch)
    names = ("float32", "float64", "float16", "bfloat16", "complex64")
    net = Products({f"p_{name}": torch.ones(50, dtype=getattr(torch, name)) for name in names})
    wrapped = wrap(net)
    for step in range(3):
        net.zero_grad()
        wrapped(float(rank + step)).backward()
        mean = (world_size - 1) / 2 + step
        for name, parameter in net.named_parameters():
            assert parameter.grad.dtype is parameter.dtype
            assert_allclose(torch.view_as_real(parameter.grad.to(torch.complex128))[:, 0], mean, rtol=1e-2)
            if name in ("p_float32", "p_float64"):
                assert_allclose(parameter.grad, mean, rtol=1e-6)


@kept_ranks(4, group="gloo")
def test_more_buckets_than_are_in_flight_at_a_time(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network(depth=8)
    wrapped = wrap(net, bucket_cap_mb=0.002)
    assert len(wrapped.bucket_layout()) > 12
    for step in range(3):
        backward(wrapped, step, rank, 4)
        own = network(depth=8)
        total = [torch.zeros_like(p) for p in own.parameters()]
        for other in range(4):
            backward(own, step, other, 4)
            for sum_, parameter in zip(total, own.parameters()):
                sum_ += parameter.grad / 4
        for parameter, expected in zip(net.parameters(), total):
            assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@kept_ranks(4, group="gloo")
def test_calls_within_a_host_follow_the_order_of_the_plan(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    called: list[tuple[str, int, threading.Thread]] = []
    for name in ("reduce_scatter", "all_gather"):
        original = getattr(LocalCalls, name)

        def note(self, flat, bucket, name=name, original=original):
            called.append((name, bucket, threading.current_thread()))
            return original(self, flat, bucket)

        monkeypatch.setattr(LocalCalls, name, note)
    net = network()
    wrapped = wrap(net, bucket_cap_mb=0.002)
    backward(wrapped, 0, rank, 4)
    called.clear()
    numbers = range(len(wrapped.bucket_layout()))
    backward(wrapped, 1, rank, 4)
    expected = [(name, number) for name in ("reduce_scatter", "all_gather") for number in numbers]
    assert [(name, bucket) for name, bucket, _ in called] == expected
    assert {thread for _, _, thread in called} == {threading.current_thread()}


@kept_ranks(4, group="gloo")
def test_unused_parameters(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    wrapped = wrap(Branches())
    with pytest.raises(UnusedParameterError) as caught:
        wrapped(torch.ones(1, 3), left=True, right=rank != 3).backward()
    assert caught.value.unused == {"right.weight": (3,), "right.bias": (3,)}
    net = Branches()
    wrapped = wrap(net, find_unused_parameters=True, bucket_cap_mb=1e-6)
    for _ in range(2):
        net.zero_grad()
        wrapped(torch.ones(1, 3), left=rank == 3).backward()
        assert_allclose(net.left.bias.grad, [0.25, 0.25])
        assert net.right.bias.grad is None


@kept_ranks(4, group="gloo")
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net, nonfinite="raise", bucket_cap_mb=0.01)
    backward(wrapped, 0, rank, 4)
    with pytest.raises(NonFiniteGradientError) as caught:
        (wrapped(rows(1, 4)[rank::4]).sum() * (math.inf if rank == 2 else 1.0)).backward()
    assert set(caught.value.nonfinite) == {2} and "3.weight" in caught.value.nonfinite[2]
    backward(wrapped, 2, rank, 4)
    assert_means(net, 2, 4)
    # One element, in the shard of one rank on each host: the other ranks exchange none of it between hosts.
    handle = net[3].bias.register_hook(lambda gradient: gradient * (math.inf if rank == 1 else 1.0))
    with pytest.raises(NonFiniteGradientError) as caught:
        backward(wrapped, 3, rank, 4)
    assert caught.value.nonfinite == {1: ("3.bias",)}
    handle.remove()
    handle = net[3].bias.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    # Sums overflow only if a rank's weight is larger than expected.
    with pytest.raises(NonFiniteGradientError) as caught, wrapped.weight(1.0 + rank):
        backward(wrapped, 3, rank, 4)
    assert caught.value.overflowed == ("3.bias",) and not caught.value.nonfinite
    handle.remove()
    backward(wrapped, 4, rank, 4)
    assert_means(net, 4, 4)


@kept_ranks(4, group="gloo")
def test_skipped_and_failed_backwards(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net)
    backward(wrapped, 0, rank, 4)
    if rank == 3:
        wrapped(rows(1, 4))
    with pytest.raises(SkippedPassError) as caught:
        backward(wrapped, 1, rank, 4)
    assert caught.value.ranks == (3,)
    backward(wrapped, 2, rank, 4)
    assert_means(net, 2, 4)
    loss = wrapped(rows(3, 4)[rank::4]).square().mean()
    if rank == 1:
        handle = net[0][0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
    else:
        with pytest.raises(SkippedPassError):
            loss.backward()
    backward(wrapped, 4, rank, 4)
    assert_means(net, 4, 4)


@kept_ranks(4, group="gloo")
def test_two_models_and_ranks_that_run_out_of_data(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    nets = network(), network()
    pair = [wrap(net, bucket_cap_mb=0.01) for net in nets]
    for step in range(3):
        for wrapped in pair:
            backward(wrapped, step, rank, 4)
    assert digest(nets[0]) == digest(nets[1])
    for net in nets:
        net.zero_grad()
    x = rows(7, 4)[rank::4]
    sum(wrapped(x).square().mean() for wrapped in pair).backward()  # the buckets of both models alternate
    for net in nets:
        assert_means(net, 7, 4)
    for step in range(2 if rank == 1 else 4):
        backward(pair[0], step, rank, 4)
    pair[0].finish()


@kept_ranks(4, group="gloo")
def test_buffers_and_gradients_that_accumulate(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    net.register_buffer("seen", torch.full((3,), float(rank)))
    wrapped = wrap(net, buffers={"seen": "average"}, broadcast_buffers=False)
    net.seen.fill_(float(rank))
    with wrapped.no_sync():
        backward(wrapped, 0, rank, 4)
    wrapped(rows(0, 4)[rank::4]).square().mean().backward()
    for parameter, expected in zip(net.parameters(), in_one_process(0, 4), strict=True):
        assert_allclose(parameter.grad, 2 * expected, rtol=1e-4, atol=1e-6)
    assert_allclose(net.seen, 1.5)


@pytest.mark.parametrize(
    "world_size, layout, num_hosts, kind",
    [(4, BLOCKS, 2, "bf16"), (4, BLOCKS, 2, "topk"), (*THREE_PER_HOST, "int8")],
)
@kept_ranks("world_size", group="gloo")
def test_compression_between_hosts(rank, world_size, layout, num_hosts, kind, monkeypatch):
    place(rank, layout, num_hosts)
    be_a_device(monkeypatch)
    net = network()
    if kind == "topk":
        for parameter in net.parameters():
            parameter.register_hook(sparse)
    wrapped = wrap(net, bucket_cap_mb=0.01, compress_between_hosts=kind, nonfinite="ignore")
    backward(wrapped, 0, rank, world_size)
    total = [torch.zeros_like(p) for p in net.parameters()]
    most = 20 if kind == "topk" else 10
    digests = []
    for _ in range(most):  # the same gradient each time: with error feedback the mean comes close to it
        backward(wrapped, 1, rank, world_size)
        digests.append(digest(net))
        for sum_, parameter in zip(total, net.parameters()):
            sum_ += parameter.grad / most
    assert_same_digests(digests)
    exact = in_one_process(1, world_size)
    if kind == "topk":
        exact = [sparse(torch.from_numpy(each)).numpy() for each in exact]
    scale = max(float(abs(expected).max()) for expected in exact)
    is_rounded = False
    for sum_, parameter, expected in zip(total, net.parameters(), exact, strict=True):
        assert_allclose(sum_, expected, atol=scale * (0.06 if kind == "topk" else 2e-3))
        is_rounded |= float((parameter.grad - torch.from_numpy(expected)).abs().max()) > 1e-6 * scale
    assert is_rounded
    # Encoding spreads a NaN over neighbouring elements; later backwards may not keep any of them.
    (wrapped(rows(2, world_size)[rank::world_size]).sum() * (math.nan if rank == 1 else 1.0)).backward()
    for step in (3, 4):
        backward(wrapped, step, rank, world_size)
        assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


class Upwards(nn.Module):
    """Runs its layers from the last to the first, so that gradients are ready in order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(reversed(network()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "world_size, layout, num_hosts, kind", [(4, BLOCKS, 2, "topk"), (6, BLOCKS, 3, "int8")]
)
@kept_ranks("world_size", group="gloo")
def test_residuals_of_the_first_backward_are_sent_later(
    rank, world_size, layout, num_hosts, kind, monkeypatch
):
    """A new plan is made after it: the buckets change, and which rank sends which element."""
    place(rank, layout, num_hosts)
    be_a_device(monkeypatch)
    net, alone = Upwards(), Upwards().double()
    if kind == "topk":
        for parameter in (*net.parameters(), *alone.parameters()):
            parameter.register_hook(sparse)
    wrapped = wrap(net, bucket_cap_mb=0.01, compress_between_hosts=kind)
    before = wrapped.bucket_layout()
    backward(wrapped, 0, rank, world_size)
    total = [parameter.grad.clone() for parameter in net.parameters()]
    for _ in range(6 if kind == "topk" else 2):
        net.zero_grad()
        (wrapped(rows(0, world_size)[rank::world_size]).sum() * 0).backward()  # sends residuals only
        for sum_, parameter in zip(total, net.parameters()):
            sum_ += parameter.grad
    assert wrapped.bucket_layout() != before
    alone(rows(0, world_size).double()).square().mean().backward()
    exact = [parameter.grad for parameter in alone.parameters()]
    scale = max(float(expected.abs().max()) for expected in exact)
    for sum_, expected in zip(total, exact, strict=True):
        assert_allclose(sum_, expected, atol=scale * (5e-3 if kind == "topk" else 1e-4))


@kept_ranks(3, group="gloo")
def test_hosts_of_different_sizes_are_refused_on_every_rank(rank, monkeypatch):
    place(rank, (0, 0, 1))
    be_a_device(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallel(network(), reduce_through="hosts")
    name = os.uname().nodename
    assert f"host 0 ({name}) has 2: ranks 0-1\n" in caught.value.seen
    assert f"host 1 ({name}) has 1: rank 2" in caught.value.seen
    backward(DistributedDataParallel(network(), reduce_through="group"), 0, rank, 3)


@kept_ranks(4, group="gloo")
def test_options_that_exclude_it_are_refused_on_every_rank(rank, monkeypatch):
    place(rank)
    with pytest.raises(ConfigError, match="skip_all_reduce_unused_params"):
        DistributedDataParallel(network(), reduce_through="hosts", skip_all_reduce_unused_params=True)
    be_a_device(monkeypatch)
    with pytest.raises(ConfigError, match="deterministic"):
        DistributedDataParallel(network(), reduce_through="hosts", deterministic="world")
    wrapped = wrap(network(), compress_between_hosts="int8")
    with pytest.raises(ConfigError, match="a communication hook"):
        wrapped.register_comm_hook(EightBitCompression(), eight_bit_hook)
    wrapped = wrap(net := network())
    wrapped.register_comm_hook(None, lambda state, bucket: _halves(bucket))
    assert wrapped.gradient_path == "group"
    backward(wrapped, 0, rank, 4)
    assert_same_on_all_ranks(net)


def _halves(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = torch.distributed.all_reduce(bucket.buffer() / 4, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@kept_ranks(2, group="gloo")
def test_one_host_exchanges_nothing_between_hosts(rank, monkeypatch):
    with pytest.warns(UserWarning, match="does nothing") if rank == 0 else contextlib.nullcontext():
        wrapped = DistributedDataParallel(network(), reduce_through="hosts", compress_between_hosts="int8")
    assert wrapped.gradient_path == "memory"  # parameters on the CPU
    backward(wrapped, 0, rank, 2)
    be_a_device(monkeypatch)
    net = network()
    with pytest.warns(UserWarning, match="does nothing") if rank == 0 else contextlib.nullcontext():
        wrapped = DistributedDataParallel(net, reduce_through="hosts", compress_between_hosts="int8")
    assert wrapped.gradient_path == "group" and wrapped.bits == "engine"
    backward(wrapped, 0, rank, 2)
    assert_means(net, 0, 2)


@kept_ranks(4, group="gloo")
def test_parameters_on_the_cpu_take_their_default_path(rank):
    place(rank)
    net = network()
    wrapped = DistributedDataParallel(net, reduce_through="hosts", deterministic="world")
    assert wrapped.gradient_path == "hosts" and wrapped.bits == "world"
    backward(wrapped, 0, rank, 4)
    assert_means(net, 0, 4)
    own = DistributedDataParallel(other := network())
    backward(own, 0, rank, 4)
    assert digest(net) == digest(other)
    with pytest.raises(ConfigError, match="local_sgd"):
        DistributedDataParallel(
            network(), reduce_through="hosts", deterministic="world", local_sgd=LocalSGD(every=2)
        )


@kept_ranks(4, group="gloo")
def test_a_model_continues_with_another_process_group(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net)
    backward(wrapped, 0, rank, 4)
    wrapped._update_process_group(torch.distributed.new_group([0, 1, 2, 3]))
    for step in range(1, 3):
        backward(wrapped, step, rank, 4)
        assert_means(net, step, 4)


@kept_ranks(4, group="gloo")
def test_deleted_models_leave_no_thread_and_no_connection(rank, monkeypatch):
    place(rank)
    be_a_device(monkeypatch)

    def train() -> None:
        wrapped = wrap(network())
        for step in range(2):
            backward(wrapped, step, rank, 4)
        del wrapped
        gc.collect()

    train()
    train()
    time.sleep(0.5)
    gc.collect()
    before = files_and_threads()
    for _ in range(3):
        train()
    until_no_more_than(before, collecting=True)


@pytest.mark.parametrize("path", ["one host", "hosts", "devices", "group"])
@kept_ranks(4, group=None)
def test_destroyed_process_groups_leave_no_thread_and_no_connection(rank, path, tmp_path, monkeypatch):
    if path != "one host":
        place(rank)
    if path == "devices":
        be_a_device(monkeypatch)

    def train(number: int) -> None:
        store = f"file://{tmp_path}/{number}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
        through = {"devices": "hosts", "group": "group"}.get(path, "auto")
        backward(DistributedDataParallel(network(), reduce_through=through), number, rank, 4)
        torch.distributed.destroy_process_group()

    train(0)
    train(1)
    time.sleep(0.5)
    gc.collect()
    before = files_and_threads()
    for number in range(2, 5):
        train(number)
    until_no_more_than(before, collecting=True)


# --- failures ---


def trained_model(rank: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[nn.Module, Any]:
    place(rank)
    be_a_device(monkeypatch)
    net = network()
    wrapped = wrap(net, **{"timeout_s": 30, "bucket_cap_mb": 0.002, **options})
    for step in range(2):
        backward(wrapped, step, rank, 4)
    torch.distributed.barrier()
    return net, wrapped


@pytest.mark.parametrize("in_backward", [False, True])
@ranks(4, group="gloo", dies={3: signal.SIGKILL})
def test_a_rank_that_dies_is_named_on_all_ranks(rank, in_backward, monkeypatch):
    net, wrapped = trained_model(rank, monkeypatch)
    if rank == 3:
        if not in_backward:
            signal.raise_signal(signal.SIGKILL)
        net[1][0].weight.register_hook(lambda _: signal.raise_signal(signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"(?i)rank 3 of 4 on host .* died") as caught:
        backward(wrapped, 2, rank, 4)
    assert caught.value.lost == (3,)
    assert time.monotonic() - started < 10
    with pytest.raises((GroupClosedError, PeerLostError)):
        backward(wrapped, 3, rank, 4)


@pytest.mark.parametrize("in_backward", [False, True])
@ranks(4, group="gloo", dies={2: ZeroDivisionError})
def test_a_rank_that_raises_is_quoted_on_all_ranks(rank, in_backward, monkeypatch):
    net, wrapped = trained_model(rank, monkeypatch)
    if rank == 2:
        if in_backward:
            net[1][0].weight.register_hook(lambda _: 1 / 0)
        try:
            if in_backward:
                backward(wrapped, 2, rank, 4)
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            sys.excepthook(ZeroDivisionError, error, None)  # as the interpreter would; the harness catches it
            raise
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="ZeroDivisionError") as caught:
        backward(wrapped, 2, rank, 4)
    assert caught.value.lost == (2,)
    assert time.monotonic() - started < 10


@kept_ranks(4, group="gloo")
def test_a_straggler_is_named_by_the_ranks_of_its_host_and_reported_to_the_others(rank, monkeypatch):
    _, wrapped = trained_model(rank, monkeypatch, timeout_s=3)
    if rank == 3:
        wait_until_published("raised", [0, 1, 2])
    with pytest.raises(DeadlineError, match=r"Rank 2 of 4 gave up waiting for rank 3") as caught:
        backward(wrapped, 2, rank, 4)
    publish("raised", rank)
    assert caught.value.late == (3,)


@kept_ranks(4, group="gloo")
def test_a_late_host_is_named(rank, monkeypatch):
    _, wrapped = trained_model(rank, monkeypatch, timeout_s=3)
    if rank > 1:
        wait_until_published("raised", [0, 1])
    with pytest.raises(
        (DeadlineError, PeerLostError), match=r"Rank [01] of 4 gave up waiting for rank [23] \(host 1"
    ):
        backward(wrapped, 2, rank, 4)
    publish("raised", rank)


@kept_ranks(4, group="gloo")
def test_the_sender_of_a_missing_message_is_named_by_all_ranks(rank, monkeypatch):
    """Only rank 1 waits for it; rank 0 waits for rank 1, which is not at fault."""
    _, wrapped = trained_model(rank, monkeypatch, timeout_s=3)
    if rank == 3:
        send = InFlightBucket._send

        def send_late(*arguments: Any) -> None:
            wait_until_published("raised", [0, 1, 2])
            send(*arguments)

        monkeypatch.setattr(InFlightBucket, "_send", send_late)
    with pytest.raises(DeadlineError) as caught:
        backward(wrapped, 2, rank, 4)
    publish("raised", rank)
    # The first to give up is either rank 3, whose shards are stuck, or a rank that waits for it.
    assert "gave up waiting for rank 3" in str(caught.value) or caught.value.summary.startswith("Rank 3 ")


@pytest.mark.parametrize("at", ["_prepare", "_gather_all"])
@kept_ranks(4, group="gloo")
def test_an_interrupted_hook_is_reported_to_all_hosts_at_once(rank, at, monkeypatch):
    _, wrapped = trained_model(rank, monkeypatch)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if rank == 3:
        monkeypatch.setattr(DeviceShardTransport, at, interrupt)  # as if a signal arrived here
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 3 else PeerLostError) as caught:
        backward(wrapped, 2, rank, 4)
    assert time.monotonic() - started < 20
    if rank != 3:
        assert caught.value.lost == (3,) and "KeyboardInterrupt" in str(caught.value)
    with pytest.raises((GroupClosedError, PeerLostError)):
        backward(wrapped, 3, rank, 4)
