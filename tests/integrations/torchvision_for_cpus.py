"""Makes torchvision's transforms importable beside torch for CPUs; as a program, it then runs a script.

paceline run -n 2 -m tests.integrations.torchvision_for_cpus SCRIPT ...

The wheels of torchvision in a package index are built against torch for GPUs: their compiled operators cannot
be loaded, so importing torchvision fails at the first operator that it refers to. timm needs only its
transforms. So this module declares the operators without code; a call of one would fail.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")


def _declare() -> None:
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if importlib.util.find_spec("torchvision") is not None:
    _declare()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
