"""Wrong arguments of `paceline.torch`."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline.torch
from paceline.torch import DataParallel, DistributedDataParallel, SyncBatchNorm, compression
from tests.unit.wrong_uses import INF, NAN, Use, check, each, each_shown


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Optimizer(torch.optim.Optimizer):
    """Made without the constructor, which imports torch's compiler: seconds, in each test worker."""

    def __init__(self) -> None:
        self.param_groups = []


def wrap(module: Any = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(2, 2) if module is None else module, **options)


def _tensors() -> list[Use]:
    def empty(argument: str, *values: Any) -> list[Use]:
        return each("empty", argument, lambda v: paceline.torch.empty(2, **{argument: v}), *values)

    return [
        *each("empty", "size", paceline.torch.empty, -1, 2.5, "3", None),
        *each_shown("empty", "size", paceline.torch.empty, ((2, -3), "-3")),
        *empty("dtype", "float32", np.float32),
        *each_shown(
            "empty", "group", lambda v: paceline.torch.empty(2, group=v), (None, "gloo"), ([0], "[0]")
        ),
    ]


def _wrapping() -> list[Use]:
    def ddp(argument: str, *values: Any) -> list[Use]:
        return each("DDP", argument, lambda v: wrap(**{argument: v}), *values)

    meta = nn.Linear(2, 2, device="meta")
    flags = (
        "init_sync",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
    )
    return [
        *each_shown(
            "DDP",
            "module",
            DistributedDataParallel,
            (None, "None"),
            ([nn.Linear(2, 2)], "list"),
            (nn.Linear, "class"),
            ("model", "'model'"),
            (lambda x: x, "function"),
            (iter([nn.Parameter(torch.zeros(2))]), "list_iterator"),
            (nn.LazyLinear(2), "LazyLinear"),
            (nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), "'1.weight'"),
            (meta, "meta"),
            (nn.Sequential(nn.Linear(2, 2), meta), "'1.weight'"),
            (_Optimizer(), "_Optimizer"),
        ),
        *ddp("device_ids", "0", [0.5], [None], ["gpu0"], [[0]], [True], {0: 1}),
        *ddp("output_device", "gpu0", 0.5, [0]),
        *ddp("dim", "0", 0.5, None),
        *ddp("broadcast_buffers", "yes", 2, []),
        *ddp("forward_sync_buffers", "yes"),
        *ddp("init_sync_buffers", "yes"),
        *(use for name in flags for use in ddp(name, "False", 2)),
        *ddp("check_reduction", "no"),
        *ddp("lazy_bucket_allocation", "yes"),
        *ddp("process_group", "gloo", 0, [0, 1], dist.ReduceOp.SUM, dist.group),
        *ddp("bucket_cap_mb", "big", "25", -1, 0, NAN, INF, True, [25], 1e-9 * -1),
        *ddp("bucket_cap_mb_list", "big", 25, [0], ["1"], [NAN], [None], [True]),
        *ddp("mixed_precision", "bf16", torch.float16),
        *ddp("device_mesh", "cpu", 2, (2,)),
        *ddp("delay_all_reduce_named_params", "w", 7, ["weight"], [("weight",)]),
        *ddp(
            "buffers", "average", ["average"], 7, {"*": "mean"}, {7: "average"}, {"*": None}, {"*": ["local"]}
        ),
        *each_shown("DDP", "buffers", lambda v: wrap(buffers=v), (torch.ones(2), "tensor")),
        *ddp("weight", "2", -1.0, NAN, INF, [1], True),
        *ddp("nonfinite", "panic", True, None, 7),
        *ddp("reduce_through", "gloo", None, True),
        *ddp("share_parameters", "yes", 2),
        *ddp("reduce", "sum", True, None),
        *ddp("timeout_s", "5", -1, 0, NAN, True, [5], datetime.timedelta(0)),
        *ddp("warn_after_s", "5", -1, 0, NAN, True),
        *ddp("check_replicas_every", "100", -1, 1.5, True),
        *ddp("compress_between_hosts", "8bit", True, 8, ["int8"]),
        *ddp("deterministic", True, "layout", 1, ["world"]),
        *ddp("local_sgd", 16, True, "16", {"every": 16}),
    ]


