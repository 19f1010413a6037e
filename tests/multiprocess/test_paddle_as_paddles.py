"""Programs of Paddle's own DataParallel tests: Paceline's class beside Paddle's, and beside one process.

paddles_tests.md names the test here for each of Paddle's tests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.paddle import DataParallel
from tests.harness.warm import warm_python
from tests.multiprocess.paddle_models import batch, join_paddle, joined_ranks, ranks, two_layers
from tests.multiprocess.paddle_programs import PROGRAMS, Program, run

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240


def assert_same(found: Any, expected: Any, what: str) -> None:
    (losses, parameters), (others, theirs) = found, expected
    assert_allclose(losses, others, rtol=1e-5, atol=1e-6, err_msg=what)
    for ours, right in zip(parameters, theirs, strict=True):
        assert_allclose(ours.numpy(), right.numpy(), rtol=1e-5, atol=1e-6, err_msg=what)


def trains_as_paddles(program: Program, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about parameters that no rank uses
        theirs = run(program, paddle.DataParallel, rank)
        for path in ("memory", "group"):
            ours = run(program, functools.partial(DataParallel, reduce_through=path), rank)
            assert_same(ours, theirs, path)
    if program.is_even:
        _, parameters = run(program, None, None)
        assert_same(([], ours[1]), ([], parameters), "one process")


@pytest.mark.parametrize("name", PROGRAMS)
@joined_ranks(2)
def test_it_trains_like_paddles_class(rank: int, name: str) -> None:
    join_paddle(rank)
    trains_as_paddles(PROGRAMS[name], rank)


def train_spawned() -> None:
    """One rank of `test_the_same_under_paddles_spawn`."""
    dist.init_parallel_env()
    trains_as_paddles(PROGRAMS["shared and unused"], dist.get_rank())
    dist.barrier()
    os._exit(0)  # at a normal exit, a libuv assertion in Paddle's store sometimes aborted rank 0


def spawn_programs() -> None:
    dist.spawn(train_spawned, nprocs=2, backend="gloo")


def test_the_same_under_paddles_spawn() -> None:
    call = "from tests.multiprocess.test_paddle_as_paddles import spawn_programs; spawn_programs()"
    ended = subprocess.run(
        [warm_python("paddle"), "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr


class TwoWays(nn.Layer):
    """Two weights, of which each forward uses one, an unused one, and buffers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.create_parameter([10, 20]), self.create_parameter([10, 20])
        self.head, self.unused = nn.Linear(20, 1), self.create_parameter([20, 10])
        self.register_buffer("queue", paddle.ones([10, 5]))
        self.register_buffer("place", paddle.zeros([1], "int64"))

    def forward(self, x: paddle.Tensor, is_first: bool) -> paddle.Tensor:
        return self.head(paddle.matmul(x, self.first if is_first else self.second))


@pytest.mark.parametrize("path", ["memory", "group"])
@joined_ranks(2)
def test_local_and_averaged_backwards_add_up_to_the_same(rank: int, path: str) -> None:
    """Backwards that are averaged one by one sum up to what is accumulated and averaged once."""
    join_paddle(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about `unused`
        late, each = (
            DataParallel(TwoWays(), find_unused_parameters=True, reduce_through=path) for _ in range(2)
        )
        each.set_state_dict(late.state_dict())
        rng = np.random.default_rng(rank)
        for step in range(1, 16):
            is_last = step % 5 == 0
            x = paddle.to_tensor(rng.random((1, 10)).astype(np.float32))
            for model in (late, each):
                with late.no_sync() if model is late and not is_last else contextlib.nullcontext():
                    model(x, rank == 1 and step % 2 == 1).sum().backward()
            if is_last:
                for ours, theirs in zip(late.parameters(), each.parameters(), strict=True):
                    assert (ours.grad is None) == (theirs.grad is None)
                    if ours.grad is not None:
                        assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-5, atol=1e-6)
                        other = ours.grad.clone()
                        dist.broadcast(other, src=1)
                        assert_array_equal(other.numpy(), ours.grad.numpy())
                assert late.module.unused.grad is None
                late.clear_gradients()
                each.clear_gradients()


class Squares(nn.Layer):
    def forward(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        return [nn.functional.relu(x).square().sum()]


@pytest.mark.parametrize("kind", [paddle.DataParallel, DataParallel])
@ranks(1, group=None)
def test_a_layer_without_parameters_in_one_process(rank: int, kind: type[nn.Layer]) -> None:
    """Paddle's functions that coalesce and split tensors are Paddle's in either class."""
    from paddle.distributed.parallel import _coalesce_tensors, _reshape_inplace, _split_tensors

    with pytest.warns(UserWarning, match=r"single-card|strategy\.nranks is 1"):
        wrapped = kind(Squares(), dist.parallel.ParallelStrategy())
    assert float(wrapped(paddle.full([2, 3], 2.0))[0]) == 24
    tensors = [paddle.rand(shape) for shape in ([2, 3], [4, 9], [10, 1])]
    _split_tensors(_coalesce_tensors({0: tensors}))
    assert [tensor.shape for tensor in tensors] == [[2, 3], [4, 9], [10, 1]]
    _reshape_inplace(tensors[0], [3, 2])
    assert tensors[0].shape == [3, 2]


@ranks(2, group=None)
def test_two_hapi_models_of_one_network(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """hapi wraps the network itself, again for each stage of training; no data is dropped."""
    join_paddle(rank)
    monkeypatch.setattr(paddle, "DataParallel", DataParallel)
    network, alone = two_layers(), two_layers()
    reference = paddle.optimizer.SGD(0.1, parameters=alone.parameters())
    stages = []
    for _ in range(2):
        stages.append(paddle.Model(network))
        optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
        stages[-1].prepare(optimizer, nn.MSELoss())
    for step in range(4):
        x, y = batch(seed=step), batch(columns=2, seed=9 + step)
        half = slice(4 * rank, 4 * rank + 4)
        stages[step // 2].train_batch([x[half]], [y[half]])
        nn.functional.mse_loss(alone(paddle.to_tensor(x)), paddle.to_tensor(y)).backward()
        reference.step()
        reference.clear_grad()
    for ours, expected in zip(network.parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
