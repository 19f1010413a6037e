"""Replaces two needs of torch's tests: a GPU to which tensors move, and a package for their base class.

Each is patched into the process from which the ranks are forked, or into a rank before its test begins.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WORLD_SIZE = 2
TESTS = "torch.testing._internal.distributed.distributed_test"
_FACTORIES = ("arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")


def load(*, needs_no_gpu: bool) -> types.ModuleType:
    """torch's module of tests, for Gloo and two ranks.

    Args:
        needs_no_gpu: Whether tests run that would skip themselves without a GPU.
    """
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE), "GLOO_SOCKET_IFNAME": "lo"}
    # The base class of torch's tests comes from expecttest, which compares texts with texts in the source.
    # None of these tests does that.
    if "expecttest" not in sys.modules:
        expecttest: Any = types.ModuleType("expecttest")
        expecttest.TestCase, expecttest.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = expecttest
    from torch.testing._internal import common_distributed

    if needs_no_gpu:
        common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
        common_distributed.skip_if_no_gpu = lambda test: test
    return importlib.import_module(TESTS)


def let_ranks_be_late(module: types.ModuleType, patience_s: float) -> None:
    """Make ranks wait longer for each other than the 10 s of torch's tests, before a test and after it."""
    barrier: Any = module.Barrier
    barrier.sync = staticmethod(functools.partial(barrier.sync, timeout=patience_s))


def on_cpu(device: Any) -> Any:
    """The device, or the CPU in place of a GPU."""
    is_gpu = (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")
    return "cpu" if is_gpu else device


def stand_in_for_gpus() -> None:
    """Make calls that move a tensor or a module to a GPU, or choose a GPU, do nothing."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    for kind in (torch.Tensor, nn.Module):
        kind.to = _with_arguments_on_cpu(kind.to)  # type: ignore[assignment,attr-defined,method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _with_device_on_cpu(getattr(torch, name)))
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    torch.cuda.device_count = lambda: WORLD_SIZE
    torch.cuda.current_device = lambda: 0


def _with_arguments_on_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        return move(self, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return moved


def _with_device_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return factory(*args, **kwargs)

    return made


def wrap_on_cpu(kind: type[nn.Module]) -> None:
    """Make this class wrap a model although device_ids names a GPU."""
    constructor = kind.__init__

    @functools.wraps(constructor)
    def construct(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any
    ) -> None:
        constructor(self, module, **more)

    kind.__init__ = construct  # type: ignore[method-assign]


def use_paceline_for_gloo() -> None:
    """Make process groups use the backend "paceline" if a test asks for Gloo."""
    importlib.import_module("paceline.torch")  # registers it

    initialise = dist.init_process_group

    @functools.wraps(initialise)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = "paceline"
        initialise(*args, **kwargs)

    dist.init_process_group = init_process_group


def use_paceline_for_ddp() -> None:
    """Replace torch's DistributedDataParallel and SyncBatchNorm by Paceline's."""
    import paceline.torch

    paceline.torch.replace_ddp()
    nn.SyncBatchNorm = paceline.torch.SyncBatchNorm  # type: ignore[misc]
    nn.modules.SyncBatchNorm = paceline.torch.SyncBatchNorm  # type: ignore[attr-defined]
