"""Wrong arguments of `paceline.paddle`."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from paddle import nn  # noqa: E402

import paceline.paddle as ours  # noqa: E402
from paceline.paddle import compression  # noqa: E402
from tests.unit.wrong_uses import INF, NAN, Use, check, each, each_shown  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Paddle's own, and that this process trains alone


def wrap(layers: Any = None, **options: Any) -> Any:
    return ours.DataParallel(nn.Linear(2, 2) if layers is None else layers, **options)


def _wrapping() -> list[Use]:
    def dp(argument: str, *values: Any) -> list[Use]:
        return each("DP", argument, lambda v: wrap(**{argument: v}), *values)

    bad_layers = (
        (None, "None"),
        ([nn.Linear(2, 2)], "list"),
        (nn.Linear, "class"),
        ("model", "'model'"),
        (lambda x: x, "function"),
    )
    flags = (
        "init_sync",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
        "check_reduction",
    )
    switches = ("broadcast_buffers", "forward_sync_buffers", "init_sync_buffers")
    model = nn.Linear(2, 2)

    def delay(named: Any, trigger: Any = model.weight) -> Any:
        return wrap(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=trigger)

    delayed, trigger = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
    unknown_peer, several = paddle.ones([2]), paddle.to_tensor([1, 2])

    def precise(param_dtype: Any) -> Any:
        return wrap(mixed_precision=ours.MixedPrecision(param_dtype))

    mesh = paddle.distributed.ProcessMesh([[0], [1]], dim_names=["dp", "mp"])
    return [
        *each_shown("DP", "layers", ours.DataParallel, *bad_layers),
        *each_shown("DDP", "layers", ours.DistributedDataParallel, *bad_layers),
        *dp("comm_buffer_size", "big", "25", -1, 0, NAN, INF, True, None, [25]),
        *(
            use
            for name in ("comm_buffer_size", "weight", "timeout_s", "check_replicas_every", "buffers")
            for use in each_shown("DP", name, lambda v, name=name: wrap(**{name: v}), (several, "Tensor"))
        ),
        *dp("last_comm_buffer_size", "big", -1, 0, NAN, True),
        *dp("bucket_cap_mb", "big", -1, 0, NAN, True),
        *dp("group", "gloo", 7, [0, 1]),
        *dp("process_group", "gloo", 7),
        *dp("device_ids", 0, "0", {0: 1}, [0, 1]),
        *(use for name in (*flags, *switches) for use in dp(name, "False", 2)),
        *dp("dim", 1, "0"),
        *dp("mixed_precision", "bf16", True, paddle.float16, ours.MixedPrecision(reduce_dtype="int8")),
        *each_shown("DP", "mixed_precision", precise, ("bfloat16", "bfloat16"), (paddle.float16, "float16")),
        *dp("bucket_cap_mb_list", "big", 25, [0], ["1"], [NAN], [None], [True]),
        *dp(delayed, "w", 7, ["weight"]),
        *dp(trigger, "weight", 7),
        *each("DP", delayed, delay, "w", 7, ["weight"], [("weight",)], [(7, model.weight)]),
        *each_shown(
            "DP", delayed, delay, ([("none", model.weight)], "none"), ([("weight", unknown_peer)], "weight")
        ),
        *each("DP", trigger, lambda v: delay([], v), "weight", 7),
        *each_shown("DP", trigger, lambda v: delay([], v), (unknown_peer, "Tensor")),
        *dp("device_mesh", "dp", 2, [0, 1]),
        *each_shown("DP", "device_mesh", lambda v: wrap(device_mesh=v), (mesh, "dp")),
        *dp("buffers", "average", ["average"], 7, {"*": "mean"}, {7: "average"}),
        *dp("weight", "2", -1.0, NAN, INF, [1], True),
        *dp("nonfinite", "panic", True, None),
        *dp("reduce_through", "gloo", None),
        *dp("timeout_s", "5", -1, 0, NAN, True, [5], datetime.timedelta(0)),
        *dp("warn_after_s", "5", -1, 0, NAN, True, [5], datetime.timedelta(0)),
        *dp("check_replicas_every", "100", -1, 1.5, True),
        *dp("compress_between_hosts", "8bit", True, 8, ["int8"]),
        *dp("deterministic", True, "layout", 1, ["world"]),
        *dp("share_parameters", "yes", 2),
        *dp("local_sgd", 16, True, "16", {"every": 16}),
    ]


def _others() -> list[Use]:
    norm, convert = ours.SyncBatchNorm, ours.SyncBatchNorm.convert_sync_batchnorm
    hooks = (compression.fp16_hook, compression.bf16_hook, compression.eight_bit_hook)
    return [
        *(use for hook in hooks for use in each("hook", "state", lambda v, h=hook: h(v, None), None, "fp16")),
        *each("hook", "bucket", lambda v: hooks[0](compression.Fp16Compression(), v), None, "b"),
        *each(
            "compression", "error_feedback", lambda v: compression.Fp16Compression(error_feedback=v), "no", 2
        ),
        *each("SyncBatchNorm", "num_features", norm, "4", 0, -1, 2.5, None),
        *each("SyncBatchNorm", "momentum", lambda v: norm(2, v), "some", NAN, -1, None),
        *each("SyncBatchNorm", "epsilon", lambda v: norm(2, epsilon=v), "small", NAN, -1),
        *each("SyncBatchNorm", "process_group", lambda v: norm(2, process_group=v), "gloo", 7),
        *each_shown("convert", "layer", convert, (None, "None"), (nn.Linear, "class"), ([1], "list")),
        *each("convert", "process_group", lambda v: convert(nn.Linear(2, 2), v), "gloo", 7),
        *each("spawn", "func", ours.spawn, None, "train", 7),
        *each("spawn", "args", lambda v: ours.spawn(print, v), 7, None, "ab"),
        *each("spawn", "nprocs", lambda v: ours.spawn(print, nprocs=v), "2", 0, 2.0, True, 4096),
    ]


def _methods() -> list[Use]:
    """The calls take the wrapped model first."""
    two, layer = paddle.to_tensor([1, 2]), nn.Linear(2, 2)
    return [
        *each("weight", "weight", lambda m, v: m.weight(v), "2", -1, NAN, None, [1]),
        *each("finish", "after_pass", lambda m, v: m.finish(v), "step", 7),
        *each("iterate", "batches", lambda m, v: m.iterate(v), None, 7, np.array(1)),
        *each("iterate", "after_pass", lambda m, v: m.iterate([1], v), "step", 7),
        *each("clip_grad_norm_", "max_norm", lambda m, v: m.clip_grad_norm_(v), "2", None, [1], NAN, -1),
        *each_shown(
            "clip_grad_norm_",
            "max_norm",
            lambda m, v: m.clip_grad_norm_(v),
            (two, "Tensor"),
            (layer, "Linear"),
        ),
        *each(
            "clip_grad_norm_",
            "norm_type",
            lambda m, v: m.clip_grad_norm_(1.0, v),
            "two",
            None,
            NAN,
            3.0,
            -1.0,
        ),
        *each_shown("clip_grad_norm_", "norm_type", lambda m, v: m.clip_grad_norm_(1.0, v), (two, "Tensor")),
        *each(
            "check_replicas", "optimizer", lambda m, v: m.check_replicas(v), "sgd", 7, paddle.optimizer.SGD
        ),
        *each_shown(
            "check_replicas",
            "optimizer",
            lambda m, v: m.check_replicas(v),
            (layer, "Linear"),
            (two, "Tensor"),
        ),
        *each("set_state_dict", "state_dict", lambda m, v: m.set_state_dict(v), None, "model.pdparams", [1]),
        *each("set_state_dict", "use_structured_name", lambda m, v: m.set_state_dict({}, v), "no", 2),
        *each("register_comm_hook", "hook", lambda m, v: m.register_comm_hook(None, v), None, "fp16", 7),
        *each("join", "enable", lambda m, v: m.join(enable=v), "yes", 2),
        *each("join", "divide_by_initial_world_size", lambda m, v: m.join(v), "yes"),
        *each("join", "throw_on_early_termination", lambda m, v: m.join(True, True, v), "yes"),
    ]


@pytest.mark.parametrize("use", [*_wrapping(), *_others()], ids=str)
def test_wrong_arguments(use: Use) -> None:
    check(use)


@pytest.mark.parametrize("use", _methods(), ids=str)
def test_wrong_arguments_of_methods(use: Use) -> None:
    model = wrap(nn.Sequential(nn.Linear(2, 2)))
    check(Use(use.owner, use.argument, use.value, lambda v: use.call(model, v), use.shown))


def test_what_means_the_right_thing_is_taken() -> None:
    model = wrap(
        timeout_s=datetime.timedelta(seconds=5),
        comm_buffer_size=np.int64(1),
        last_comm_buffer_size=np.float32(0.5),
        find_unused_parameters=np.True_,
        init_sync=1,
        check_replicas_every=np.int32(10),
        warn_after_s=datetime.timedelta(milliseconds=2500),
        bucket_cap_mb_list=(np.float64(0.5), 1),
        skip_all_reduce_unused_params=np.True_,
        batched_grad_copy=np.False_,
        init_sync_buffers=0,
        dim=np.int64(0),
    )
    assert (model._config.timeout_s, model._config.warn_after_s) == (5.0, 2.5)
    assert (model._config.bucket_cap_bytes, model._config.first_bucket_bytes) == (1 << 20, 1 << 19)
    assert model._config.bucket_caps_bytes == (1 << 19, 1 << 20)
    assert (model._config.skip_unused, model._config.init_sync_buffers) == (True, False)
    assert model._config.allow_unused is True
    model(paddle.ones([1, 2])).sum().backward()
    model.clip_grad_norm_(np.float64(1.0), np.int64(2))
