"""A stand-in device that Paddle loads as one of its custom devices; device.cc explains how it works.

Paddle loads it when it is imported, if CUSTOM_DEVICE_ROOT names the folder that `build()` returns.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from tests.device.build import library

NAME = "later"
"""The kind of the device."""
BACKEND = "xccl"
"""The value of PADDLE_DISTRI_BACKEND: collectives for which a stream can wait, as with NCCL."""
ROOT = "CUSTOM_DEVICE_ROOT"
_DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu")
_LIBRARY = "paceline_test_device_paddle"
IS_THERE = _LIBRARY in os.environ.get(ROOT, "")  # there are devices of other vendors


def build() -> Path:
    """The folder of the library, built anew if a source or Paddle has changed; does not import Paddle."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("the device is built from the headers of Paddle, which is not installed")
    root = Path(spec.submodule_search_locations[0])
    flags = [
        "-DPADDLE_WITH_CUSTOM_DEVICE",
        "-DPADDLE_WITH_CUSTOM_KERNEL",
        *(f"-isystem{root / 'include' / each}" for each in ("", "third_party")),
        f"-L{root / 'libs'}",
        f"-Wl,-rpath,{root / 'libs'}",
        *("-l:libphi_core.so", "-l:libcommon.so"),
    ]
    found = (each for each in importlib.metadata.distributions() if each.name in _DISTRIBUTIONS)
    versions = " ".join(f"{each.name} {each.version}" for each in found)
    return library("paddle", versions, lambda name: flags).parent
