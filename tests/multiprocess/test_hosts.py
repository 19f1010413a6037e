"""Gradients over several hosts: sums in each host's memory first, then between hosts.

Each rank sets which host it is on: `_host_hint` decides which ranks can share memory.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from paceline.errors import (
    ConfigError,
    GroupClosedError,
    MismatchError,
    ModelMismatchError,
    NonFiniteGradientError,
    PeerLostError,
    SkippedPassError,
    UnusedParameterError,
)
from paceline.health import exit_reports
from paceline.reducer.between_hosts.exchange import HostExchange
from paceline.reducer.between_hosts.hierarchical import HierarchicalReducer
from paceline.reducer.between_hosts.message_headers import Begin, Envelope, Message, Transfer
from paceline.reducer.between_hosts.routes import plan_route
from paceline.torch import DistributedDataParallel
from paceline.torch.communicator.hosts import GlooTransport
from paceline.torch.compression import EightBitCompression, eight_bit_hook
from tests.harness import kept_ranks, ranks, run_ranks
from tests.multiprocess.files_and_threads import files_and_threads, until_no_more_than
from tests.multiprocess.other_ranks import until
from tests.several_hosts import be_on_host, noting, send_values

BLOCKS = "block"
ROUND_ROBIN = "round robin"
ALONE = "alone"
"""Two ranks per host, in blocks or round robin; and one rank per host."""
TWO_AND_ONE = (0, 0, 1)
ONE_AND_THREE = (0, 1, 1, 1)
"""The host of each rank. In these layouts only the first rank of each host has a shard."""
Layout = str | tuple[int, ...]


def place(rank: int, layout: Layout = BLOCKS, num_hosts: int = 2) -> None:
    """Place this rank on one of several hosts."""
    world_size = int(os.environ["WORLD_SIZE"])
    if isinstance(layout, tuple):
        number = layout[rank]
    else:
        number = {BLOCKS: rank * num_hosts // world_size, ROUND_ROBIN: rank % num_hosts, ALONE: rank}[layout]
    be_on_host(number)


def network(width: int = 40, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def rows(step: int, world_size: int, width: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(4 * world_size, width, generator=generator)


def backward(model: nn.Module, step: int, rank: int, world_size: int, width: int = 40) -> None:
    model.zero_grad()
    model(rows(step, world_size, width)[rank::world_size]).square().mean().backward()


def in_one_process(step: int, world_size: int, weights: list[float] | None = None) -> list[np.ndarray]:
    """Return the gradients of the whole batch, or of its weighted mean over the ranks, in float64."""
    net = network().double()
    x = rows(step, world_size).double()
    weights = weights or [1.0] * world_size
    losses = [w * net(x[rank::world_size]).square().mean() for rank, w in enumerate(weights)]
    (sum(losses) / sum(weights)).backward()
    return [parameter.grad.numpy() for parameter in net.parameters()]


def sparse(values: torch.Tensor) -> torch.Tensor:
    """Keep one value of 12: "topk", which sends 8 of 256, sends all of them within a few steps."""
    flat = values.reshape(-1)
    return torch.where(torch.arange(len(flat)) % 12 == 0, flat, 0.0).view_as(values)


def digest(net: nn.Module) -> str:
    grads = [p.grad.view(torch.uint8) for p in net.parameters()]
    return hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads)).hexdigest()


@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize(
    "world_size, layout, num_hosts",
    [
        (4, BLOCKS, 2),
        (4, ROUND_ROBIN, 2),
        (2, ALONE, 2),
        (3, ALONE, 3),
        (3, TWO_AND_ONE, 2),
        (4, ONE_AND_THREE, 2),
        (5, (0, 1, 1, 2, 2), 3),
    ],
)
@kept_ranks("world_size", group="gloo")
def test_means_are_those_of_the_whole_batch(rank, world_size, layout, num_hosts, in_buffer):
    place(rank, layout, num_hosts)
    net = network()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=in_buffer)
    assert wrapped.gradient_path == "hosts"
    for step in range(4):
        backward(wrapped, step, rank, world_size)
        for parameter, expected in zip(net.parameters(), in_one_process(step, world_size), strict=True):
            assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
    assert math.isclose(float(wrapped.clip_grad_norm_(math.inf)), norm, rel_tol=1e-6)


@pytest.mark.parametrize("num_hosts", [2, 3])
@kept_ranks(6, group="gloo")
def test_weighted_means(rank, num_hosts):
    place(rank, BLOCKS, num_hosts)
    net = network()
    wrapped = DistributedDataParallel(net)
    weights = [1.0, 2.5, 0.0, 7.0, 1e-3, 3.0]
    for step in range(2):
        net.zero_grad()
        with wrapped.weight(weights[rank]):
            wrapped(rows(step, 6)[rank::6]).square().mean().backward()
        for parameter, expected in zip(net.parameters(), in_one_process(step, 6, weights), strict=True):
            assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


def some_weight(x: torch.Tensor) -> float:
    return float(x.abs().sum())


def train_some(
    rank: int,
    layout: Layout | None,
    num_hosts: int,
    dtype: str,
    bucket_cap_mb: float = 0.02,
    bits: str = "world",
    *,
    sends_values: bool = False,
    **options: Any,
) -> list[str]:
    """Return digests of the gradients of three backwards, and of a buffer if sums are exact.

    `layout` None: all ranks share one host. `sends_values`: one-rank hosts send gradients and not their sums,
    even of this small model.
    """
    if layout is not None:
        place(rank, layout, num_hosts)
    send_values(of_small_models=sends_values)
    world_size = int(os.environ["WORLD_SIZE"])
    net = network().to(getattr(torch, dtype))
    net.register_buffer("seen", torch.zeros(1000))
    wrapped = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb, buffers={"*": "average"}, **options)
    assert wrapped.gradient_path == ("memory" if layout is None else "hosts")
    assert wrapped.bits == bits
    found = []
    for step in range(3):
        net.zero_grad()
        net.seen.copy_(torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + rank)))
        x = rows(step, world_size)[rank::world_size].to(getattr(torch, dtype))
        (wrapped(x).square().mean() * (rank + 0.3)).backward()
        found.append(digest(net))
        if "deterministic" in options:
            found.append(hashlib.sha256(net.seen.numpy().tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_two_hosts_of_two_ranks_give_the_bits_of_one_host(dtype):
    options = {"num_hosts": 2, "dtype": dtype}
    one = run_ranks(train_some, 4, {**options, "layout": None}, group="gloo", kept=True)
    two = run_ranks(train_some, 4, {**options, "layout": BLOCKS}, group="gloo", kept=True)
    assert len(set(map(tuple, one + two))) == 1


def test_hosts_of_two_ranks_and_of_one_give_the_bits_of_one_host():
    options = {"num_hosts": 2, "dtype": "float32"}
    one = run_ranks(train_some, 3, {**options, "layout": None}, group="gloo", kept=True)
    two = run_ranks(train_some, 3, {**options, "layout": TWO_AND_ONE}, group="gloo", kept=True)
    assert len(set(map(tuple, one + two))) == 1


def test_four_hosts_of_one_rank_give_the_bits_of_one_host():
    options = {"num_hosts": 4, "dtype": "float32"}
    one = run_ranks(train_some, 4, {**options, "layout": None}, group="gloo", kept=True)
    four = run_ranks(train_some, 4, {**options, "layout": ALONE}, group="gloo", kept=True)
    assert len(set(map(tuple, one + four))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_gradients_that_are_sent_unsummed_give_the_bits_of_one_host(num_hosts, dtype):
    options = {"num_hosts": num_hosts, "dtype": dtype, "weight": some_weight}
    one = run_ranks(train_some, num_hosts, {**options, "layout": None}, group="gloo", kept=True)
    for sends_values in (False, True):  # in one message each if they have 16 bits, otherwise in two rounds
        with_values = {**options, "layout": ALONE, "sends_values": sends_values}
        alone = run_ranks(train_some, num_hosts, with_values, group="gloo", kept=True)
        assert len(set(map(tuple, one + alone))) == 1


@kept_ranks(2, group="gloo")
def test_gradients_of_16_bits_take_16_bits_between_hosts_of_one_rank(rank, monkeypatch):
    place(rank, ALONE)
    sent: list[int] = []
    sending = noting(GlooTransport.sending, lambda message, _: sent.append(len(message)))
    monkeypatch.setattr(GlooTransport, "sending", sending)
    for width, most in ((1000, 2_010_000), (100, 20_500)):
        net = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        wrapped = DistributedDataParallel(net)
        for _ in range(3):
            sent.clear()
            net.zero_grad()
            wrapped(torch.ones(1, width, dtype=torch.bfloat16)).sum().backward()
        assert 2 * width**2 <= sum(sent) < most  # torch's DDP sends as many bytes
        assert (len(sent) == 1) == (width == 100)


# 0.6 MB are sent from gradient buffer to gradient buffer, 20 kB of 16-bit values in one message.
@pytest.mark.parametrize("width, dtype", [(400, torch.float32), (100, torch.bfloat16)])
@kept_ranks(2, group="gloo")
def test_a_weight_of_zero_excludes_values_that_are_not_finite(rank, width, dtype):
    place(rank, ALONE)
    net = nn.Linear(width, width, bias=False, dtype=dtype)
    wrapped = DistributedDataParallel(net, nonfinite="raise")
    x = torch.ones(1, width, dtype=dtype)
    for step in range(2):
        net.zero_grad()
        with wrapped.weight(1.0 - rank):
            (wrapped(x).sum() * (math.nan if rank else 3.0 + step)).backward()
        assert_allclose(net.weight.grad.float(), np.full((width, width), 3.0 + step))
    net.zero_grad()
    with pytest.raises(NonFiniteGradientError) as caught:
        (wrapped(x).sum() * (math.nan if rank else 1.0)).backward()
    assert caught.value.nonfinite == {1: ("weight",)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_sums_are_those_of_one_host_in_every_layout(dtype):
    options = {"num_hosts": 2, "dtype": dtype, "deterministic": "world", "weight": some_weight}
    one = run_ranks(train_some, 4, {**options, "layout": None}, group="gloo", kept=True)
    for layout in (ROUND_ROBIN, ONE_AND_THREE, (0, 0, 0, 1)):
        found = run_ranks(train_some, 4, {**options, "layout": layout}, group="gloo", kept=True)
        assert len(set(map(tuple, one + found))) == 1, layout


@kept_ranks(4, group="gloo")
def test_exact_sums_are_refused_with_options_that_exclude_them(rank):
    place(rank, ROUND_ROBIN)
    for options in (
        {"reduce_through": "group"},
        {"skip_all_reduce_unused_params": True},
        {"compress_between_hosts": "int8"},
    ):
        with pytest.raises(ConfigError, match="deterministic") as caught:
            DistributedDataParallel(network(), deterministic="world", **options)
        assert next(iter(options)) in caught.value.expected
    wrapped = DistributedDataParallel(network(), deterministic="world")
    with pytest.raises(ConfigError, match="deterministic") as caught:
        wrapped.register_comm_hook(EightBitCompression(), eight_bit_hook)
    assert "a communication hook" in caught.value.seen
    backward(wrapped, 0, rank, 4)
    with pytest.raises(ModelMismatchError, match="deterministic"):
        DistributedDataParallel(network(), deterministic="world" if rank else None)


@kept_ranks(2, group="gloo")
def test_exact_sums_are_refused_with_a_hook_on_one_host_too(rank):
    wrapped = DistributedDataParallel(network(), deterministic="world")
    assert wrapped.gradient_path == "memory" and wrapped.bits == "world"
    with pytest.raises(ConfigError, match="deterministic"):
        wrapped.register_comm_hook(EightBitCompression(), eight_bit_hook)
    backward(wrapped, 0, rank, 2)


@pytest.mark.parametrize("layout", [ROUND_ROBIN, ONE_AND_THREE])
def test_a_layout_gives_the_same_bits_on_all_ranks_in_all_runs_and_bucket_sizes(layout):
    options = {"layout": layout, "num_hosts": 2, "dtype": "float32", "bits": "layout"}
    first = run_ranks(train_some, 4, options, group="gloo", kept=True)
    again = run_ranks(train_some, 4, {**options, "bucket_cap_mb": 25.0}, group="gloo", kept=True)
    assert len(set(map(tuple, first + again))) == 1


@kept_ranks(3, group="gloo")
def test_large_shards_go_to_their_owners_and_back(rank):
    """Three hosts, shards too large for one round, and several messages for each host."""
    place(rank, ALONE, 3)
    torch.manual_seed(0)
    net = nn.Linear(1200, 900, bias=False)  # 4.3 MB: two buckets
    wrapped = DistributedDataParallel(net)
    nbytes = max(bucket.nbytes for bucket in wrapped.bucket_layout())
    route = plan_route(nbytes // 4, 4, 0, 1, 3)
    assert not route.is_one_round and len(route.part_of(0)) > 1
    for step in range(3):
        net.zero_grad()
        x = torch.full((1, 1200), float(step + 1))
        (wrapped(x).sum() * (rank + 1)).backward()
        assert_allclose(net.weight.grad, np.full((900, 1200), 2.0 * (step + 1)), rtol=1e-6)


@kept_ranks(2, group="gloo")
def test_more_buckets_than_are_in_flight_at_a_time(rank):
    place(rank, ALONE)
    net = network(64, 12)
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.004)
    assert len(wrapped.bucket_layout()) > 12
    for step in range(3):
        backward(wrapped, step, rank, 2, 64)
        expected = [p.grad.clone() for p in net.parameters()]
        both = [torch.stack([e, e]) for e in expected]
        for mine, pair in zip(expected, both):
            torch.distributed.broadcast(pair, 0)
            assert torch.equal(mine, pair[0])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, left: bool, right: bool = False) -> torch.Tensor:
        out = (x * x.clone().requires_grad_()).sum() * 0
        out = out + (self.left(x).sum() if left else 0)
        return out + (self.right(x).sum() if right else 0)


@pytest.mark.parametrize("layout", [BLOCKS, ONE_AND_THREE])
@kept_ranks(4, group="gloo")
def test_unused_parameters(rank, layout):
    place(rank, layout)
    wrapped = DistributedDataParallel(Branches())
    with pytest.raises(UnusedParameterError) as caught:
        wrapped(torch.ones(1, 3), left=True, right=rank != 3).backward()
    assert caught.value.unused == {"right.weight": (3,), "right.bias": (3,)}
    net = Branches()
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    for _ in range(2):
        net.zero_grad()
        wrapped(torch.ones(1, 3), left=rank == 3).backward()
        assert_allclose(net.left.bias.grad, [0.25, 0.25])
        assert net.right.bias.grad is None


@pytest.mark.parametrize("layout", [BLOCKS, ONE_AND_THREE, ALONE])
@kept_ranks(4, group="gloo")
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(rank, layout):
    place(rank, layout)
    send_values(of_small_models=layout == ALONE)
    net = network()
    wrapped = DistributedDataParallel(net, nonfinite="raise", bucket_cap_mb=0.01)
    backward(wrapped, 0, rank, 4)
    with pytest.raises(NonFiniteGradientError) as caught:
        (wrapped(rows(1, 4)[rank::4]).sum() * (math.inf if rank == 2 else 1.0)).backward()
    assert set(caught.value.nonfinite) == {2} and "3.weight" in caught.value.nonfinite[2]
    net.zero_grad()
    net[3].bias.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    with pytest.raises(NonFiniteGradientError) as caught:
        wrapped(rows(1, 4)[rank::4]).sum().backward()
    assert caught.value.overflowed == ("3.bias",) and not caught.value.nonfinite


@pytest.mark.parametrize("layout", [BLOCKS, ONE_AND_THREE, ALONE])
@kept_ranks(4, group="gloo")
def test_a_skipped_backward_is_reported_to_all_hosts(rank, layout):
    place(rank, layout)
    send_values(of_small_models=layout == ALONE)
    net = network()
    wrapped = DistributedDataParallel(net)
    backward(wrapped, 0, rank, 4)
    if rank == 3:
        wrapped(rows(1, 4))
    with pytest.raises(SkippedPassError) as caught:
        backward(wrapped, 1, rank, 4)
    assert caught.value.ranks == (3,)
    backward(wrapped, 2, rank, 4)
    for parameter, expected in zip(net.parameters(), in_one_process(2, 4), strict=True):
        assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@kept_ranks(4, group="gloo")
def test_two_models_and_ranks_that_run_out_of_data(rank):
    place(rank)
    nets = network(), network()
    pair = [DistributedDataParallel(net) for net in nets]
    for step in range(3):
        for wrapped in pair:
            backward(wrapped, step, rank, 4)
    assert digest(nets[0]) == digest(nets[1])
    first = pair[0]
    for step in range(2 if rank == 1 else 4):
        backward(first, step, rank, 4)
    first.finish()


@pytest.mark.parametrize("sends_values", [False, True])
@ranks(2, group="gloo")
def test_a_message_of_another_backward_is_refused(rank, sends_values, monkeypatch):
    place(rank, ALONE)
    send_values(of_small_models=sends_values)
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=10)
    for step in range(2):
        backward(wrapped, step, rank, 2)
    write = Envelope.write  # each message gets the number of the next backward
    monkeypatch.setattr(
        Envelope, "write", lambda envelope, number, weight: write(envelope, number + 1, weight)
    )
    with pytest.raises(MismatchError, match="got another message from rank") as caught:
        backward(wrapped, 2, rank, 2)
    if caught.value.summary.startswith(f"Rank {rank} "):  # otherwise the other rank was first and reported it
        iterations = [text.split(",")[0] for text in (caught.value.expected, caught.value.got)]
        numbers = [int(text.removeprefix("iteration ")) for text in iterations]
        assert numbers[1] == numbers[0] + 1


@ranks(2, group="gloo")
def test_receives_are_begun_before_the_backward(rank, monkeypatch):
    place(rank, ALONE)
    begun: list[str] = []
    is_broken = threading.Event()

    def note_receive(message: Message, transfer: Transfer) -> None:
        if is_broken.is_set():
            raise RuntimeError("Connection closed by peer")
        begun.append("receive")

    sending, receiving = GlooTransport.sending, GlooTransport.receiving
    monkeypatch.setattr(GlooTransport, "sending", noting(sending, lambda *_: begun.append("send")))
    monkeypatch.setattr(GlooTransport, "receiving", noting(receiving, note_receive))
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=10)

    def make_backward(step: int) -> None:
        backward(wrapped, step, rank, 2)
        until(lambda: begun[-1:] == ["receive"])  # the waiting thread begins it after the backward

    for step in range(2):  # the plan is made again after the first
        make_backward(step)
    begun.clear()
    for step in range(2, 5):
        make_backward(step)
    assert begun == ["send", "receive"] * 3
    # The next backward raises for what broke meanwhile; the finished one has its means on all ranks.
    is_broken.set()
    backward(wrapped, 5, rank, 2)
    for parameter, expected in zip(net.parameters(), in_one_process(5, 2), strict=True):
        assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    torch.distributed.barrier()  # the first rank in the next backward reports it and closes the connections
    with pytest.raises(PeerLostError, match=r"lost rank [01] "):
        backward(wrapped, 6, rank, 2)


@kept_ranks(4, group="gloo")
def test_the_process_group_alone_on_request(rank):
    place(rank)
    for options in ({"reduce_through": "group"}, {"skip_all_reduce_unused_params": True}):
        wrapped = DistributedDataParallel(network(), find_unused_parameters=True, **options)
        assert wrapped.gradient_path == "group" and wrapped.bits == "engine"
        backward(wrapped, 0, rank, 4)


@ranks(4, group="gloo")
def test_ranks_may_belong_to_other_groups_before(rank):
    torch.distributed.new_group([0, 1])
    torch.distributed.new_group([0])
    place(rank)
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=10)
    backward(wrapped, 0, rank, 4)
    for parameter, expected in zip(net.parameters(), in_one_process(0, 4), strict=True):
        assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@ranks(2, group="gloo")
def test_deleted_models_leave_no_connection(rank):
    place(rank, ALONE)

    def train() -> None:
        backward(DistributedDataParallel(network()), 0, rank, 2)
        gc.collect()

    train()
    train()
    before = files_and_threads()
    for _ in range(3):
        train()
    # Gloo's threads close the group's connections some time after it is destroyed; and a model that one of
    # our threads held when garbage was collected above becomes garbage only later.
    until_no_more_than(before, collecting=True)


@ranks(4, group="gloo")
def test_an_error_in_a_forked_child_is_not_its_ranks(rank):
    place(rank)
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=10)
    backward(wrapped, 0, rank, 4)
    if rank in (1, 2):
        child = os.fork()
        if child == 0:
            try:
                sys.excepthook(ValueError, ValueError("in a child"), None)  # as the interpreter would
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    for step in range(1, 3):
        backward(wrapped, step, rank, 4)
        for parameter, expected in zip(net.parameters(), in_one_process(step, 4), strict=True):
            assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("at", ["_post_complete", "_launch"])
@ranks(4, group="gloo")
def test_an_interrupted_hook_is_reported_to_all_hosts_at_once(rank, at, monkeypatch):
    place(rank)
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=30, bucket_cap_mb=0.001)
    for step in range(2):
        backward(wrapped, step, rank, 4)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    torch.distributed.barrier()  # otherwise the other host may still be in the backward that rank 3 has ended
    if rank == 3:
        monkeypatch.setattr(HierarchicalReducer, at, interrupt)  # as if a signal arrived here
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 3 else PeerLostError) as caught:
        backward(wrapped, 2, rank, 4)
    assert time.monotonic() - started < 20
    if rank != 3:
        assert caught.value.lost == (3,) and "KeyboardInterrupt" in str(caught.value)
    with pytest.raises((GroupClosedError, PeerLostError)):
        backward(wrapped, 3, rank, 4)


@ranks(2, group="gloo")
def test_a_rank_may_exit_before_its_peer_has_received_everything(rank, monkeypatch):
    """Rank 1 stops between sending and receiving; meanwhile rank 0 ends its last backward and exits."""
    place(rank, ALONE)
    receive_next = HostExchange._receive_next

    def stop(exchange: HostExchange) -> None:
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        time.sleep(0.1)  # everything is sent
        os.kill(os.getpid(), signal.SIGSTOP)
        receive_next(exchange)

    start = GlooTransport.__init__

    def start_with_buffers(transport: GlooTransport, *arguments: Any) -> None:
        """Rank 0's kernel takes all sent bytes at once; rank 1's receives few bytes ahead of the reader."""
        start(transport, *arguments)
        for each in transport._sockets:
            buffer, nbytes = ((socket.SO_SNDBUF, 1 << 22), (socket.SO_RCVBUF, 1 << 12))[rank]
            each.setsockopt(socket.SOL_SOCKET, buffer, nbytes)

    monkeypatch.setattr(GlooTransport, "__init__", start_with_buffers)
    net = nn.Linear(512, 512, bias=False)
    wrapped = DistributedDataParallel(net, compress_between_hosts="bf16")  # few messages, 0.5 MB
    if rank == 1:
        monkeypatch.setattr(HostExchange, "_receive_next", stop)
    wrapped(torch.ones(1, 512)).sum().backward()
    assert_allclose(net.weight.grad, np.ones((512, 512)))


def bytes_through(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes that the other end has acknowledged, and the bytes received, from Linux's tcp_info."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    acknowledged, received = struct.unpack_from("=QQ", info, 120)
    return acknowledged, received


@pytest.mark.parametrize("world_size", [2, 3])
@kept_ranks("world_size", group="gloo")
def test_a_connection_carries_gradients_in_one_direction(rank, world_size, monkeypatch):
    """Gloo's thread cannot read from a connection while another thread writes to it, and polls meanwhile."""
    place(rank, ALONE, world_size)
    started: list[GlooTransport] = []
    start = GlooTransport.__init__

    def note(transport: GlooTransport, *arguments: Any) -> None:
        start(transport, *arguments)
        started.append(transport)

    monkeypatch.setattr(GlooTransport, "__init__", note)
    net = nn.Linear(512, 512, bias=False)
    wrapped = DistributedDataParallel(net)
    for _ in range(3):
        wrapped(torch.ones(1, 512)).sum().backward()
    torch.distributed.barrier()
    moved = [bytes_through(each) for each in started[0]._sockets]
    assert len(moved) == 2 * (world_size - 1)
    for sent, received in moved:
        assert min(sent, received) < 0.05 * max(sent, received), moved
    assert sum(sent > received for sent, received in moved) == world_size - 1


@ranks(2, group="gloo")
def test_a_rank_exits_only_after_its_messages_are_sent(rank, monkeypatch):
    place(rank, ALONE)
    is_through, sent, gone = threading.Event(), [], []
    is_through.set()

    class SlowTransfer:
        def __init__(self, transfer: Transfer) -> None:
            self._transfer = transfer
            sent.append(self)

        def wait(self, timeout: Any) -> None:
            self._transfer.wait(timeout)
            is_through.wait(30)
            gone.append(self)

    sending = GlooTransport.sending

    def sending_slowly(transport: GlooTransport, host: int, message: Message, tag: int) -> Begin:
        begin = sending(transport, host, message, tag)
        return lambda: SlowTransfer(begin())

    monkeypatch.setattr(GlooTransport, "sending", sending_slowly)
    net = network()
    wrapped = DistributedDataParallel(net, timeout_s=30)
    backward(wrapped, 0, rank, 2)
    until(lambda: gone == sent)  # the thread may still be waiting
    is_through.clear()
    sent.clear()
    gone.clear()
    backward(wrapped, 1, rank, 2)
    assert sent and not gone
    threading.Timer(0.5, is_through.set).start()
    exit_reports._end()  # as at the end of the process
    assert gone == sent
