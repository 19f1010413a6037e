"""paceline.paddle.DataParallel as a layer: its arguments, state, attributes and lifetime."""

from __future__ import annotations

import contextlib
import os
import warnings

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

import paceline.paddle
from paceline.errors import ConfigError
from paceline.paddle import DataParallel, DistributedDataParallel, MixedPrecision
from tests.alive import syncs_alive
from tests.multiprocess.paddle_models import (
    assert_same_on_all_ranks,
    batch,
    gradients,
    join_paddle,
    kept_ranks,
    ranks,
    share,
    squares,
    train,
    two_layers,
)


@ranks(2, group=None)
def test_the_environment_makes_the_group(rank: int) -> None:
    group = paceline.paddle.init_parallel_env()
    assert (group.rank, group.world_size) == (rank, 2) and paceline.paddle.init_parallel_env() is group
    for _ in range(2):
        model = two_layers()
        DataParallel(model)(paddle.full([1, 4], 1.0 + rank)).sum().backward()
        assert_array_equal(model[2].bias.grad.numpy(), np.ones(2))
    assert_same_on_all_ranks(model, group)


def forget_launcher() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


@ranks(1, group=None)
def test_a_single_process_trains_alone(rank: int) -> None:
    forget_launcher()
    with pytest.warns(RuntimeWarning, match="this process trains alone"):
        model = DataParallel(two_layers())
    model(paddle.ones([1, 4])).sum().backward()
    assert model.grad_norm() > 0 and model.waited_s == 0


@ranks(1, group=None)
def test_a_single_process_may_have_nothing_to_train(rank: int) -> None:
    os.environ["WORLD_SIZE"] = "1"
    model = two_layers()
    for parameter in model.parameters():
        parameter.stop_gradient = True
    wrapped = DataParallel(model)
    assert_array_equal(wrapped(paddle.ones([1, 4])).numpy(), model(paddle.ones([1, 4])).numpy())
    assert wrapped.gradient_path == "nothing"


@ranks(1, group=None)
def test_a_single_process_weights_its_micro_batches(rank: int) -> None:
    forget_launcher()
    for path in ("auto", "group"):  # as on the CPU, and as on a GPU
        model, alone, x = two_layers(), two_layers(), batch()
        with pytest.warns(RuntimeWarning, match="this process trains alone"):
            wrapped = DataParallel(model, reduce_through=path)
        for part in (x[:2], x[2:]):
            with wrapped.no_sync() if len(part) == 2 else contextlib.nullcontext(), wrapped.weight(len(part)):
                squares(wrapped(paddle.to_tensor(part))).backward()
        squares(alone(paddle.to_tensor(x))).backward()
        for ours, expected in zip(gradients(model), gradients(alone), strict=True):
            assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
        assert wrapped.gradient_path == {"auto": "memory"}.get(path, path)
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients(alone)))
        assert_allclose(wrapped.grad_norm(), norm, rtol=1e-5)


@ranks(1, group=None)
def test_a_single_process_needs_views_only_if_it_averages(rank: int) -> None:
    os.environ["WORLD_SIZE"] = "1"
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    wrapped = DataParallel(two_layers())
    wrapped(paddle.ones([1, 4])).sum().backward()
    for needs_them in (lambda: DataParallel(two_layers(), weight=2), lambda: wrapped.weight(2)):
        with pytest.raises(ConfigError, match="FLAGS_use_stride_kernel"):
            needs_them()


@kept_ranks(2)
def test_all_ranks_start_with_rank_0s_values(group: object) -> None:
    def build() -> nn.Layer:
        paddle.seed(group.rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1D(3), nn.Linear(3, 3), nn.Linear(3, 2))
        model[1]._mean.set_value(paddle.full([3], float(group.rank)))
        model[2].weight.stop_gradient = True
        model[3].bias.no_sync = True
        model[3].bias.set_value(paddle.full([2], float(group.rank)))
        return model

    model = build()
    wrapped = DataParallel(model, group=group)
    assert_same_on_all_ranks(nn.Sequential(model[0], model[1], model[2]), group)
    assert_array_equal(model[3].bias.numpy(), [group.rank] * 2)  # no_sync: each rank keeps its own
    squares(wrapped(share(batch(), group.rank))).backward()
    by_rank = group.all_gather(model[3].bias.grad.numpy())
    assert not np.array_equal(by_rank[0], by_rank[1])
    DataParallel(build(), group=group, init_sync=False)