def _methods() -> list[Use]:
    """The calls take the wrapped model first."""
    optimizer = torch.optim.SGD
    return [
        *each(
            "logging_sample_rate",
            "sample_rate",
            lambda m, v: m._set_ddp_runtime_logging_sample_rate(v),
            "x",
            0,
            None,
            True,
        ),
        *each("weight", "weight", lambda m, v: m.weight(v), "2", -1, NAN, None, [1], True),
        *each("finish", "after_pass", lambda m, v: m.finish(v), "step", 7, [print]),
        *each("iterate", "batches", lambda m, v: next(iter(m.iterate(v))), None, 7, np.array(1)),
        *each("iterate", "after_pass", lambda m, v: next(iter(m.iterate([1], v))), "step", 7),
        *each("clip_grad_norm_", "max_norm", lambda m, v: m.clip_grad_norm_(v), "2", None, [1], NAN, -1),
        *each_shown(
            "clip_grad_norm_", "max_norm", lambda m, v: m.clip_grad_norm_(v), (torch.ones(2), "tensor")
        ),
        *each("clip_grad_norm_", "norm_type", lambda m, v: m.clip_grad_norm_(1.0, v), "two", None, NAN),
        *each("clip_grad_norm_", "scaler", lambda m, v: m.clip_grad_norm_(1.0, scaler=v), 2.0, "s"),
        *each("check_replicas", "optimizer", lambda m, v: m.check_replicas(v), "sgd", 7, optimizer),
        *each_shown(
            "check_replicas", "optimizer", lambda m, v: m.check_replicas(v), (nn.Linear(2, 2), "Linear")
        ),
        *each("register_comm_hook", "hook", lambda m, v: m.register_comm_hook(None, v), None, "fp16", 7),
        *each(
            "register_builtin", "comm_hook_type", lambda m, v: m._register_builtin_comm_hook(v), None, "fp16"
        ),
        *each("register_buffer", "hook", lambda m, v: m._register_buffer_comm_hook(None, v), None, "mean"),
        *each(
            "register_buffer",
            "comm_hook_location",
            lambda m, v: m._register_buffer_comm_hook(None, print, v),
            "before",
            7,
        ),
        *each(
            "register_fused_optim", "optim", lambda m, v: m._register_fused_optim(v), None, "sgd", nn.Linear
        ),
        *each("update", "new_process_group", lambda m, v: m._update_process_group(v), "gloo", 7),
        *each("join", "enable", lambda m, v: m.join(enable=v), "yes", 2),
        *each("join", "divide_by_initial_world_size", lambda m, v: m.join(v), "yes"),
        *each("join", "throw_on_early_termination", lambda m, v: m.join(True, True, v), "yes"),
        *each(
            "load_state_dict", "state_dict", lambda m, v: m.load_state_dict(v), None, "model.pt", [1], {1: 2}
        ),
        *each("load_state_dict", "strict", lambda m, v: m.load_state_dict({}, v), "no", 2),
        *each("load_state_dict", "assign", lambda m, v: m.load_state_dict({}, assign=v), "no", 2),
    ]


