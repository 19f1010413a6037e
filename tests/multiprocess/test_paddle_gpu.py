"""paceline.paddle.DataParallel on GPUs, over NCCL, which wants one for each rank; skipped without two."""

from __future__ import annotations

import os

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from paceline.errors import NonFiniteGradientError, UnusedParameterError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import Branches, batch, join_paddle, ranks, share, train, two_layers

HAS_GPUS = paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 1
pytestmark = pytest.mark.skipif(not HAS_GPUS, reason="needs two GPUs")


@ranks(2, group=None, deadline_s=240)
def test_two_gpus_over_nccl(rank: int) -> None:
    os.environ |= {"FLAGS_selected_gpus": str(rank)}
    paddle.set_device(f"gpu:{rank}")
    join_paddle(rank, backend="nccl")
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
            assert ours.place.is_gpu_place() and ours.grad.place.is_gpu_place()
            assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-6)
            parts: list[paddle.Tensor] = []
            dist.all_gather(parts, ours)
            assert_array_equal(parts[0].numpy(), parts[1].numpy())
        norm = np.sqrt(sum((p.grad.numpy().astype(np.float64) ** 2).sum() for p in model.parameters()))
        assert wrapped.grad_norm() == pytest.approx(norm, rel=1e-5)
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2"):
        wrapped(paddle.full([1, 4], float("nan") if rank else 1.0)).sum().backward()
    strict = DataParallel(Branches())
    with pytest.raises(UnusedParameterError, match="got no gradient"):
        strict(paddle.ones([1, 3]), ("left", "right")[rank]).sum().backward()
