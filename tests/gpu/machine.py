"""Describes the machine: the reason why GPUs cannot be tested here, or the GPU.

As a program, `python tests/gpu/machine.py [--device cpu]`, it prints the reason and exits with 1. It does not
import Paceline, which may not be built yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass


def missing(device: str) -> str:
    """The reason why nothing can be run on this device, as a sentence; empty: it can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch."
    import torch

    if device != "cuda":
        return ""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} of {sys.executable} is built for CPUs only; name another PYTHON."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no GPU on this machine."
    return ""


@dataclass(frozen=True)
class Accelerator:
    """The device that a bench ran on.

    Attributes:
        kind: "cuda" or "cpu".
        name: The GPU's own name.
        count: How many there are.
        details: Memory, driver, CUDA and NCCL in words.
    """

    kind: str
    name: str
    count: int
    details: str

    @property
    def slug(self) -> str:
        """Short name for file names, such as `h100-80gb-hbm3`."""
        words = re.sub(r"[^a-z0-9]+", " ", self.name.lower()).split()
        return "-".join(word for word in words if word not in {"nvidia", "amd", "geforce"}) or self.kind

    @classmethod
    def here(cls, device: str) -> Accelerator:
        """The device of this machine."""
        import torch

        if device != "cuda":
            return cls(device, device, 0, "no GPU: a trial of the programs, whose times say nothing")
        facts = torch.cuda.get_device_properties(0)
        nccl = (
            ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        )
        details = (
            f"{facts.total_memory / 2**30:.0f} GiB, {facts.multi_processor_count} multiprocessors, "
            f"driver {_driver()}, CUDA {torch.version.cuda}, NCCL {nccl}"
        )
        return cls(device, facts.name, torch.cuda.device_count(), details)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = ended.stdout.split()
    return lines[0] if ended.returncode == 0 and lines else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    why = missing(parser.parse_known_args()[0].device)
    if why:
        print(why)
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
