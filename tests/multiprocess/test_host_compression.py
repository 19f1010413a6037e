"""`compress_between_hosts`: compressed gradients between hosts, with error feedback."""

from __future__ import annotations

import functools
import math
import os
import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from paceline.errors import ConfigError, NonFiniteGradientError, SkippedPassError
from paceline.reducer.between_hosts.compressed_sums import CodedSums
from paceline.reducer.between_hosts.routes import plan_route
from paceline.rendezvous import shared_memory
from paceline.torch import DistributedDataParallel
from paceline.torch.communicator.hosts import GlooTransport
from paceline.torch.compression import EightBitCompression, eight_bit_hook
from tests.harness import kept_ranks
from tests.multiprocess.test_hosts import (
    ALONE,
    BLOCKS,
    ONE_AND_THREE,
    ROUND_ROBIN,
    TWO_AND_ONE,
    Branches,
    backward,
    digest,
    in_one_process,
    network,
    place,
    rows,
    sparse,
)
from tests.several_hosts import noting

KINDS = ("bf16", "fp16", "int8", "topk")
LAYOUTS = [(4, BLOCKS, 2), (4, ROUND_ROBIN, 2), (3, ALONE, 3), (3, TWO_AND_ONE, 2), (5, (0, 1, 1, 2, 2), 3)]
each_kind = pytest.mark.parametrize("kind", KINDS)

_made: list[CodedSums] = []  # all of this process: no public name reaches a model's residuals


def _note_codes(init):
    @functools.wraps(init)
    def noted(self, *arguments):
        init(self, *arguments)
        _made.append(self)

    return noted


CodedSums.__init__ = _note_codes(CodedSums.__init__)


def same_on_all_ranks(text: str) -> bool:
    texts: list[object] = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(texts, text)
    return len(set(texts)) == 1


def undelivered(wrapped: DistributedDataParallel) -> list[np.ndarray]:
    """Return each parameter's residual: the mean over the hosts, weighted by their numbers of ranks."""
    codes = _made[-1]
    hosts: list[object] = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(hosts, own := shared_memory._host_hint()[0])
    found = []
    for index in range(len(list(wrapped.parameters()))):
        error = torch.from_numpy(codes.error_of(index)) * (hosts.count(own) / len(hosts))
        torch.distributed.all_reduce(error)
        found.append(error.numpy())
    return found


@pytest.mark.parametrize(
    "world_size, layout, num_hosts, kind",
    [(*layout, kind) for number, layout in enumerate(LAYOUTS) for kind in KINDS[number % 2 :: 2]],
)
@kept_ranks("world_size", group="gloo")
def test_sent_gradients_and_residuals_add_up_to_the_exact_ones(rank, world_size, layout, num_hosts, kind):
    place(rank, layout, num_hosts)
    net = network()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=0.01, compress_between_hosts=kind)
    assert wrapped.gradient_path == "hosts" and wrapped.bits == "buckets"
    sent = [np.zeros(p.numel()) for p in net.parameters()]
    exact = [np.zeros(p.numel()) for p in net.parameters()]
    for step in range(6):
        backward(wrapped, step, rank, world_size)
        assert same_on_all_ranks(digest(net))
        for total, parameter in zip(sent, net.parameters()):
            total += parameter.grad.double().numpy().ravel()
        for total, expected in zip(exact, in_one_process(step, world_size)):
            total += expected.ravel()
    kept = undelivered(wrapped)
    assert any(np.abs(error).max() > 0 for error in kept)
    for total, error, expected in zip(sent, kept, exact):
        assert_allclose(total + error, expected, rtol=1e-4, atol=1e-5)


