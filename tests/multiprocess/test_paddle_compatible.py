"""paceline.paddle.DataParallel with code that knows Paddle's class: Paddle itself, and trainers."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn
from paddle.distributed import fleet

from paceline.errors import ConfigError, ModelMismatchError
from paceline.paddle import DataParallel, DistributedDataParallel
from tests.multiprocess.paddle_models import (
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

# Paddle's bucket plan, which only Paddle's reducer reads.
NOT_KEPT = {"group_indices"}


@joined_ranks(2)
def test_it_is_a_subclass_of_paddles_class(rank: int) -> None:
    join_paddle(rank)
    model = two_layers()
    wrapped, theirs = DataParallel(model), paddle.DataParallel(two_layers())
    for kind in (DataParallel, DistributedDataParallel):
        assert issubclass(kind, paddle.DataParallel)
    assert isinstance(wrapped, paddle.DataParallel) and wrapped._layers is model
    for name in set(vars(theirs)) - set(vars(nn.Layer())) - NOT_KEPT:
        assert hasattr(wrapped, name), name
    for name in ("comm_buffer_size", "last_comm_buffer_size", "find_unused_parameters", "grad_need_sync"):
        assert getattr(wrapped, name) == getattr(theirs, name), name
    assert wrapped.group is theirs.group is wrapped.process_group and wrapped.group.ranks == [0, 1]
    assert (wrapped._strategy.nranks, wrapped._strategy.local_rank) == (2, rank)
    assert wrapped.require_backward_grad_sync and not wrapped.static_graph
    wrapped.require_backward_grad_sync = False  # code ported from torch may set it
    assert not wrapped.grad_need_sync


@joined_ranks(2)
def test_a_wrapper_cannot_be_copied_and_its_model_can(rank: int) -> None:
    join_paddle(rank)
    with pytest.raises(TypeError):
        copy.deepcopy(paddle.DataParallel(two_layers()))
    wrapped = DataParallel(two_layers())
    train(wrapped, share(batch(), rank))
    for make in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"(?s)cannot be copied.*copy.deepcopy\(model.module\)"):
            make(wrapped)
    twin = copy.deepcopy(wrapped.module)
    for one, other in zip(twin.parameters(), wrapped.parameters(), strict=True):
        assert_array_equal(one.numpy(), other.numpy())
    train(wrapped, share(batch(), rank))


@kept_ranks(2)
def test_methods_of_paddles_class_that_need_its_state_are_not_inherited(group: Any) -> None:
    strategy = dist.parallel.ParallelStrategy()
    strategy.nranks = 2
    wrapped = DataParallel(two_layers(), strategy, group=group, device_ids=["cpu"])
    assert wrapped.group is group and wrapped._strategy is strategy
    assert wrapped.device_ids == ["cpu"] and wrapped.output_device == "cpu"
    for name, value in vars(paddle.DataParallel).items():
        if callable(value) and not name.startswith("__"):
            assert getattr(DataParallel, name, None) is not value, name
    with pytest.raises(AttributeError, match="_find_tensor"):
        _ = wrapped._find_tensor
    model = two_layers()
    model._find_tensor = "the model's"
    assert DataParallel(model, group=group)._find_tensor == "the model's"


@pytest.mark.parametrize("is_static", [False, True])
@kept_ranks(2)
def test_a_wrapped_model_is_saved_for_inference(group: Any, is_static: bool, tmp_path: Path) -> None:
    """With an input_spec or, if the model is compiled, with the inputs of its calls."""
    model, x = two_layers(), paddle.to_tensor(batch())
    path = str(tmp_path / f"{group.rank}" / "net")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle's compiler
        wrapped = DataParallel(paddle.jit.to_static(model) if is_static else model, group=group)
        train(wrapped, share(batch(), group.rank))
        wrapped.eval()
        inputs = {} if is_static else {"input_spec": [paddle.static.InputSpec([None, 4], "float32")]}
        if is_static:
            wrapped(x)
        paddle.jit.save(wrapped, path, **inputs)
        loaded = paddle.jit.load(path)
        assert_allclose(loaded(x).numpy(), model(x).numpy(), rtol=1e-6)
        wrapped.train()
        train(wrapped, share(batch(), group.rank))  # saving does not change what backward averages


@kept_ranks(2)
def test_a_model_must_be_decorated_before_it_is_wrapped(group: Any) -> None:
    """amp.decorate() checks this for a model on a GPU, and checks nothing on the CPU."""
    from paddle.amp.auto_cast import check_models

    with pytest.raises(RuntimeError, match=r"first use paddle\.amp\.decorate"):
        check_models([DataParallel(two_layers(), group=group)])


@ranks(2, group=None)
def test_hapi_trains_evaluates_and_saves(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    join_paddle(rank)
    monkeypatch.setattr(paddle, "DataParallel", DataParallel)
    network, alone = two_layers(), two_layers()
    model = paddle.Model(network, inputs=[paddle.static.InputSpec([None, 4], "float32", "x")])
    model.prepare(paddle.optimizer.SGD(0.1, parameters=network.parameters()), nn.MSELoss())
    assert isinstance(model._adapter.ddp_model, DataParallel)
    x, y = batch(), batch(columns=2, seed=9)
    half = slice(4 * rank, 4 * rank + 4)
    data = paddle.io.TensorDataset([paddle.to_tensor(x[half]), paddle.to_tensor(y[half])])
    loader = paddle.io.DataLoader(data, batch_size=2, return_list=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hapi copies tensors in a way that Paddle advises against
        model.fit(loader, epochs=2, verbose=0)
    optimizer = paddle.optimizer.SGD(0.1, parameters=alone.parameters())
    for _ in range(2):
        for first in (0, 2):
            rows = [first, first + 1, first + 4, first + 5]  # from both ranks
            nn.functional.mse_loss(alone(paddle.to_tensor(x[rows])), paddle.to_tensor(y[rows])).backward()
            optimizer.step()
            optimizer.clear_grad()
    for ours, expected in zip(network.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    path = str(tmp_path / f"{rank}" / "net")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above, and from Paddle's compiler
        assert model.evaluate(loader, verbose=0)["loss"]
        model.save(path, training=False)  # hapi does it on rank 0 only
        loaded = None if rank else paddle.jit.load(path)
    inputs = paddle.to_tensor(x)
    if loaded is not None:
        assert_allclose(loaded(inputs).numpy(), network(inputs).numpy(), rtol=1e-6)


@ranks(2, group=None)
def test_fleet_wraps_with_it(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    join_paddle(rank)
    monkeypatch.setattr(paddle, "DataParallel", DataParallel)
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = True
    strategy.fuse_grad_size_in_MB = 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from fleet
        fleet.init(is_collective=True, strategy=strategy)
    model, alone = two_layers(), two_layers()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, parameters=model.parameters()))
    reference = paddle.optimizer.Adam(0.01, parameters=alone.parameters())
    wrapped = fleet.distributed_model(model)
    assert type(wrapped) is DataParallel and wrapped.find_unused_parameters
    assert wrapped.comm_buffer_size == 7 << 20 and wrapped.group.nranks == 2
    for seed in range(3):
        x = batch(seed=seed)
        squares(wrapped(share(x, rank))).backward()
        squares(alone(paddle.to_tensor(x))).backward()
        for each in (optimizer, reference):
            each.step()
            each.clear_grad()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2)
def test_init_reducer_accepts_changed_parameters(group: Any, view: bool) -> None:
    model = two_layers()
    model[0].weight.stop_gradient = model[0].bias.stop_gradient = True
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view)
    x = paddle.full([1, 4], 1.0 + group.rank)
    wrapped(x).sum().backward()
    first = model[2].weight.grad.numpy()
    model[0].weight.stop_gradient = model[0].bias.stop_gradient = False
    with pytest.raises(ConfigError, match=r"unfrozen: 0\.weight, 0\.bias"):
        wrapped(x)
    wrapped.init_reducer()
    assert_array_equal(model[2].weight.grad.numpy(), first)  # gradients are kept
    wrapped.clear_gradients()
    squares(wrapped(share(batch(), group.rank))).backward()
    alone = two_layers()
    squares(alone(paddle.to_tensor(batch()))).backward()
    for ours, expected in zip(gradients(model), gradients(alone), strict=True):
        assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    older = wrapped(x).sum()
    wrapped.init_reducer()
    with pytest.raises(ConfigError, match=r"older than the last init_reducer\(\)"):
        older.backward()
    if group.rank:
        model[0].bias.stop_gradient = True
    with pytest.raises(ModelMismatchError, match=r"'0\.bias': trainable differs"):
        wrapped.init_reducer()
    with pytest.raises(ConfigError, match=r"does not have any parameters to train"):
        for parameter in model.parameters():
            parameter.stop_gradient = True
        wrapped.init_reducer()


@kept_ranks(2)
def test_prepare_for_backward_synchronises_after_no_sync(group: Any) -> None:
    """Trainers that accumulate call it on Paddle's reducer."""
    model = nn.Linear(4, 1)
    wrapped = DataParallel(model, group=group)
    with wrapped.no_sync():
        output = wrapped(paddle.full([1, 4], 1.0 + group.rank))
    wrapped._reducer.prepare_for_backward([output])
    output.sum().backward()
    assert_array_equal(model.weight.grad.numpy(), np.full((4, 1), 1.5))
