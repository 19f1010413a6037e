"""Builds the library of a device, once for all processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "test-device"
_SOURCES = Path(__file__).parent
_PATIENCE_S = 600


def library(framework: str, version: str, flags: Callable[[str], Sequence[str]]) -> Path:
    """The library of `tests/device/<framework>`, built anew if a source or the version has changed.

    It lies alone in its folder, as Paddle loads every library in such a folder.

    Args:
        framework: The folder of sources.
        version: The versions of all inputs of the build except the sources.
        flags: The compiler's, by the name of the library without its suffix.
    """
    sources = sorted([*_SOURCES.glob("*.h"), *(_SOURCES / framework).glob("*.h")])
    units = sorted((_SOURCES / framework).glob("*.cc"))
    built_from = [path.read_bytes() for path in [*sources, *units]]
    built_with = f"{version} {sys.version} {_command(units, FOLDER, flags(''))}"
    text = b"".join([*built_from, built_with.encode()])
    name = f"paceline_test_device_{framework}_{hashlib.sha256(text).hexdigest()[:12]}"
    path = FOLDER / name / f"{name}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                made = Path(folder) / path.name
                subprocess.run(_command(units, made, flags(name)), check=True, timeout=_PATIENCE_S)
                made.rename(path)
    return path


def _command(units: Sequence[Path], output: Path, flags: Sequence[str]) -> list[str]:
    compiler = os.environ.get("CXX", "g++").split()
    # Both frameworks may be in one process: the symbols of one device must be invisible to the other.
    always = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-iquote", str(_SOURCES)]
    return [*compiler, *always, *map(str, units), *flags, "-o", str(output)]
