"""A device for tests that PyTorch takes for one: its streams are threads, and run later what they are given.

Where no GPU is, `make test-device` runs the tests of GPUs on it (`tests.accelerator`). It knows nothing of
NCCL's kernels, of the speed of a GPU or of CUDA graphs. What it shows is whatever forgets to wait; device.cc
says how. `begin()` has to be called in each process before the device is named.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NAME = "later"
"""The kind of the device."""
NCCL = f"cpu:gloo,{NAME}:{NAME}"
"""As a backend of a process group: collectives for which a stream can wait, as with NCCL."""
GLOO = f"cpu:gloo,{NAME}:{NAME}_gloo"
"""Collectives for which the caller has to wait, as with Gloo."""
LAG_US = "PACELINE_TEST_DEVICE_LAG_US"
"""Each task of a stream begins so much later (300): a host that does not wait is ahead of it."""
_SOURCE = Path(__file__).with_name("device.cc")
_FOLDER = Path(__file__).parents[2] / "build" / "test-device"


def build() -> Path:
    """The library, built anew if its source or torch is another one."""
    version = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()
    path = _FOLDER / f"paceline_test_device_{version[:12]}.so"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with open(_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
                made = Path(folder) / path.name
                subprocess.run(_command(made), check=True, timeout=600)
                made.rename(path)
    return path


def _command(output: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [
        root / "include",
        root / "include/torch/csrc/api/include",
        Path(sysconfig.get_path("include")),
    ]
    return [
        *os.environ.get("CXX", "g++").split(),
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DTORCH_EXTENSION_NAME={_module_name(output)}",
        *(f"-isystem{each}" for each in includes),
        str(_SOURCE),
        f"-L{root / 'lib'}",
        f"-Wl,-rpath,{root / 'lib'}",
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
        "-o",
        str(output),
    ]


def _module_name(path: Path) -> str:
    return path.stem


@functools.cache
def begin() -> Any:
    """Make the device known to torch, in this process. Returns the library: `sleep`, `forbid_waiting`, ..."""
    path = build()
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module_of(library))
    for name, engine in ((NAME, "nccl"), (f"{NAME}_gloo", "gloo")):
        dist.Backend.register_backend(name, functools.partial(group, engine), devices=NAME)
    library.set_lag(int(os.environ.get(LAG_US, "300")))
    return library


def group(engine: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend of a process group that calls itself "nccl" or "gloo". Collective; the device has begun."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout=timeout)
    return begin().group(gloo, rank, size, engine)


def _module_of(library: Any) -> ModuleType:
    """What `torch.cuda` is for a GPU, as far as tests and torch ask for it."""

    class Module(ModuleType):
        device_count = staticmethod(library.device_count)
        current_device = staticmethod(library.current_device)
        current_stream = staticmethod(torch.accelerator.current_stream)
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
            return stream  # a context of its own

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
