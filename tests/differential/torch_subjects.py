"""The wrappers of a real rank: Paceline in each of its modes, or torch's own DDP."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.torch import DistributedDataParallel, ShardedOptimizer, backend
from tests import accelerator
from tests.differential import torch_mutations
from tests.differential.pool import Run
from tests.differential.programs import Program
from tests.differential.records import Record
from tests.differential.torch_machine import Machine
from tests.several_hosts import on_host, send_values

TIMEOUT_S = 12.0

_TINY = {"bucket_cap_mb": 1e-6}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "tiny": _TINY,
    "view": {"gradient_as_bucket_view": True},
    "tiny view": {**_TINY, "gradient_as_bucket_view": True},
    "unused": {**_TINY, "find_unused_parameters": True},
    "unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {**_TINY, "static_graph": True},
    "gloo": {"group": "gloo", "reduce_through": "group"},
    "gloo tiny view": {
        "group": "gloo",
        "reduce_through": "group",
        **_TINY,
        "gradient_as_bucket_view": True,
    },
    "gloo unused": {"group": "gloo", "reduce_through": "group", **_TINY, "find_unused_parameters": True},
    "backend": {"group": "paceline", "reduce_through": "group"},
    "gloo memory": {"group": "gloo", **_TINY},
    "hosts": {"group": "values"},
    "hosts tiny": {"group": "hosts", **_TINY},
    "hosts tiny view": {"group": "values", **_TINY, "gradient_as_bucket_view": True},
    "hosts unused": {"group": "hosts", **_TINY, "find_unused_parameters": True},
    "hosts static": {"group": "hosts", **_TINY, "static_graph": True},
    "uneven tiny": {"group": "uneven hosts", **_TINY},
    "uneven view": {"group": "uneven hosts", "gradient_as_bucket_view": True},
    "uneven unused": {"group": "uneven hosts", **_TINY, "find_unused_parameters": True},
    "scatter": {**_TINY, "reduce": "scatter"},
    "scatter unused": {"find_unused_parameters": True, "reduce": "scatter"},
    "uneven exact": {"group": "uneven hosts", **_TINY, "deterministic": "world"},
    "device": {"group": "device", **_TINY},
    "device view": {"group": "device", "gradient_as_bucket_view": True},
    "device batched": {"group": "device", "batched_grad_copy": True},
    "device unused": {"group": "device", **_TINY, "find_unused_parameters": True},
    "device static": {"group": "device", **_TINY, "static_graph": True},
    "device blocking": {"group": "device blocking", **_TINY, "gradient_as_bucket_view": True},
    "device hosts": {"group": "device hosts", **_TINY, "reduce_through": "hosts"},
    "device hosts unused": {
        "group": "device hosts",
        "gradient_as_bucket_view": True,
        "find_unused_parameters": True,
        "reduce_through": "hosts",
    },
}
"""The arguments of the wrapper, and its group.

"hosts": over Gloo, by ranks of several hosts; "values": the same, but hosts of one rank send gradients
uncopied, however small they are; "uneven hosts": of two, of which the second has one rank; "device": over
streams of a device (`tests.accelerator`); "device blocking": over a process group whose waits block the host;
"device hosts": by ranks of several hosts.
"""

TORCH = "torch"
TORCHS: dict[str, dict[str, Any]] = {
    TORCH: {},
    "torch unused": {"find_unused_parameters": True},
    "torch device": {"group": "device"},
    "torch device unused": {"group": "device", "find_unused_parameters": True},
}
"""The same for torch's own DDP, over Gloo if no group is named."""