def _others() -> list[Use]:
    def dp(argument: str, *values: Any) -> list[Use]:
        options = {"module": nn.Linear(2, 2), "device_ids": ["cpu", "cpu"]}
        return each("DP", argument, lambda v: DataParallel(**{**options, argument: v}), *values)

    x = torch.ones(2, 2)
    alone = DataParallel(nn.Linear(2, 2), loss_fn=lambda y: y.sum())
    two = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    norm = [
        *each("SyncBatchNorm", "num_features", SyncBatchNorm, "4", 0, -1, 2.5, None),
        *each("SyncBatchNorm", "process_group", lambda v: SyncBatchNorm(2, process_group=v), "gloo", 7),
        *each("SyncBatchNorm", "eps", lambda v: SyncBatchNorm(2, v), "small", NAN, -1),
        *each("SyncBatchNorm", "momentum", lambda v: SyncBatchNorm(2, 1e-5, v), "some", NAN),
        *each_shown(
            "convert",
            "module",
            SyncBatchNorm.convert_sync_batchnorm,
            (None, "None"),
            (nn.Linear, "class"),
            ([nn.BatchNorm1d(2)], "list"),
        ),
        *each(
            "convert",
            "process_group",
            lambda v: SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2), v),
            "gloo",
            7,
        ),
    ]
    hooks = (compression.fp16_hook, compression.bf16_hook, compression.eight_bit_hook)
    return [
        *each_shown(
            "DP",
            "module",
            lambda v: DataParallel(v, ["cpu"]),
            (None, "None"),
            (nn.Linear, "class"),
            ([1], "list"),
        ),
        *dp("device_ids", "cpu", 7, ["gpu0"], [0.5], [None], [[0]], ["cpu", "meta"]),
        *dp("output_device", "gpu0", 0.5, ["cpu"]),
        *dp("dim", "0", 0.5, None),
        *dp("loss_fn", "mse", 7),
        *each("DP", "loss_inputs", lambda v: alone(x, loss_inputs=v), 7),
        *each("DP", "inputs", two, torch.tensor(1.0)),
        *norm,
        *(use for hook in hooks for use in each("hook", "state", lambda v, h=hook: h(v, None), None, "fp16")),
        *each("hook", "bucket", lambda v: hooks[0](compression.Fp16Compression(), v), None, "b"),
        *each(
            "compression", "error_feedback", lambda v: compression.Fp16Compression(error_feedback=v), "no", 2
        ),
    ]


@pytest.mark.parametrize("use", [*_wrapping(), *_tensors(), *_others()], ids=str)
def test_wrong_arguments(use: Use) -> None:
    check(use)


@pytest.mark.parametrize("use", _methods(), ids=str)
def test_wrong_arguments_of_methods(use: Use) -> None:
    model = wrap()
    check(Use(use.owner, use.argument, use.value, lambda v: use.call(model, v), use.shown))


def test_what_means_the_right_thing_is_taken() -> None:
    np = pytest.importorskip("numpy")
    model = wrap(
        timeout_s=datetime.timedelta(seconds=5),
        warn_after_s=np.float32(2.5),
        bucket_cap_mb=np.int64(1),
        bucket_cap_mb_list=(np.float64(0.5), 1),
        find_unused_parameters=np.True_,
        static_graph=0,
        init_sync=1,
        device_ids=(torch.device("cpu"),),
        output_device="cpu",
        check_replicas_every=np.int32(10),
        weight=torch.tensor(2),
    )
    assert model._config.timeout_s == 5.0
    assert model._config.bucket_caps_bytes == (1 << 19, 1 << 20)
    assert type(model._config.check_replicas_every) is int
    assert model._config.allow_unused is True
    model(torch.ones(1, 2)).sum().backward()
    model.clip_grad_norm_(np.float64(1.0), np.int64(2))
    model.clip_grad_norm_(torch.tensor(1.0), "inf")
    model.check_replicas(torch.optim.SGD(model.parameters(), lr=0.1))
    assert DistributedDataParallel(nn.Linear(2, 2), []).module is not None  # as torch: no device


def test_an_iterator_of_delayed_parameters_is_there_for_a_copy_too() -> None:
    module = nn.Linear(2, 2)
    model = wrap(
        module,
        delay_all_reduce_named_params=module.named_parameters(),
        param_to_hook_all_reduce=module.weight,
    )
    assert model._tensors.delayed == copy.deepcopy(model)._tensors.delayed == {0, 1}
