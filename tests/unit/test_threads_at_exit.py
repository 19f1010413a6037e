"""The behaviour of a foreign library's thread at the end of the process, such as that of Paddle's store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# An exit handler replaces the destructor of a static object, during which another thread continues.
LIBRARY = """
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void* give_up(void*) { abort(); }

static void end() {
  pthread_t thread;
  if (strcmp(getenv("WHO"), "main thread") == 0) abort();
  pthread_create(&thread, nullptr, give_up, nullptr);
  usleep(300000);
}

__attribute__((constructor)) static void load() { atexit(end); }
"""
PROGRAM = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
ctypes.CDLL(sys.argv[1])
if os.environ["IS_HELD"]:
    from paceline import _core
    _core.hold_late_threads()
    _core.hold_late_threads()
sys.exit(7)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, made = (tmp_path_factory.mktemp("library") / name for name in ("end.cc", "end.so"))
    source.write_text(LIBRARY)
    subprocess.run(["g++", "-shared", "-fPIC", "-pthread", "-o", made, source], check=True, timeout=120)
    return made


@pytest.mark.parametrize(
    "who, is_held, status",
    [
        ("another thread", "", -signal.SIGABRT),
        ("another thread", "yes", 7),
        ("main thread", "yes", -signal.SIGABRT),
    ],
)
def test_only_a_thread_of_a_library_is_held(library: Path, who: str, is_held: str, status: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env=os.environ | {"WHO": who, "IS_HELD": is_held},
        timeout=60,
        check=False,
    )
    assert run.returncode == status
