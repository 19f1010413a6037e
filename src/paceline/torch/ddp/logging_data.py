"""The result of `_get_ddp_logging_data` for a wrapped model, under torch's names and in torch's units.

Everything is computed when the data is requested, except the times of some backwards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.reducer.plan import plan_gradients
from paceline.reducer.process_group import ProcessGroupReducer

if TYPE_CHECKING:
    from paceline.reducer.plan import Bucket, Plan
    from paceline.torch.ddp.torch_names import TorchNames

_Method = TypeVar("_Method", bound=Callable[..., Any])

# The names in torch's own dictionary, which are those of C++.
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_ENVIRONMENT_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


def noting_errors(method: _Method) -> _Method:
    """Keep the error of a method for the logging data. Costs a call, so not for methods of each backward."""

    @functools.wraps(method)
    def call(self: TorchNames, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except PacelineError as error:
            self._errors.add(error)
            raise

    return cast(_Method, call)


class TorchLogger:
    def __init__(self, facts: dict[str, Any]) -> None:
        self.strs_map = {name: fact for name, fact in facts.items() if isinstance(fact, str)}
        self.ints_map = {name: fact for name, fact in facts.items() if isinstance(fact, int)}

    def _get_ddp_logging_data(self) -> TorchLogger:
        return self

    def _set_static_graph(self) -> None:
        """Nothing is logged."""


def logging_data(ddp: TorchNames) -> dict[str, Any]:
    return _of_construction(ddp) | _of_buckets(ddp) | _of_backwards(ddp) | _of_errors(ddp)


def _of_construction(ddp: TorchNames) -> dict[str, Any]:
    group: dist.ProcessGroup | None = ddp.process_group
    peers = ddp._peers
    trainable = ddp._tensors.trainable
    backend = "paceline" if group is None else dist.get_backend(group)
    variables = (*_ENVIRONMENT, *_ENVIRONMENT_OF_BACKEND.get(backend, ()))
    facts = {
        "world_size": 1 if peers is None else peers.world_size,
        "rank": 0 if peers is None else peers.rank,
        "backend_name": backend,
        "module_name": type(ddp.module).__name__,
        "device_ids": _joined(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else _number_of(ddp.output_device),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules())),
        "bucket_cap_bytes": ddp._config.bucket_cap_bytes,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "num_parameter_tensors": len(trainable),
        "total_parameter_size_bytes": sum(p.nbytes for p in trainable),
        "dtypes": _joined(sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in trainable})),
        **{name.lower(): os.environ.get(name, "N/A") for name in variables},
    }
    if backend == "gloo":
        facts["gloo_num_threads"] = 2  # a constant in torch, too
    if ddp._has_joined:
        facts["join_uneven_inputs"] = 1
    hook = ddp._comm_hook
    return facts if hook is None else facts | {"comm_hook": ddp._builtin_hook or hook.name}


def _of_buckets(ddp: TorchNames) -> dict[str, Any]:
    is_hooked = ddp._comm_hook is not None
    specs = ddp._tensors.specs(ddp._config, whole=is_hooked)
    first = plan_gradients(specs, ddp._config, None, whole=is_hooked)
    facts: dict[str, Any] = {"bucket_sizes": _sizes(first)}
    backward_sync = ddp._backward_sync
    if backward_sync is None or not backward_sync.good_backwards:
        return facts
    now = backward_sync.current_plan.reduction.plan
    reducer = backward_sync.reducer
    result, peers = backward_sync.statistics.result, ddp._peers
    unused = result.unused[peers.rank] if result is not None and peers is not None else []
    return facts | {
        "has_rebuilt_buckets": int(backward_sync.current_plan.is_order_final),
        "rebuilt_bucket_sizes": _sizes(now),
        "rebuilt_per_bucket_param_indices": _joined(
            " ".join(map(str, bucket.parameters)) for bucket in now.buckets
        ),
        "prev_iteration_grad_ready_order_indices": _joined(now.order),
        "num_buckets_reduced": reducer.num_launched
        if isinstance(reducer, ProcessGroupReducer)
        else len(now.buckets),
        "unused_parameter_size": sum(ddp._tensors.trainable[index].nbytes for index in unused),
    }


def _of_backwards(ddp: TorchNames) -> dict[str, int]:
    backward_sync = ddp._backward_sync
    if backward_sync is None:
        return {"iteration": 0}
    facts = {
        "iteration": backward_sync.autograd.times.backward_number,
        **backward_sync.autograd.times.facts(),
    }
    if backward_sync.good_backwards:
        facts["can_set_static_graph"] = int(backward_sync.is_graph_static)
    return facts


def _of_errors(ddp: TorchNames) -> dict[str, Any]:
    text = ddp._errors.text
    return {"has_error": 1, "error": text} if text else {}


def _joined(items: Any) -> str:
    return ", ".join(map(str, items))


def _sizes(plan: Plan) -> str:
    return _joined(
        sum(_bytes_in(plan, index, bucket) for index in bucket.parameters) for bucket in plan.buckets
    )


def _bytes_in(plan: Plan, index: int, bucket: Bucket) -> int:
    begin = plan.offsets[index]
    end = begin + plan.parameters[index].nbytes
    return min(end, bucket.end_byte) - max(begin, bucket.begin_byte)


def _number_of(device: Any) -> int:
    index = device if isinstance(device, int) else torch.device(device).index
    return -1 if index is None else int(index)
