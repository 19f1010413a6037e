"""Groups like "cpu:paceline,cuda:nccl": calls on tensors of other devices go to those devices' backends.

torch lets one Python process group stand for all devices of a group, so this class forwards their calls. It
creates the other backends at the first call that needs them, when torch has recorded which ones the user
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig, PrefixStore

from paceline.errors import ConfigError
from paceline.torch.backend.process_group import PacelineProcessGroup

_CALLS_WITH_TENSORS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "send",
    "recv",
    "recv_anysource",
)


class MixedProcessGroup(PacelineProcessGroup):
    _others: dist.ProcessGroup | None = None

    def _for_device(self, device: torch.device) -> dist.ProcessGroup:
        if self._others is None:
            others = dist.ProcessGroup(self._store, self._rank, self._size)
            for kind, backend in self._asked_for().items():
                self._add_backend(others, torch.device(kind), backend)
            self._others = others
        if device.type not in self._asked_for():
            raise ConfigError(
                f"This process group has no backend for {device.type} tensors.",
                got=f"init_process_group({dist.get_backend_config(self)!r})",
                hint=f'for NVIDIA GPUs: init_process_group("cpu:paceline,{device.type}:nccl")',
            )
        return self._others

    def _asked_for(self) -> dict[str, str]:
        config = BackendConfig(dist.Backend(dist.get_backend_config(self)))
        backends = {kind: str(name) for kind, name in config.get_device_backend_map().items()}
        backends.pop("cpu", None)
        return backends

    def _add_backend(self, others: dist.ProcessGroup, device: torch.device, name: str) -> None:
        store = PrefixStore(f"{device.type}/", self._store)
        timeout = timedelta(seconds=self._timeout_s)
        kinds = dist.ProcessGroup.BackendType
        backend: Any
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend, kind = dist.ProcessGroupNCCL(store, self._rank, self._size, options), kinds.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
            kind = kinds.GLOO
        else:
            raise ConfigError(
                f"The backend {name!r} can't be combined with paceline in one process group.",
                expected='"nccl" or "gloo" beside "cpu:paceline"',
                hint="make a second group for it: torch.distributed.new_group(backend=...)",
            )
        others._set_default_backend(kind)
        others._register_backend(device, kind, backend)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *map(torch.device, self._asked_for())]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._for_device(device)._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._for_device(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type == "cpu":
            return super()._end_coalescing(device)
        return self._for_device(device)._end_coalescing(device)

    def shutdown(self) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.shutdown()
        super().shutdown()

    def abort(self) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.abort()
        super().abort()


def _by_device(name: str) -> Callable[..., Any]:
    on_cpu = getattr(PacelineProcessGroup, name)

    def call(self: MixedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args)
        if tensor is None or tensor.is_cpu:
            return on_cpu(self, *args, **kwargs)
        return getattr(self._for_device(tensor.device), name)(*args, **kwargs)

    call.__name__ = name
    return call


def _first_tensor(items: Sequence[Any]) -> torch.Tensor | None:
    for item in items:
        if isinstance(item, torch.Tensor):
            return item
        if isinstance(item, (list, tuple)):
            found = _first_tensor(item)
            if found is not None:
                return found
    return None


for _name in _CALLS_WITH_TENSORS:
    setattr(MixedProcessGroup, _name, _by_device(_name))
