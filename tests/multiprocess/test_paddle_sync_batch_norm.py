"""SyncBatchNorm for Paddle has the statistics of the whole batch."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
from numpy.testing import assert_allclose
from paddle import nn

from paceline.paddle import DataParallel, SyncBatchNorm
from tests.multiprocess.paddle_models import (
    batch,
    ranks,
    share,
    train,
)


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


@ranks(2)
def test_sync_batch_norm_is_that_of_the_whole_batch(group: object) -> None:
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
        warnings.simplefilter("ignore")  # Paddle's own, of running statistics
        train(alone, paddle.to_tensor(x))
    close(model, alone)
    model.eval()
    alone.eval()
    assert_allclose(model(own).numpy(), alone(own).numpy(), rtol=1e-4, atol=1e-5)


@ranks(2)
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
