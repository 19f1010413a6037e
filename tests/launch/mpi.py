"""Finds the mpirun of Open MPI and of MPICH by `mpirun --version`, because they have the same name."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
KINDS = (OPEN_MPI, MPICH)
_NAMES = ("mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
_SIGNS = {OPEN_MPI: "Open MPI", MPICH: "HYDRA"}


@functools.cache
def find_mpirun(kind: str) -> str | None:
    """The path of the mpirun of OPEN_MPI or MPICH; None: it is not installed."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is None:
            continue
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if _SIGNS[kind] in shown.stdout:
            return path
    return None


def command(kind: str, count: int) -> list[str]:
    """The command that starts `count` ranks of the program that follows, in blocks."""
    path = find_mpirun(kind)
    assert path is not None
    if kind == MPICH:
        return [path, "-np", str(count)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [path, *root, "--oversubscribe", "--map-by", "slot", "-np", str(count)]
