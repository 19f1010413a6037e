"""SyncBatchNorm for Paddle computes the statistics of the whole batch."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.errors import ConfigError
from paceline.paddle import DataParallel, SyncBatchNorm
from tests.multiprocess.paddle_models import batch, kept_ranks, ranks, share, squares, train


def close(model: nn.Layer, alone: nn.Layer) -> None:
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
        if not expected.stop_gradient:
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-4, atol=1e-6)


def normalised() -> nn.Sequential:
    paddle.seed(1)
    return nn.Sequential(
        nn.Conv2D(1, 3, 2), nn.BatchNorm2D(3), nn.Flatten(), nn.Linear(12, 2), nn.BatchNorm1D(2)
    )


@kept_ranks(2)
def test_sync_batch_norm_equals_one_over_the_whole_batch(group: object) -> None:
    """With 5 samples on rank 0 and 3 on rank 1: the mean is over samples, not over ranks."""
    x = np.random.default_rng(7).standard_normal((8, 1, 3, 3)).astype(np.float32)
    own = paddle.to_tensor(x[:5] if group.rank == 0 else x[5:])
    model, alone = normalised(), normalised()
    converted = SyncBatchNorm.convert_sync_batchnorm(model, group)
    assert converted is model and list(model.state_dict()) == list(alone.state_dict())
    assert isinstance(model[1], SyncBatchNorm) and isinstance(model[1], nn.SyncBatchNorm)
    # The mean over ranks of these losses is the loss of the whole batch.
    share_of_loss = (own.shape[0] / 4) ** 0.5
    train(DataParallel(model, group=group), own, call=lambda wrapped, part: wrapped(part) * share_of_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle, about running statistics
        train(alone, paddle.to_tensor(x))
    close(model, alone)
    model.eval()
    alone.eval()
    assert_allclose(model(own).numpy(), alone(own).numpy(), rtol=1e-4, atol=1e-5)


@kept_ranks(2)
def test_sync_batch_norm_over_other_layouts(group: object) -> None:
    x = batch(8, 6).reshape(8, 3, 2)
    for layout, kind in (("NCL", nn.BatchNorm1D), ("NLC", nn.BatchNorm1D)):
        plain = kind(2 if layout == "NLC" else 3, data_format=layout)
        plain.eval()
        synced = SyncBatchNorm.convert_sync_batchnorm(
            kind(2 if layout == "NLC" else 3, data_format=layout), group
        )
        out = synced(share(x, group.rank))
        everything = np.concatenate(group.all_gather(out.numpy()))
        axes = (0, 1) if layout == "NLC" else (0, 2)
        assert_allclose(everything.mean(axes), 0, atol=1e-6)
        assert_allclose(everything.std(axes), 1, atol=1e-4)
        synced.eval()
        plain._mean, plain._variance = synced._mean, synced._variance
        assert_allclose(synced(share(x, 0)).numpy(), plain(share(x, 0)).numpy(), rtol=1e-5, atol=1e-6)


@kept_ranks("world_size")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_of_a_gradient_goes_through_all_ranks(group: object, world_size: int) -> None:
    """A penalty on the inputs' gradients, which depend on all ranks' samples."""
    paddle.set_default_dtype("float64")
    paddle.seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Tanh(), nn.Linear(4, 2))
    paddle.seed(1)
    alone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Tanh(), nn.Linear(4, 2))
    wrapped = DataParallel(SyncBatchNorm.convert_sync_batchnorm(model, group), group=group)
    x = np.random.default_rng(7).standard_normal((3 * world_size, 3))

    def loss(network: nn.Layer, part: np.ndarray, ranks: int) -> paddle.Tensor:
        inputs = paddle.to_tensor(part, stop_gradient=False)
        output = network(inputs)
        (slope,) = paddle.grad((output**2).sum(), [inputs], create_graph=True)
        return (output**2).mean() + ranks * (slope**2).sum()

    loss(wrapped, np.split(x, world_size)[group.rank], world_size).backward()
    loss(alone, x, 1).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        if not expected.stop_gradient:
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-7, atol=1e-9)


@ranks(2, group=None)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_under_to_static(rank: int, is_wrapped: bool) -> None:
    """The group is found within the static function too, where SOT would translate the search for it."""
    x = np.random.default_rng(7).standard_normal((8, 1, 3, 3)).astype(np.float32)
    model, alone = SyncBatchNorm.convert_sync_batchnorm(normalised()), normalised()
    static = paddle.jit.to_static(model, full_graph=False)
    trained = DataParallel(static) if is_wrapped else static
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle's compiler, and about running statistics
        for _ in range(3):
            squares(trained(share(x, rank))).backward()
            squares(alone(paddle.to_tensor(x))).backward()
    assert_allclose(model[1]._mean.numpy(), alone[1]._mean.numpy(), rtol=1e-5, atol=1e-6)
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        if is_wrapped and not expected.stop_gradient:
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-4, atol=1e-5)


@kept_ranks(2, group=None)
def test_a_full_static_graph_is_refused_in_training(rank: int) -> None:
    model = SyncBatchNorm.convert_sync_batchnorm(normalised())
    static = paddle.jit.to_static(model, full_graph=True)
    x = paddle.ones([4, 1, 3, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="SyncBatchNorm: a static graph cannot") as caught:
            static(x)
        assert "full_graph=True" in str(caught.value)
        model.eval()
        if rank == 0:
            static(x)