@pytest.mark.parametrize("broadcast", [True, False])
@kept_ranks(2)
def test_running_statistics_are_rank_0s_after_each_backward(group: object, broadcast: bool) -> None:
    class Counting(nn.BatchNorm1D):
        def __init__(self) -> None:
            super().__init__(4)
            self.register_buffer("seen", paddle.zeros([1]))

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            self.seen = self.seen + x.sum()  # replaces the buffer
            return super().forward(x)

    model = nn.Sequential(Counting(), nn.Linear(4, 2))
    wrapped = DataParallel(model, group=group, broadcast_buffers=broadcast)
    for _ in range(2):
        squares(wrapped(share(batch(), group.rank))).backward()
    for values in (model[0]._mean, model[0]._variance, model[0].seen):
        by_rank = group.all_gather(values.numpy())
        assert np.array_equal(by_rank[0], by_rank[1]) == broadcast


@kept_ranks(2)
def test_attributes_of_the_model_are_reached_through_the_wrapper(group: object) -> None:
    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.scale = 3

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.layer(x)

        def describe(self) -> str:
            return f"scale {self.scale}"

    model = Model()
    wrapped = DataParallel(model, group=group)
    assert wrapped.describe() == "scale 3" and wrapped.layer is model.layer
    assert wrapped.module is model and wrapped._layers is model
    with pytest.raises(AttributeError, match="nowhere"):
        _ = wrapped.nowhere
    wrapped.eval()
    assert not model.training
    assert [name for name, _ in wrapped.named_parameters()] == ["_layers.layer.weight", "_layers.layer.bias"]


@kept_ranks(2)
def test_saved_state_has_the_models_own_names(group: object) -> None:
    model = two_layers()
    model.register_buffer("kept", paddle.ones([1]))
    wrapped = DataParallel(model, group=group)
    saved = wrapped.state_dict()
    assert list(saved) == list(model.state_dict()) == ["kept", "0.weight", "0.bias", "2.weight", "2.bias"]
    into: dict[str, object] = {}
    models_own: dict[str, object] = {}  # Paddle 3.0 puts the sublayers' state into another dict
    is_the_same = model.state_dict(models_own) is models_own
    assert (wrapped.state_dict(into) is into) == is_the_same
    assert list(into) == list(models_own)
    assert list(wrapped.state_dict(include_sublayers=False)) == ["kept"]
    assert next(iter(wrapped.state_dict(structured_name_prefix="m."))).startswith("m.")
    values = {name: paddle.full_like(value, 2.0) for name, value in saved.items()}
    for load in (wrapped.set_state_dict, wrapped.set_dict, wrapped.load_dict):
        assert load(values) == ([], [])
        assert load(values | {"other": values["kept"]}) == ([], ["other"])
    assert_array_equal(model[2].bias.numpy(), [2, 2])
    by_parameter = {model[2].bias.name: paddle.full([2], 5.0)}
    with pytest.warns(UserWarning, match="Skip loading"):  # from Paddle
        missing, unexpected = wrapped.set_state_dict(by_parameter, use_structured_name=False)
    assert_array_equal(model[2].bias.numpy(), [5, 5])
    assert len(missing) == 4 and not unexpected
    train(wrapped, paddle.ones([1, 4]), steps=1)


ACCEPTED = [
    {"device_ids": [paddle.CPUPlace()], "output_device": "cpu"},
    {"device_ids": ["cpu"]},
    {"output_device": "cpu"},
    {"device_ids": []},
    {"dim": 0},
    {"broadcast_buffers": False},
    {"init_sync": False},
    {"process_group": None},
    {"bucket_cap_mb": 0.001},
    {"find_unused_parameters": True},
    {"check_reduction": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"forward_sync_buffers": True},
    {"delay_all_reduce_named_params": None, "param_to_hook_all_reduce": None},
    {"device_mesh": None},
    {"skip_all_reduce_unused_params": True},
    {"bucket_cap_mb_list": [0.001, 1]},
    {"batched_grad_copy": True},
]


@kept_ranks(2)
def test_torchs_and_paddles_arguments(group: object) -> None:
    x = paddle.full([1, 4], 1.0 + group.rank)
    for options in [*ACCEPTED, {"process_group": group}]:
        for kind in (DataParallel, DistributedDataParallel):
            model = two_layers()
            wrapped = kind(model, **({"process_group": group} | options))
            wrapped(x).sum().backward()
            assert_array_equal(model[2].bias.grad.numpy(), np.ones(2))
    with pytest.warns(FutureWarning, match="broadcast_buffers is ignored"):  # as in torch
        DataParallel(two_layers(), group=group, broadcast_buffers=False, forward_sync_buffers=True)
    positional = DataParallel(two_layers(), None, 30, 2, True, group)
    assert positional.find_unused_parameters and positional.grad_need_sync
    refused = [
        ({"device_ids": ["gpu:0"]}, "names a device"),
        ({"device_ids": ["cpu", "cpu"]}, "one device"),
        ({"output_device": "gpu:0"}, "names a device"),
        ({"dim": 1}, "dim is not supported"),
        ({"mixed_precision": "bf16"}, r"describes no precision(?s:.*)MixedPrecision"),
        ({"mixed_precision": MixedPrecision("float16")}, r"forward in float16(?s:.*)paddle\.amp"),
        ({"batched_grad_copy": "yes"}, "batched_grad_copy='yes' is not usable"),
        ({"comm_buffer_size": 0}, "comm_buffer_size"),
        ({"last_comm_buffer_size": -1}, "last_comm_buffer_size"),
        ({"nonfinite": "shout"}, "nonfinite"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"process_group": "world"}, "process_group='world' is not usable"),
    ]
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            DataParallel(two_layers(), **options)


