"""Parameters that one rank or all ranks do not use in a backward, and bugs that Paddle's users reported."""

from __future__ import annotations

import ctypes
import os
import signal
import warnings

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

import paceline
from paceline.errors import CollectiveError, PeerLostError, UnusedParameterError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    Branches,
    assert_same_on_all_ranks,
    batch,
    gradients,
    join_paddle,
    joined_ranks,
    kept_ranks,
    ranks,
    share,
    squares,
    train,
    two_layers,
)


class Doubled(paddle.autograd.PyLayer):
    """An operator with a user-written gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Tied(nn.Layer):
    """One weight used twice, once transposed, with a PyLayer between."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        self.weight = self.create_parameter([4, 3])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return Doubled.apply(x @ self.weight) @ self.weight.t()


def close(model: nn.Layer, alone: nn.Layer) -> None:
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
        if not expected.stop_gradient:
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2)
def test_a_shared_weight_and_a_pylayer(group: object, view: bool) -> None:
    model, alone, x = Tied(), Tied(), batch()
    train(DataParallel(model, group=group, gradient_as_bucket_view=view), share(x, group.rank))
    train(alone, paddle.to_tensor(x))
    close(model, alone)


# On the CPU, Paddle warns that it has no mixed precision, and computes without.
@pytest.mark.parametrize("level", ["O1", "O2"])
@kept_ranks(2)
def test_amp_and_its_scaler(group: object, level: str) -> None:
    model, alone, x = two_layers(), two_layers(), batch()
    for each, own in ((DataParallel(model, group=group), share(x, group.rank)), (alone, paddle.to_tensor(x))):
        optimizer = paddle.optimizer.SGD(0.1, parameters=each.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if level == "O2":
                _, optimizer = paddle.amp.decorate(
                    models=each, optimizers=optimizer, level="O2", dtype="bfloat16", master_grad=True
                )
            scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0)
            for _ in range(2):
                with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
                    loss = squares(each(own))
                optimizer.clear_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    close(model, alone)
    assert_same_on_all_ranks(model, group)


@kept_ranks(2)
def test_a_model_that_one_rank_does_not_use_stays_equal(group: object) -> None:
    """Two models in one process; rank 1 multiplies the loss of one of them by 0."""
    first, second = two_layers(), two_layers()
    wrapped = [DataParallel(model, group=group, find_unused_parameters=True) for model in (first, second)]
    own = share(batch(), group.rank)
    for _ in range(2):
        one, other = (model(own) for model in wrapped)
        (squares(one) + squares(other) * float(group.rank == 0)).backward()
        for model in (first, second):
            assert_same_on_all_ranks(model, group)
            assert all(g is not None for g in gradients(model))


def branches() -> Branches:
    paddle.seed(1)
    return Branches()


PATHS = pytest.mark.parametrize(
    ("path", "view"), [("memory", False), ("memory", True), ("group", False), ("group", True)]
)


@PATHS
@joined_ranks(2)
def test_parameters_that_no_rank_uses_train_like_with_paddles_class(rank: int, path: str, view: bool) -> None:
    """One warning names them, and they get no gradients."""
    join_paddle(rank)
    ours, theirs, x = branches(), branches(), batch(4, 3)
    wrapped = DataParallel(ours, reduce_through=path, gradient_as_bucket_view=view)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(wrapped, share(x, rank), call=lambda model, x: model(x, "left"))
    about = [str(each.message) for each in caught if "got no gradient" in str(each.message)]
    assert len(about) == 1
    assert about[0].startswith(
        "2 of 4 parameters got no gradient on any of the 2 ranks: right.weight, right.bias."
    )
    train(paddle.DataParallel(theirs), share(x, rank), call=lambda model, x: model(x, "left"))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_allclose(one.numpy(), other.numpy(), rtol=1e-6)
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or np.allclose(one.grad.numpy(), other.grad.numpy(), rtol=1e-5)
    assert ours.right.weight.grad is None


