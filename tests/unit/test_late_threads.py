"""What threads of foreign libraries do when the process ends, as those of Paddle's store and of Gloo do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# An exit handler stands for the destructor of a static object, in whose time another thread goes on.
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


# A thread that holds a lock throws; the destructor of a static object waits for that lock.
THROWING = """
#include <pthread.h>
#include <stdexcept>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool has_locked = false;

static void* lose(void*) {
  pthread_mutex_lock(&lock);
  __atomic_store_n(&has_locked, true, __ATOMIC_RELEASE);
  throw std::runtime_error("Connection reset by peer");
}

extern "C" void begin() {
  pthread_t thread;
  pthread_create(&thread, nullptr, lose, nullptr);
  while (!__atomic_load_n(&has_locked, __ATOMIC_ACQUIRE)) usleep(1000);
}

struct Context {
  ~Context() { if (has_locked) pthread_mutex_lock(&lock); }
} context;
"""
LOSING = """
import atexit, ctypes, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
library = ctypes.CDLL(sys.argv[1])
from paceline import _core
from paceline.health import lifetime
_core.hold_late_threads()
print("in the buffer", end="")
when = sys.argv[2]
if when == "at exit":
    atexit.register(library.begin)
    lifetime._install()  # handlers are called last first
else:
    if when == "after an error":
        lifetime.announce(ValueError("the cause"))
    library.begin()
    if when == "in training":
        signal.pause()
sys.exit(7)
"""


def _make(folder: Path, source: str) -> Path:
    made = folder / "library.so"
    (folder / "library.cc").write_text(source)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-pthread", "-o", made, folder / "library.cc"], check=True, timeout=300
    )
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("library"), LIBRARY)


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


@pytest.mark.parametrize(
    "when, status", [("at exit", 7), ("after an error", 7), ("in training", -signal.SIGABRT)]
)
def test_what_a_thread_throws_ends_no_process_that_ends(tmp_path: Path, when: str, status: int) -> None:
    """Nor does a destructor wait for the lock that the thread holds."""
    run = subprocess.run(
        [sys.executable, "-c", LOSING, str(_make(tmp_path, THROWING)), when],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == status, run.stderr
    assert run.stdout == "in the buffer" or status != 7
