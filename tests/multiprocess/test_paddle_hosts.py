"""paceline.paddle's gradients over several hosts: sums in each host's memory, then between hosts over Gloo.

test_hosts tests what both frameworks share; here is what Paddle's front end and connections add. Each rank
sets which host it is on: `_host_hint` decides which ranks can share memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.errors import NonFiniteGradientError, UnusedParameterError
from paceline.paddle import DataParallel
from tests.harness import run_ranks
from tests.multiprocess.paddle_models import Branches, join_paddle, ranks, squares
from tests.several_hosts import be_on_host

PATIENT_S = 90.0  # no rank waits for it if the error is reported at once
BLOCKS = (0, 0, 1, 1)
ONE_AND_THREE = (0, 1, 1, 1)
"""The host of each rank."""
Layout = tuple[int, ...]


def place(rank: int, layout: Layout) -> None:
    """Place this rank on one of several hosts, and join paddle.distributed."""
    be_on_host(layout[rank])
    if not dist.is_initialized():
        join_paddle(rank)


def network(width: int = 40, depth: int = 3) -> nn.Sequential:
    paddle.seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def rows(step: int, world_size: int, width: int = 40) -> np.ndarray:
    generator = np.random.default_rng(100 + step)
    return generator.standard_normal((4 * world_size, width)).astype(np.float32)


def backward(model: nn.Layer, step: int, rank: int, world_size: int, scale: float = 1.0) -> None:
    model.clear_gradients()
    x = paddle.to_tensor(rows(step, world_size)[rank::world_size])
    (squares(model(x)) * scale).backward()


def in_one_process(step: int, world_size: int, weights: list[float] | None = None) -> list[np.ndarray]:
    """Return the float64 gradients, in numpy, of the whole batch or of its weighted mean over the ranks."""
    values = [parameter.numpy().astype(np.float64) for parameter in network().parameters()]
    x, count = rows(step, world_size).astype(np.float64), 4 * world_size
    weights = weights or [1.0] * world_size
    layers = [*zip(values[::2], values[1::2], strict=True)]
    inputs = [x]
    for weight, bias in layers[:-1]:
        inputs.append(np.tanh(inputs[-1] @ weight + bias))
    scale = np.array([weights[row % world_size] for row in range(count)])[:, None] / sum(weights) / 4
    upstream = 2 * (inputs[-1] @ layers[-1][0] + layers[-1][1]) * scale
    gradients = []
    for (weight, _), entry in zip(reversed(layers), reversed(inputs)):
        gradients += [upstream.sum(0), entry.T @ upstream]
        upstream = (upstream @ weight.T) * (1 - entry**2)
    return gradients[::-1]


def assert_means(net: nn.Layer, step: int, world_size: int, weights: list[float] | None = None) -> None:
    for parameter, expected in zip(net.parameters(), in_one_process(step, world_size, weights), strict=True):
        assert_allclose(parameter.grad.numpy(), expected, rtol=1e-4, atol=1e-6)


def digest(net: nn.Layer) -> str:
    parts = [paddle.view(parameter.grad, "uint8").numpy().tobytes() for parameter in net.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize(("layout", "view"), [(BLOCKS, False), ((0, 1, 2), True), (ONE_AND_THREE, True)])
def test_means_are_those_of_the_whole_batch(layout: Layout, view: bool) -> None:
    run_ranks(average, len(layout), {"layout": layout, "view": view}, group=None, framework="paddle")


def average(rank: int, layout: Layout, view: bool) -> None:
    place(rank, layout)
    net, world_size = network(), len(layout)
    wrapped = DataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=view)
    assert wrapped.gradient_path == "hosts"
    for step in range(4):
        backward(wrapped, step, rank, world_size)
        assert_means(net, step, world_size)
    weights = [1.0, 2.5, 0.0, 7.0][:world_size]
    with wrapped.weight(weights[rank]):
        backward(wrapped, 4, rank, world_size)
    assert_means(net, 4, world_size, weights)


@ranks(4, group=None)
def test_bits(rank: int) -> None:
    join_paddle(rank)

    seen: dict[str, list[bytes]] = {}

    def digests(path: str, bits: str, **options: Any) -> list[str]:
        net, found = network(), []
        net.register_buffer("seen", paddle.zeros([1000]))
        net.register_buffer("one", paddle.zeros([]))
        wrapped = DataParallel(net, bucket_cap_mb=0.02, buffers={"*": "average"}, **options)
        assert wrapped.gradient_path == path and wrapped.bits == bits
        averaged = seen.setdefault(f"{path} {options.get('deterministic')}", [])
        for step in range(3):
            values = np.random.default_rng(10 * step + rank).standard_normal(1001).astype(np.float32)
            net.seen.set_value(values[1:])
            net.one.set_value(values[:1].reshape([]))
            backward(wrapped, step, rank, 4, scale=rank + 0.3)
            found.append(digest(net))
            averaged += [net.seen.numpy().tobytes(), net.one.numpy().tobytes()]
        by_rank: list[list[str]] = []
        dist.all_gather_object(by_rank, found)
        assert all(row == found for row in by_rank)
        return found

    one = digests("memory", "world")
    place(rank, BLOCKS)
    assert digests("hosts", "world") == one
    assert digests("hosts", "buckets", compress_between_hosts="int8") != one
    assert digests("group", "engine", skip_all_reduce_unused_params=True, find_unused_parameters=True) != one
    place(rank, ONE_AND_THREE)
    assert digests("hosts", "layout") != one
    assert digests("hosts", "world", deterministic="world") == one
    assert seen["memory None"] == seen["hosts world"]


@ranks(3, group=None)
def test_large_shards_and_several_models(rank: int) -> None:
    """Three hosts, two rounds of several messages, and connections that two models share."""
    place(rank, (0, 1, 2))
    sizes = (1200, 900), (1200, 90)  # 4.3 MB, which are two buckets, and 0.4 MB
    nets = [nn.Linear(*size, bias_attr=False) for size in sizes]
    pair = [DataParallel(net) for net in nets]
    x = paddle.ones([1, 1200])
    for step in range(2):
        losses = [(model(x).sum() * (rank + 1) * (step + 1 + 10 * n)) for n, model in enumerate(pair)]
        for model, loss in zip(pair, losses, strict=True):
            model.clear_gradients()
            loss.backward()
        for n, net in enumerate(nets):
            expected = np.full(sizes[n], 2.0 * (step + 1 + 10 * n))
            assert_allclose(net.weight.grad.numpy(), expected, rtol=1e-6)


@ranks(4, group=None)
def test_unused_parameters(rank: int) -> None:
    place(rank, ONE_AND_THREE)
    wrapped = DataParallel(Branches())
    with pytest.raises(UnusedParameterError) as caught:
        wrapped(paddle.ones([1, 3]), "left" if rank == 3 else "both").sum().backward()
    assert caught.value.unused == {"right.weight": (3,), "right.bias": (3,)}
    net = Branches()
    wrapped = DataParallel(net, find_unused_parameters=True)
    for _ in range(2):
        wrapped.clear_gradients()
        wrapped(paddle.ones([1, 3], dtype="float32"), "left" if rank == 3 else "right").sum().backward()
        assert_allclose(net.left.bias.grad.numpy(), [0.25, 0.25])
        assert_allclose(net.right.bias.grad.numpy(), [0.75, 0.75])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("policy", ["ignore", "raise"])
@ranks(4, group=None)
def test_a_failed_compressed_backward_leaves_no_residual(rank: int, policy: str) -> None:
    """Bad batches in between do not change the bits of the other batches' gradients."""
    place(rank, BLOCKS)
    found: list[list[np.ndarray]] = []
    for is_disturbed in (False, True):
        model = network()
        wrapped = DataParallel(model, compress_between_hosts="topk", nonfinite=policy, bucket_cap_mb=0.01)
        for step in range(4):
            if is_disturbed and step in (0, 2):
                with contextlib.suppress(NonFiniteGradientError):
                    backward(wrapped, 100 + step, rank, 4, scale=float("inf") if rank == 3 else 1e4)
            backward(wrapped, step, rank, 4)
            found.append([parameter.grad.numpy() for parameter in model.parameters()])
    for plain, spoilt in zip(found[:4], found[4:], strict=True):
        for expected, got in zip(plain, spoilt, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["topk", "int8"])
@ranks(2, group=None)
def test_residuals_of_an_unused_parameter_are_kept(rank: int, kind: str) -> None:
    place(rank, (0, 1))
    fork = Branches()
    wrapped = DataParallel(fork, find_unused_parameters=True, compress_between_hosts=kind)
    x = np.array([[100.0, 1 / 3, 1 / 3]], np.float32)
    arrived, count = np.zeros((3, 2)), 40
    for step in range(2 * count):
        for parameter in fork.parameters():
            parameter.grad = None  # clear_gradients() leaves zeros, which count as a gradient
        if step % 2:  # next to small gradients, a residual would be sent whole
            wrapped(paddle.to_tensor(x / 100), "right").sum().backward()
        else:
            wrapped(paddle.to_tensor(x), "left").sum().backward()
            arrived += fork.left.weight.grad.numpy().astype(np.float64)
    expected = count * np.repeat(x.reshape(3, 1), 2, axis=1).astype(np.float64)
    assert_allclose(arrived, expected, rtol=0, atol=1.0)