@PATHS
@joined_ranks(2)
def test_gradients_of_globally_unused_parameters_are_kept_and_of_others_raise(
    rank: int, path: str, view: bool
) -> None:
    join_paddle(rank)
    model, own = branches(), share(batch(4, 3), rank)
    wrapped = DataParallel(model, reduce_through=path, gradient_as_bucket_view=view)

    def backward(branch: str) -> None:
        squares(wrapped(own, branch)).backward()

    backward("both")
    with pytest.warns(RuntimeWarning, match="right.weight, right.bias"):
        before = gradients(model)
        backward("left")
    for _ in range(2):
        after = gradients(model)
        assert not np.array_equal(after[0], before[0])
        assert all(np.array_equal(after[i], before[i]) for i in (2, 3))
        with pytest.raises(UnusedParameterError, match=r"rank 1: right.weight, right.bias"):
            backward("left" if rank else "both")
        wrapped.clear_gradients(set_to_zero=False)
        backward("both")
        before = gradients(model)
        backward("left")
        assert wrapped.grad_norm() > 0
    wrapped.clear_gradients()  # zeros remain zeros
    backward("left")
    assert not model.right.weight.grad.numpy().any()
    alone = branches()
    (squares(alone(share(batch(4, 3), 0), "left")) + squares(alone(share(batch(4, 3), 1), "left"))).backward()
    assert_allclose(model.left.weight.grad.numpy(), alone.left.weight.grad.numpy() / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2)
def test_a_rank_without_data_does_not_count_for_globally_unused_parameters(group: object, view: bool) -> None:
    model, x = branches(), paddle.full([1, 3], 2.0)
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view)
    with pytest.warns(RuntimeWarning, match="right.weight, right.bias"):
        for _ in wrapped.iterate([x] * (3 - group.rank)):
            wrapped.clear_gradients(set_to_zero=False)
            wrapped(x, "left").sum().backward()
            assert model.right.weight.grad is None
            assert_allclose(model.left.weight.grad.numpy(), np.full((3, 2), 2.0))


@ranks(2, group=None)
def test_a_model_that_one_rank_skips_is_an_error_on_every_rank(rank: int) -> None:
    """Rank 1 never calls the second model: rank 0 waits for it until the timeout, and raises."""
    with paceline.init(timeout_s=2.0, forming_timeout_s=60.0) as group:
        first, second = (DataParallel(two_layers(), group=group) for _ in range(2))
        own = share(batch(), rank)
        with pytest.raises(CollectiveError, match="rank"):
            for _ in range(3):
                squares(first(own)).backward()
                if rank == 0:
                    squares(second(own)).backward()


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2)
def test_clipping_uses_gradients_that_were_changed_behind_paddles_back(group: object, view: bool) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view)
    wrapped.clip_grad_norm_(1.0)  # watches the gradients from now on
    for parameter in (model[0].weight, model[-1].bias):
        for each in model.parameters():
            each.clear_grad()
        squares(wrapped(share(batch(), group.rank))).backward()
        memory = (ctypes.c_float * int(parameter.size)).from_address(parameter.grad.data_ptr())
        np.frombuffer(memory, np.float32)[...] *= 0.01  # changes them in place
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients(model)))
        assert_allclose(float(wrapped.clip_grad_norm_(1e9)), norm, rtol=1e-5)


@ranks(3, dies={2: signal.SIGKILL})
def test_survivors_continue_over_a_new_group(group):
    """The recipe of docs/coming-from-paddle.md."""
    pair = group.subgroup([0, 1])
    net = nn.Linear(4, 2, bias_attr=False)
    model = DataParallel(net, group=group)
    model(paddle.ones([1, 4]) * group.rank).sum().backward()
    assert_allclose(net.weight.grad.numpy(), 1.0)
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    model.clear_gradients()
    with pytest.raises(PeerLostError):
        model(paddle.ones([1, 4]) * group.rank).sum().backward()
    model = DataParallel(model.module, group=pair)
    for _ in range(2):
        model.clear_gradients()
        model(paddle.ones([1, 4]) * group.rank).sum().backward()
        assert_allclose(net.weight.grad.numpy(), 0.5)
