"""Another process has taken the abstract socket name at which the ranks of a job rendezvous."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time

import pytest

import paceline
from paceline.errors import RendezvousError
from paceline.rendezvous.rendezvous_address import hub_address
from tests.harness import ranks

UNKNOWN_PEER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def address():
    return f"127.0.0.1:{os.environ['MASTER_PORT']}"


@contextlib.contextmanager
def squatter(name, uid, *, listens=True):
    """Start a process of another user that has the name; yield its pid."""
    fork = multiprocessing.get_context("fork")
    ready, over = fork.Event(), fork.Event()

    def squat():
        os.setuid(uid)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
            taken.bind("\0" + name)
            if listens:
                taken.listen(64)
            ready.set()
            over.wait(60)

    process = fork.Process(target=squat, daemon=True)
    process.start()
    try:
        assert ready.wait(30)
        yield process.pid
    finally:
        over.set()
        process.join()


def form_and_fail(rank):
    """Return what `init` raises at once, if only the address distinguishes this job from others."""
    started = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        paceline.init(address=address(), timeout_s=120)
    assert time.monotonic() - started < 60
    return caught.value


@as_root
@pytest.mark.parametrize("variable", ["PACELINE_JOB_ID", "PACELINE_SECRET"])
@ranks(2, group=None)
def test_a_secret_changes_the_name(rank, variable):
    """With a secret, a squatter cannot compute the name from the address and the user."""
    if variable == "PACELINE_SECRET":
        del os.environ["PACELINE_JOB_ID"]
        os.environ[variable] = "correct horse battery staple"
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(squatter(hub_address(address(), "world"), UNKNOWN_PEER))
        with paceline.init(address=address(), timeout_s=120) as group:
            group.barrier()


@as_root
@ranks(2, group=None)
def test_another_user_is_named_on_every_rank(rank):
    """The launcher gave no secret. Rank 1 finds the name taken, or waits for rank 0."""
    del os.environ["PACELINE_JOB_ID"]
    path = f"{os.environ['TMPDIR']}/raised"
    if rank == 0:
        with squatter(hub_address(address(), "world"), UNKNOWN_PEER) as pid:
            error = form_and_fail(rank)
            assert "Rank 0 of 2 can't open the rendezvous address" in str(error)
            assert f"held by a process of another user (uid {UNKNOWN_PEER}, pid {pid})" in error.seen
            assert "PACELINE_JOB_ID=" in error.hint
            os.mkfifo(path)
            with open(path):  # until rank 1 has raised too
                os.unlink(path)
    else:
        error = form_and_fail(rank)
        assert "Rank 1 of 2 met a process of another user at the rendezvous address" in str(error)
        assert f"of uid {UNKNOWN_PEER}" in error.got
        assert "PACELINE_JOB_ID=" in error.hint
        assert error.missing == (0,)
        deadline = time.monotonic() + 30
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        with open(path, "w"):
            pass


@pytest.mark.parametrize("listens", [True, False])
def test_a_process_of_this_user_is_named(listens, monkeypatch):
    monkeypatch.delenv("PACELINE_JOB_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    own = (
        f"127.0.0.{os.getpid() % 250 + 1}:{os.getpid() % 65535 + 1}"  # tests that run beside this have others
    )
    with (
        squatter(hub_address(own, "world"), os.getuid(), listens=listens) as pid,
        pytest.raises(RendezvousError) as caught,
    ):
        paceline.init(rank=0, world_size=2, address=own, timeout_s=120)
    if listens:
        assert f"held by pid {pid} of this user" in caught.value.seen
        assert "another process with rank 0" in caught.value.likely
    else:
        assert "held by a process that lets nobody connect (Connection refused)" in caught.value.seen
        assert "PACELINE_JOB_ID=" in caught.value.hint
