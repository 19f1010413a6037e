"""paceline.paddle.DataParallel on GPUs over NCCL, which needs one for each rank; skipped with fewer than two.

`make test-device` runs it on a device that needs no GPU, with more such tests (`tests/device`).
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose

from paceline.errors import NonFiniteGradientError, UnusedParameterError
from paceline.paddle import DataParallel
from tests import paddle_accelerator
from tests.multiprocess.paddle_models import Branches, batch, ranks, share, train, two_layers

pytestmark = paddle_accelerator.needs_two


@ranks(2, group=None, deadline_s=240)
def test_two_gpus_over_nccl(rank: int) -> None:
    paddle_accelerator.join(rank)
    alone = two_layers().to(dtype="float64")
    train(alone, paddle.to_tensor(batch().astype(np.float64)))
    for view in (False, True):
        model = two_layers()
        wrapped = DataParallel(
            model, device_ids=[rank], gradient_as_bucket_view=view, comm_buffer_size=0.0001, nonfinite="raise"
        )
        assert wrapped.gradient_path == "group"
        train(wrapped, share(batch(), rank))
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            place = f"Place({paddle_accelerator.KIND}:{rank})"
            assert str(ours.place) == place and str(ours.grad.place) == place
            assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-6)
            paddle_accelerator.assert_same_on_both(ours)
        norm = np.sqrt(sum((p.grad.numpy().astype(np.float64) ** 2).sum() for p in model.parameters()))
        assert wrapped.grad_norm() == pytest.approx(norm, rel=1e-5)
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2"):
        wrapped(paddle.full([1, 4], float("nan") if rank else 1.0)).sum().backward()
    strict = DataParallel(Branches())
    with pytest.raises(UnusedParameterError, match="got no gradient"):
        strict(paddle.ones([1, 3]), ("left", "right")[rank]).sum().backward()