@kept_ranks(2)
def test_deprecated_methods_do_nothing(group: object) -> None:
    wrapped = DataParallel(two_layers(), strategy=object(), group=group)
    loss = wrapped(paddle.ones([1, 4])).sum()
    with pytest.warns(DeprecationWarning, match="scale_loss"):
        assert wrapped.scale_loss(loss) is loss
    loss.backward()
    with pytest.warns(DeprecationWarning, match="apply_collective_grads"):
        assert wrapped.apply_collective_grads() is None


@ranks(2, group=None)
def test_a_strategy_for_one_rank_averages_nothing_as_in_paddle(rank: int) -> None:
    """It warns; a strategy for more ranks, or none, changes nothing."""
    join_paddle(rank)
    x = paddle.full([1, 4], 1.0 + rank)
    alone = paddle.distributed.parallel.ParallelStrategy()
    assert alone.nranks == 1
    for kind in (paddle.DataParallel, DataParallel):
        model = nn.Linear(4, 1)
        with pytest.warns(UserWarning, match=r"single-card|strategy\.nranks is 1"):
            wrapped = kind(model, alone)
        wrapped(x).sum().backward()
        assert_array_equal(model.weight.grad.numpy(), np.full((4, 1), 1.0 + rank))
    two = paddle.distributed.parallel.ParallelStrategy()
    two.nranks = 2
    model = nn.Linear(4, 1)
    DataParallel(model, two)(x).sum().backward()
    assert_array_equal(model.weight.grad.numpy(), np.full((4, 1), 1.5))


@kept_ranks(2)
def test_the_weight_of_a_wrapped_layer_is_its_parameter(group: object) -> None:
    """Other names of Paceline's shadow the model's, which `module` still has."""
    model, x = nn.Linear(4, 1), paddle.full([1, 4], 1.0 + group.rank)
    model.finish = "the model's"
    wrapped = DataParallel(model, group=group, weight=1.0 + 2 * group.rank)
    assert wrapped.weight is model.weight and wrapped.bias is model.bias
    assert wrapped.module.finish == "the model's" and callable(wrapped.finish)
    wrapped(x).sum().backward()
    assert_array_equal(wrapped.weight.grad.numpy(), np.full((4, 1), 1.75))
    plain = DataParallel(two_layers(), group=group)
    with plain.weight(1.0 + 2 * group.rank):
        plain(x).sum().backward()
    assert_array_equal(plain.module[2].bias.grad.numpy(), np.ones(2))


@kept_ranks(2)
def test_a_model_may_be_wrapped_again_and_a_wrapper_is_freed(group: object) -> None:
    model = two_layers()
    first = DataParallel(model, group=group)
    train(first, paddle.ones([1, 4]), steps=1)
    del first
    assert syncs_alive() == 0
    second = DataParallel(model, group=group)
    second.clear_gradients()
    second(paddle.full([1, 4], 1.0 + group.rank)).sum().backward()
    assert_array_equal(model[2].bias.grad.numpy(), np.ones(2))


@kept_ranks(2)
def test_gradients_for_a_penalty_do_not_count_as_a_backward(group: object) -> None:
    model = two_layers()
    # The slope does not depend on the last bias.
    wrapped = DataParallel(model, group=group, find_unused_parameters=True)
    x = share(batch(), group.rank)
    x.stop_gradient = False
    (slope,) = paddle.grad(wrapped(x).sum(), [x], create_graph=True)
    (slope**2).sum().backward()
    assert_same_on_all_ranks(model[0], group)


@ranks(2)
def test_to_static(group: object) -> None:
    paddle.seed(1)
    layer = paddle.jit.to_static(two_layers(), full_graph=True)
    alone, x = two_layers(), batch()
    wrapped = DataParallel(layer, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Paddle's compiler
        output = wrapped(share(x, group.rank))
    squares(output).backward()
    squares(alone(paddle.to_tensor(x))).backward()
    for ours, expected in zip(wrapped.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-6)
