"""Whole training steps under paddle.jit.to_static, and losses of a wrapped model in a static graph."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paceline.errors import ConfigError, UnusedParameterError
from paceline.paddle import DataParallel, LocalSGD, MixedPrecision, ShardedOptimizer
from tests.multiprocess.paddle_models import Branches, batch, kept_ranks, ranks, share, squares, two_layers

Step = Callable[[nn.Layer, paddle.optimizer.Optimizer, paddle.Tensor], object]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle's compiler
        yield


def assert_trains_alike(
    group: object,
    step: Step,
    alone: Step | None = None,
    make: Callable[[], nn.Layer] = two_layers,
    optimizer: Callable[[nn.Layer], object] = lambda m: paddle.optimizer.Adam(
        0.01, parameters=m.parameters()
    ),
    **options: object,
) -> None:
    """Compare three steps under to_static with untranslated ones of one process with the whole batch."""
    model, reference, x = make(), make(), batch()
    wrapped = DataParallel(model, group=group, **options)
    own = optimizer(model)
    whole = paddle.optimizer.Adam(0.01, parameters=reference.parameters())
    static = paddle.jit.to_static(step, full_graph=False)
    for number in range(3):
        with compiling():
            static(wrapped, own, share(x, group.rank) + 0.1 * number)
        (alone or step)(reference, whole, paddle.to_tensor(x) + 0.1 * number)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


# Paddle caches a translation for all functions with the same code, so each test runs in new processes.
def plain_step(model: nn.Layer, optimizer: paddle.optimizer.Optimizer, x: paddle.Tensor) -> paddle.Tensor:
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return loss


@ranks(2)
@pytest.mark.parametrize("view", [False, True])
def test_a_step(group: object, view: bool) -> None:
    assert_trains_alike(group, plain_step, gradient_as_bucket_view=view)


@ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"share_parameters": True}, {"reduce": "scatter"}], ids=["plain", "shared", "scatter"]
)
def test_a_sharded_step(group: object, options: dict[str, object]) -> None:
    def sharded(model: nn.Layer) -> ShardedOptimizer:
        return ShardedOptimizer(model.parameters(), paddle.optimizer.Adam, group, learning_rate=0.01)

    assert_trains_alike(group, plain_step, optimizer=sharded, **options)


@ranks(2)
def test_accumulation_in_no_sync(group: object) -> None:
    def accumulating(model: DataParallel, optimizer: paddle.optimizer.Optimizer, x: paddle.Tensor) -> None:
        with model.no_sync():
            (model(x[:2]) ** 2).mean().backward()
        (model(x[2:]) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    def alone(model: nn.Layer, optimizer: paddle.optimizer.Optimizer, x: paddle.Tensor) -> None:
        (2 * (model(x) ** 2).mean()).backward()
        optimizer.step()
        optimizer.clear_grad()

    assert_trains_alike(group, accumulating, alone)


@ranks(2)
def test_weights_and_unused_parameters(group: object) -> None:
    """One step of two models: one uses other parameters on each rank, the other has weights."""
    branches, reference = Branches(), Branches()
    reference.set_state_dict({name: value.clone() for name, value in branches.state_dict().items()})
    weighted, weighted_alone, x = two_layers(), two_layers(), batch(8)
    own = x[:3] if group.rank == 0 else x[3:]
    with_branches = DataParallel(branches, group=group, find_unused_parameters=True)
    reference.set_state_dict(branches.state_dict())
    with_weights = DataParallel(weighted, group=group, weight=lambda x: x.shape[0])
    optimizer = paddle.optimizer.SGD(0.1, parameters=branches.parameters() + weighted.parameters())

    def step(branch: str, x: paddle.Tensor) -> None:
        ((with_branches(x[:, :3], branch) ** 2).mean()).backward()
        (with_weights(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    static = paddle.jit.to_static(step, full_graph=False)
    whole = paddle.optimizer.SGD(0.1, parameters=reference.parameters() + weighted_alone.parameters())
    for _ in range(3):
        with compiling():
            static(("left", "right")[group.rank], paddle.to_tensor(own))
        for part, branch in ((x[:3], "left"), (x[3:], "right")):
            (squares(reference(paddle.to_tensor(part[:, :3]), branch)) / 2).backward()
        squares(weighted_alone(paddle.to_tensor(x))).backward()
        whole.step()
        whole.clear_grad()
    for model, alone in ((branches, reference), (weighted, weighted_alone)):
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


@ranks(2)
def test_a_penalty_of_gradients_and_recompute(group: object) -> None:
    class Recomputed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = two_layers()

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return recompute(self.inner, x, use_reentrant=False)

    def penalised(model: nn.Layer, optimizer: paddle.optimizer.Optimizer, x: paddle.Tensor) -> None:
        x.stop_gradient = False
        output = model(x)
        (slope,) = paddle.grad(output.sum(), [x], create_graph=True)
        ((output**2).mean() + (slope**2).mean()).backward()
        optimizer.step()
        optimizer.clear_grad()

    assert_trains_alike(group, penalised)
    assert_trains_alike(group, plain_step, make=Recomputed)


@ranks(2)
def test_a_backward_raises_pacelines_errors(group: object) -> None:
    wrapped = DataParallel(Branches(), group=group)
    optimizer = paddle.optimizer.SGD(0.1, parameters=wrapped.parameters())

    def step(branch: str, x: paddle.Tensor) -> None:
        (wrapped(x, branch) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    static = paddle.jit.to_static(step, full_graph=False)
    with compiling():
        with pytest.raises(UnusedParameterError):
            static(("left", "right")[group.rank], paddle.ones([2, 3]))
        static("both", paddle.ones([2, 3]))


# --- a wrapped model in a static graph, whose runs do not call the wrapper ---


def loss_of(model: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    return (model(x) ** 2).mean()


@kept_ranks(2)
def test_a_static_loss_and_no_sync(group: object) -> None:
    """The graph is traced within no_sync(), but a backward outside of no_sync() is still averaged."""
    model, reference, x = two_layers(), two_layers(), batch()
    wrapped = DataParallel(model, group=group)
    static = paddle.jit.to_static(loss_of, full_graph=True)
    own = share(x, group.rank)
    for _ in range(2):
        with compiling():
            with wrapped.no_sync():
                static(wrapped, own).backward()
            static(wrapped, own).backward()
        (2 * loss_of(reference, paddle.to_tensor(x))).backward()
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-4, atol=1e-6)
        wrapped.clear_gradients()
        reference.clear_gradients()


@kept_ranks(2)
def test_traces_on_one_rank_alone(group: object) -> None:
    """A static evaluation and a step that Paddle cannot trace do not count as forwards."""
    model, reference, x = two_layers(), two_layers(), batch()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=True)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    whole = paddle.optimizer.Adam(0.01, parameters=reference.parameters())
    static = paddle.jit.to_static(loss_of, full_graph=True)
    for number in range(2):
        if group.rank == 0:
            with compiling(), paddle.no_grad():
                static(wrapped, paddle.to_tensor(x[: 1 + number]))
            with compiling(), pytest.raises(AttributeError, match="backward"):
                paddle.jit.to_static(plain_step, full_graph=True)(wrapped, optimizer, paddle.to_tensor(x))
        plain_step(wrapped, optimizer, share(x, group.rank))
        plain_step(reference, whole, paddle.to_tensor(x))
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


@kept_ranks(2)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weight": 2.0}, "weight="),
        ({"local_sgd": LocalSGD(every=2)}, "local_sgd"),
        ({"forward_sync_buffers": True}, "forward_sync_buffers"),
        ({"mixed_precision": MixedPrecision(param_dtype="float64")}, "param_dtype"),
    ],
    ids=["weight", "local_sgd", "forward_sync_buffers", "param_dtype"],
)
def test_options_that_need_each_forward_are_refused_in_a_static_graph(
    group: object, options: dict[str, object], named: str
) -> None:
    wrapped = DataParallel(two_layers(), group=group, **options)
    static = paddle.jit.to_static(loss_of, full_graph=True)
    with compiling(), pytest.raises(ConfigError, match=named) as caught:
        static(wrapped, share(batch(), group.rank))
    assert "paddle.jit.to_static(model)" in str(caught.value)
    wrapped(share(batch(), group.rank))  # still works
    if named != "param_dtype":
        wrapped.eval()
        with compiling(), paddle.no_grad():
            found = static(wrapped, share(batch(), group.rank))
        assert_allclose(found.numpy(), loss_of(wrapped, share(batch(), group.rank)).numpy(), rtol=1e-5)
