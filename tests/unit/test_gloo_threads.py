"""The wait at exit for threads that Gloo's stand for here: Python threads of that name."""

from __future__ import annotations

import hashlib
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.torch.communicator import gloo_threads


@contextmanager
def thread_of_gloo(work: Callable[[], object]) -> Iterator[None]:
    """A thread that Gloo might have made, which has begun its work."""
    has_begun = threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        has_begun.set()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    has_begun.wait()
    yield
    thread.join()


def waited_s() -> float:
    began_s = time.monotonic()
    gloo_threads._wait_until_idle()
    return time.monotonic() - began_s


def test_without_such_threads_nothing_is_waited_for(monkeypatch) -> None:
    """Other tests of this process may have left threads of Gloo's name, and threads that sleep."""
    slept: list[float] = []
    monkeypatch.setattr(gloo_threads, "_NAME", "no_such_thread")
    monkeypatch.setattr(
        gloo_threads, "time", types.SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    )
    gloo_threads._wait_until_idle()
    assert not slept


def test_a_thread_that_waits_for_work_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(gloo_threads, "LONGEST_S", 240)
    work = threading.Lock()
    work.acquire()
    with thread_of_gloo(work.acquire):
        assert waited_s() < 120
        work.release()


@pytest.mark.parametrize("kind", ["computes", "sleeps", "waits with a deadline"])
def test_a_thread_at_work_is_waited_for(kind: str, monkeypatch) -> None:
    """Also while it waits for the interpreter's lock, or for another rank, which have a deadline."""
    monkeypatch.setattr(gloo_threads, "LONGEST_S", 240)
    until_s = time.monotonic() + 0.5
    is_done: list[bool] = []

    def work() -> None:
        if kind == "computes":
            while time.monotonic() < until_s:
                pass
        elif kind == "sleeps":
            time.sleep(0.5)
        else:
            threading.Event().wait(0.5)
        is_done.append(True)

    with thread_of_gloo(work):
        gloo_threads._wait_until_idle()
        assert is_done


def test_a_thread_that_is_stuck_is_waited_for_no_longer_than_that(monkeypatch) -> None:
    monkeypatch.setattr(gloo_threads, "LONGEST_S", 0.2)
    over = threading.Event()
    with thread_of_gloo(lambda: over.wait(600)):
        assert waited_s() < 120
        over.set()


def test_a_thread_that_is_ready_to_run_is_waited_for_longer(monkeypatch) -> None:
    """Without a core it is in the same state as one that computes."""
    monkeypatch.setattr(gloo_threads, "LONGEST_S", 0.3)
    monkeypatch.setattr(gloo_threads, "LONGEST_STARVED_S", 240)
    is_done: list[bool] = []

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
        is_done.append(True)

    with thread_of_gloo(work):
        gloo_threads._wait_until_idle()
        assert is_done


def test_kernels_that_show_no_calls_still_show_which_threads_run(monkeypatch) -> None:
    monkeypatch.setattr(gloo_threads, "_FUTEX", None)
    test_a_thread_that_waits_for_work_is_not_waited_for(monkeypatch)
    test_a_thread_at_work_is_waited_for("computes", monkeypatch)
