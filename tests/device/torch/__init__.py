"""A stand-in device for PyTorch: its streams are threads, and run their work asynchronously.

Without a GPU, `make test-device` runs the tests of GPUs on it (`tests.accelerator`). It does not model NCCL's
kernels, the speed of a GPU or CUDA graphs. It reveals code that forgets to wait; device.cc and its headers
explain how. Each process has to call `begin()` before it names the device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.utils.backend_registration import rename_privateuse1_backend

from tests.device.build import library as library_of

NAME = "later"
"""The kind of the device."""
NCCL = f"cpu:gloo,{NAME}:{NAME}"
"""A backend of a process group with collectives for which a stream can wait, as with NCCL."""
LAUNCH = "later::launch"
"""The name in torch's profiler of a kernel, a copy or a collective that is given to the device."""
GLOO = f"cpu:gloo,{NAME}:{NAME}_gloo"
"""Collectives for which the caller has to wait, as with Gloo."""


def build() -> Path:
    """The library, built anew if its sources or torch have changed."""
    return library_of("torch", torch.__version__, _flags)


def _flags(name: str) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [
        root / "include",
        root / "include/torch/csrc/api/include",
        Path(sysconfig.get_path("include")),
    ]
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-isystem{each}" for each in includes),
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]


@functools.cache
def begin() -> Any:
    """Register the device with torch, in this process. Returns the library: `sleep`, `forbid_waiting`, ..."""
    path = build()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module_of(library))  # type: ignore[no-untyped-call]
    for name, engine in ((NAME, "nccl"), (f"{NAME}_gloo", "gloo")):
        dist.Backend.register_backend(name, functools.partial(group, engine), devices=NAME)
    return library


def group(engine: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend of a process group that calls itself "nccl" or "gloo". Collective; the device has begun."""
    gloo = dist.ProcessGroupGloo(PrefixStore(NAME, store), rank, size, timeout=timeout)
    return begin().group(gloo, rank, size, engine)


def _module_of(library: Any) -> ModuleType:
    """The counterpart of `torch.cuda`, as far as tests and torch use it."""

    class Module(ModuleType):
        device_count = staticmethod(library.device_count)
        current_device = staticmethod(library.current_device)
        current_stream = staticmethod(torch.accelerator.current_stream)
        max_memory_allocated = staticmethod(library.max_memory_allocated)
        reset_peak_memory_stats = staticmethod(library.reset_peak_memory_stats)
        Event = staticmethod(functools.partial(torch.Event, NAME))

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def _is_in_bad_fork() -> bool:
            return False

        @staticmethod
        def manual_seed_all(seed: int) -> None:
            """Random numbers come from the CPU."""

        @staticmethod
        def get_amp_supported_dtype() -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

        @staticmethod
        def set_device(device: Any) -> None:
            library.set_device(_index_of(device))

        @staticmethod
        def synchronize(device: Any = None) -> None:
            library.synchronize(library.current_device() if device is None else _index_of(device))

        @staticmethod
        def Stream(device: Any = None) -> torch.Stream:
            return torch.Stream(torch.device(NAME) if device is None else torch.device(device))

        @staticmethod
        def stream(stream: torch.Stream) -> torch.Stream:
            return stream  # returns a context

        @staticmethod
        @contextlib.contextmanager
        def device(device: Any) -> Iterator[None]:
            before = library.current_device()
            library.set_device(_index_of(device))
            try:
                yield
            finally:
                library.set_device(before)

    return Module(NAME)


def _index_of(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0
