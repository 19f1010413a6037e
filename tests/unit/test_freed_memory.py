"""Memory of gradients that were freed is there for the next ones, without a fault for each page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from paceline.reducer.passes.freed_memory import keep_freed_memory

BLOCKS, BLOCK = 24, 4 << 20
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def round_of_blocks():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [c.malloc(BLOCK) for _ in range(BLOCKS)]
    for block in held:
        ctypes.memset(block, 1, BLOCK)
    for block in held:
        c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    faults = round_of_blocks()
print(faults)
print(keep_freed_memory(BLOCKS * BLOCK), keep_freed_memory(1))
for _ in range(3):
    faults = round_of_blocks()
print(faults)
"""


def run(**environment: str) -> tuple[int, str, int]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC"))
    }
    inherited.pop("LD_PRELOAD", None)
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()
    return int(out[0]), out[1], int(out[2])


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")


def test_pages_are_faulted_in_once() -> None:
    before, kept, after = run()
    assert kept == "True True"
    assert before > 24 * 256  # pages of 4 KiB at most: glibc had given back nearly all of them
    assert after < before / 20


def test_what_the_user_has_set_stays() -> None:
    before, kept, after = run(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False False"
    assert after > before / 2