class Groups:
    """The groups of one rank, each formed when the first program asks for it."""

    def __init__(self, rank: int, world_size: int, job: str, folder: Path) -> None:
        self._rank, self._world_size, self._job, self._folder = rank, world_size, job, folder
        self._group: paceline.Group | None = None
        self._torch: dict[str, dist.ProcessGroup] = {}

    def paceline(self) -> paceline.Group:
        if self._group is None:
            self._group = paceline.init(
                rank=self._rank, world_size=self._world_size, job_id=self._job, timeout_s=TIMEOUT_S
            )
        return self._group

    @contextlib.contextmanager
    def placed(self, name: str | None) -> Iterator[paceline.Group | dist.ProcessGroup]:
        """A context with the group of a mode, over whose ranks a model is wrapped."""
        if name not in ("hosts", "values", "uneven hosts", "device hosts"):
            yield self.paceline() if name is None else self.torch(name)
            return
        number = self._rank * _hosts(self._world_size) // self._world_size
        if name == "uneven hosts":
            number = int(self._rank == self._world_size - 1)
        send_values(of_small_models=name == "values")
        with on_host(number):
            yield self.torch("gloo" if name != "device hosts" else "device")

    def torch(self, name: str) -> dist.ProcessGroup:
        from datetime import timedelta

        timeout = timedelta(seconds=TIMEOUT_S)
        if not dist.is_initialized():
            store = dist.FileStore(str(self._folder / "store"), self._world_size)
            dist.init_process_group(
                "gloo", store=store, rank=self._rank, world_size=self._world_size, timeout=timeout
            )
        if name == "gloo":
            return dist.group.WORLD
        if name not in self._torch:
            backend.register()
            engines = {"device": accelerator.GLOO_AND_NCCL, "device blocking": accelerator.GLOO}
            self._torch[name] = dist.new_group(backend=engines.get(name, name), timeout=timeout)
        return self._torch[name]


def _hosts(world_size: int) -> int:
    """Two hosts of two ranks, or some of one."""
    return 2 if world_size == 4 else world_size


class Ours:
    """Paceline."""

    simulates = False

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def wrap(self, net: nn.Module, options: dict[str, Any], nest: str | None) -> nn.Module:
        options = dict(options)
        name = options.pop("group", None)
        if nest == "torch inside":
            net = TorchDDP(net, process_group=self._groups.torch("gloo"), bucket_cap_mb=1e-6)
        with self._groups.placed(name) as group:
            wrapper: nn.Module = DistributedDataParallel(net, process_group=group, **options)
        if nest == "torch outside":
            return TorchDDP(wrapper, process_group=self._groups.torch("gloo"), bucket_cap_mb=1e-6)
        return wrapper

    def no_sync(self, wrapper: Any) -> contextlib.AbstractContextManager[None]:
        return wrapper.no_sync()  # type: ignore[no-any-return]

    def weight(self, wrapper: Any, value: float) -> None:
        wrapper.weight(value)

    def finished(self, wrapper: Any, step: Any) -> None:
        wrapper.finish(step)

    def backwards(self, wrapper: Any) -> int:
        """The number of good backwards of this wrapper; a framework's own wrapper has no such count."""
        return getattr(wrapper, "num_good_passes", 0)

    @contextlib.contextmanager
    def join(self, wrapper: Any) -> Iterator[None]:
        with warnings.catch_warnings(), wrapper.join():  # its exit puts a filter before all others
            yield

    def iterate(self, wrapper: Any, batches: Sequence[int], step: Any) -> Iterator[int]:
        return wrapper.iterate(batches, step)  # type: ignore[no-any-return]

    def clip(self, wrapper: Any, trainable: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        if not hasattr(wrapper, "clip_grad_norm_"):
            return nn.utils.clip_grad_norm_(trainable, max_norm)
        return wrapper.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]

    def sharded(
        self, params: list[nn.Parameter], kind: type[torch.optim.Optimizer], options: dict[str, float]
    ) -> ShardedOptimizer:
        return ShardedOptimizer(params, kind, process_group=self._groups.paceline(), **options)


class Torchs(Ours):
    """torch's own DDP over Gloo, with its equivalents of Paceline's options."""

    def wrap(self, net: nn.Module, options: dict[str, Any], nest: str | None) -> nn.Module:
        known = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
        kept = {key: value for key, value in options.items() if key in known}
        return TorchDDP(net, process_group=self._groups.torch(options.get("group", "gloo")), **kept)


def make_rank(rank: int, world_size: int, job: str, folder: Path) -> Run:
    """Prepare this process to run programs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="(?s).*which averages nothing")
    os.environ.update(TMPDIR=str(folder))
    groups = Groups(rank, world_size, job, folder)

    def run(program: Program, options: dict[str, Any]) -> Record:
        mode = options["mode"]
        subject = Torchs(groups) if mode in TORCHS else Ours(groups)
        passed = {**MODES, **TORCHS}.get(mode, {})
        if mutation := options.get("mutation"):
            torch_mutations.put_in(mutation, rank)
        device = accelerator.KIND if "device" in mode else "cpu"
        machine = Machine(program, rank, subject, passed, device=device)
        try:
            for _ in machine.run():
                pass
        except BaseException as error:
            machine.note_end(error)
        return machine.record

    return run