@each_kind
@kept_ranks(3, group="gloo")
def test_an_owner_uses_the_decoded_sums_that_it_sends(rank, kind):
    """Three hosts and large shards, so that the sums over all hosts are encoded too."""
    place(rank, ALONE, 3)
    torch.manual_seed(0)
    net = nn.Linear(300, 200, bias=False)
    wrapped = DistributedDataParallel(net, compress_between_hosts=kind)
    (bucket,) = wrapped.bucket_layout()
    assert not plan_route(bucket.nbytes // 4, 4, 0, 1, 3).is_one_round
    x = torch.linspace(0.5, 1.5, 300)[None]
    by_rank = [x, 2 * x.flip(1), 3 * x]  # the ranks send different elements: topk can't send all of their sum
    if kind == "topk":
        by_rank = [sparse(each) for each in by_rank]
    sent = np.zeros(300)
    for _ in range(32):
        net.zero_grad()
        wrapped(by_rank[rank]).sum().backward()
        assert same_on_all_ranks(digest(net))
        sent += net.weight.grad.double().numpy().mean(0)
    # Without error feedback the mean would be far off: topk sends one of three values that are not 0.
    allowed = {"bf16": 1e-3, "fp16": 1e-3, "int8": 1e-3, "topk": 0.25}[kind]
    assert_allclose(sent / 32, sum(by_rank)[0] / 3, rtol=allowed)


@pytest.mark.parametrize(
    "layout, kind",
    [(BLOCKS, "bf16"), (BLOCKS, "topk"), ((0, 0, 1, 1, 1, 2), "fp16"), ((0, 0, 1, 1, 1, 2), "int8")],
)
@kept_ranks(6, group="gloo")
def test_weighted_means(rank, layout, kind):
    place(rank, layout, 3)
    net = network()
    wrapped = DistributedDataParallel(net, compress_between_hosts=kind)
    weights = [1.0, 2.5, 0.0, 0.0, 1e-3, 300.0]  # in the first layout, all weights of the second host are 0
    if kind == "topk":
        for parameter in net.parameters():
            parameter.register_hook(sparse)
    sent = [np.zeros(p.shape) for p in net.parameters()]
    for _ in range(32):
        net.zero_grad()
        with wrapped.weight(weights[rank]):
            loss = wrapped(rows(0, 6)[rank::6]).square().mean()
            (loss * (math.nan if weights[rank] == 0 else 1)).backward()
        for total, parameter in zip(sent, net.parameters()):
            total += parameter.grad.double().numpy()
    for total, expected in zip(sent, in_one_process(0, 6, weights), strict=True):
        scale = np.abs(expected).max()
        if kind == "topk":
            expected = sparse(torch.from_numpy(expected)).numpy()
        assert np.abs(total / 32 - expected).max() < (0.2 if kind == "topk" else 0.05) * scale


@pytest.mark.parametrize("layout", [BLOCKS, (0, 0, 0, 1)])
@each_kind
@kept_ranks(4, group="gloo")
def test_values_that_are_not_finite_are_reported(rank, kind, layout):
    place(rank, layout)
    net = network()
    wrapped = DistributedDataParallel(net, nonfinite="raise", compress_between_hosts=kind)
    backward(wrapped, 0, rank, 4)
    for bad in (math.inf, math.nan):
        net.zero_grad()  # every rank has the means in place before it raises, as on one host
        with pytest.raises(NonFiniteGradientError) as caught:
            (wrapped(rows(1, 4)[rank::4]).sum() * (bad if rank == 2 else 1.0)).backward()
        assert set(caught.value.nonfinite) == {2} and "3.weight" in caught.value.nonfinite[2]
        other = network()
        silent = DistributedDataParallel(other, nonfinite="ignore", compress_between_hosts=kind)
        (silent(rows(1, 4)[rank::4]).sum() * (bad if rank == 2 else 1.0)).backward()
        assert not any(torch.isfinite(parameter.grad).all() for parameter in other.parameters())
    net.zero_grad()
    hook = net[3].bias.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    with pytest.raises(NonFiniteGradientError) as caught:
        wrapped(rows(1, 4)[rank::4]).sum().backward()
    assert caught.value.overflowed == ("3.bias",) and not caught.value.nonfinite, caught.value
    hook.remove()
    for step in range(3):  # no infinity stays in the residuals
        backward(wrapped, step, rank, 4)
        assert all(torch.isfinite(parameter.grad).all() for parameter in net.parameters())


@pytest.mark.parametrize("layout", [BLOCKS, ONE_AND_THREE])
@kept_ranks(4, group="gloo")
def test_residuals_move_with_parameters_when_buckets_change(rank, layout):
    place(rank, layout)

    class Backwards(nn.Module):
        """Its gradients become ready in the order of registration, which the first plan does not expect."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.middle, self.first = (nn.Linear(30, 30) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    for in_buffer in (False, True):
        net, plain = Backwards(), Backwards().double()
        wrapped = DistributedDataParallel(
            net, bucket_cap_mb=0.003, gradient_as_bucket_view=in_buffer, compress_between_hosts="topk"
        )
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1))
        plain(x.double()).square().mean().backward()
        sent, layouts = [np.zeros(p.numel()) for p in net.parameters()], [wrapped.bucket_layout()]
        for step in range(1, 4):
            net.zero_grad()
            wrapped(x[rank::4]).square().mean().backward()
            layouts.append(wrapped.bucket_layout())
            for total, parameter in zip(sent, net.parameters()):
                total += parameter.grad.double().numpy().ravel()
            for total, error, exact in zip(sent, undelivered(wrapped), plain.parameters()):
                assert_allclose(total + error, step * exact.grad.numpy().ravel(), rtol=1e-4, atol=1e-6)
        assert layouts[0] != layouts[-1]


@each_kind
@kept_ranks(2, group="gloo")
def test_bytes_between_hosts(rank, kind, monkeypatch):
    place(rank, ALONE)
    sizes: list[int] = []
    sending = noting(GlooTransport.sending, lambda message, _: sizes.append(len(message)))
    monkeypatch.setattr(GlooTransport, "sending", sending)
    net = nn.Linear(512, 512, bias=False)
    wrapped = DistributedDataParallel(net, compress_between_hosts=kind)
    wrapped(torch.ones(1, 512)).sum().backward()
    fraction = {"bf16": 0.5, "fp16": 0.5, "int8": 0.2539, "topk": 0.0235}[kind]
    assert fraction * 2**20 <= sum(sizes) < fraction * 2**20 + 5000  # plus headers and a report


@kept_ranks(4, group="gloo")
def test_other_types_than_float32(rank):
    place(rank)
    for dtype, allowed in ((torch.float64, 1e-9), (torch.bfloat16, 3e-2), (torch.complex64, 2e-2)):
        net = nn.Linear(64, 8, bias=False, dtype=dtype)
        wrapped = DistributedDataParallel(net, compress_between_hosts="int8")
        x = torch.linspace(0.5, 1, 64).to(dtype)[None] * (1 + 1j if dtype.is_complex else 1)
        wrapped(x * (rank + 1)).abs().sum().backward()
        assert same_on_all_ranks(digest(net))
        mean = net.weight.grad.clone()
        net.zero_grad()
        net(x * (rank + 1)).abs().sum().backward()
        expected = torch.view_as_real(net.weight.grad) if dtype.is_complex else net.weight.grad
        expected = expected.double()
        torch.distributed.all_reduce(expected)
        got = (torch.view_as_real(mean) if dtype.is_complex else mean).double()
        assert (got - expected / 4).abs().max() <= allowed * expected.abs().max() / 4


@pytest.mark.parametrize("layout", [BLOCKS, ONE_AND_THREE])
@kept_ranks(4, group="gloo")
def test_backwards_without_a_parameter_or_without_data(rank, layout):
    place(rank, layout)
    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True, compress_between_hosts="int8")
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 3), left=rank == 3).backward()
        assert_allclose(wrapped.module.left.bias.grad, [0.25, 0.25], rtol=0.02)
        assert wrapped.module.right.bias.grad is None
    net = network()
    wrapped = DistributedDataParallel(net, compress_between_hosts="int8")
    backward(wrapped, 0, rank, 4)
    if rank == 3:
        wrapped(rows(1, 4))
    with pytest.raises(SkippedPassError):
        backward(wrapped, 1, rank, 4)
    for step in range(2, 3 if rank > 1 else 5):  # in the first layout, a whole host runs out of data first
        backward(wrapped, step, rank, 4)
    wrapped.finish()


@kept_ranks(2, group="gloo")
def test_on_one_host_it_does_nothing_and_warns_once(rank):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = network()
        wrapped = DistributedDataParallel(net, compress_between_hosts="int8")
        backward(wrapped, 0, rank, 2)
    texts = [str(each.message) for each in caught if "compress_between_hosts" in str(each.message)]
    assert len(texts) == (rank == 0) and all("does nothing" in text for text in texts)
    assert wrapped.gradient_path == "memory"
    for parameter, expected in zip(net.parameters(), in_one_process(0, 2), strict=True):
        assert_allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6)


@kept_ranks(3, group="gloo")
def test_options_that_exclude_it_are_refused(rank):
    for options in ({"reduce_through": "group"}, {"skip_all_reduce_unused_params": True}):
        with pytest.raises(ConfigError, match="compress_between_hosts") as caught:
            DistributedDataParallel(network(), compress_between_hosts="int8", **options)
        assert next(iter(options)) in caught.value.expected
    place(rank, TWO_AND_ONE)
    wrapped = DistributedDataParallel(network(), compress_between_hosts="int8")
    with pytest.raises(ConfigError, match="a communication hook"):
        wrapped.register_comm_hook(EightBitCompression(), eight_bit_hook)
