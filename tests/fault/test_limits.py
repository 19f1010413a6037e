"""Limits of one rank or the launcher: all errors name the limit, rank and cure, or the job works."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paceline
from paceline.errors import PacelineError, RegionError
from tests.harness import run_ranks, seccomp

needs_seccomp = pytest.mark.skipif(not seccomp.is_supported(), reason="numbers of system calls unknown")
PATIENT_S = 60  # no rank waits for it if all notice at once
TIMEOUT_S = 8


def form(rank, job_id, timeout_s=PATIENT_S):
    """The error of forming a group of two, as text, or "" if it works; and the time that it took."""
    started = time.monotonic()
    try:
        with paceline.init(rank=rank, world_size=2, job_id=job_id, timeout_s=timeout_s) as group:
            group.barrier()
    except PacelineError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def form_without_memfd(rank, who, error):
    if rank == who:
        seccomp.refuse("memfd_create", error)
    return form(rank, os.environ["PACELINE_JOB_ID"])


@needs_seccomp
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM])
def test_without_memfd_create_all_ranks_are_reported(error):
    for text, waited_s in run_ranks(form_without_memfd, 2, {"who": 0, "error": error}, group=None):
        assert "Rank 0 could not take the shared memory" in text
        assert f"memfd_create: {os.strerror(error)}" in text
        assert "seccomp" in text
        assert 'reduce_through="group"' in text
        assert waited_s < PATIENT_S / 2


@needs_seccomp
def test_a_rank_that_makes_no_region_needs_no_memfd():
    answers = run_ranks(form_without_memfd, 2, {"who": 1, "error": errno.ENOSYS}, group=None)
    assert [text for text, _ in answers] == ["", ""]


def limit_this_process(limit, number):
    resource.setrlimit(limit, (number, resource.getrlimit(limit)[1]))


def form_with_short_files(rank):
    if rank == 0:
        limit_this_process(resource.RLIMIT_FSIZE, 1 << 20)
    return form(rank, os.environ["PACELINE_JOB_ID"])


def test_a_limit_of_file_sizes():
    for text, waited_s in run_ranks(form_with_short_files, 2, group=None):
        assert "Rank 0 could not take the shared memory" in text
        assert "File too large" in text
        assert f"no file of this process may be longer than {1 << 20} bytes" in text
        assert "on rank 0: `ulimit -f unlimited`" in text
        assert waited_s < PATIENT_S / 2


def form_with_few_addresses(rank, who):
    if rank == who:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit_this_process(resource.RLIMIT_AS, pages * resource.getpagesize() + (256 << 20))
    return form(rank, os.environ["PACELINE_JOB_ID"])


@pytest.mark.parametrize("who", [0, 1])
def test_a_limit_of_addresses(who):
    for text, waited_s in run_ranks(form_with_few_addresses, 2, {"who": who}, group=None):
        assert f"Rank {who} could not take the shared memory" in text
        assert "mapping the shared region: Cannot allocate memory" in text
        assert "bytes of addresses, and shared memory is mapped with room to grow" in text
        assert f"on rank {who}: `ulimit -v unlimited`" in text
        assert waited_s < PATIENT_S / 2


def form_without_threads(rank, who, addresses):
    if rank == who:
        limit_this_process(resource.RLIMIT_AS, addresses)
        seccomp.refuse("clone3", errno.EAGAIN)
    return form(rank, os.environ["PACELINE_JOB_ID"])


@needs_seccomp
@pytest.mark.parametrize("addresses", [1 << 46, resource.RLIM_INFINITY])
@pytest.mark.parametrize("who", [0, 1])
def test_no_threads_left(who, addresses):
    """No Python thread can start on rank 0, which hands out the region; on rank 1, no thread of the core."""
    facts = {"who": who, "addresses": addresses}
    thread = ("The thread 'paceline-server' could not be started", "The core could not start a thread")[who]
    for text, waited_s in run_ranks(form_without_threads, 2, facts, group=None):
        assert f"Rank {who} could not take the shared memory" in text
        assert thread in text
        if addresses == resource.RLIM_INFINITY:
            assert "as many processes and threads as it may" in text
            assert f"on rank {who}: `ulimit -u` shows" in text
        else:
            assert f"this process may use {addresses} bytes of addresses, and each thread needs some" in text
            assert f"on rank {who}: `ulimit -v unlimited`" in text
        assert waited_s < PATIENT_S / 2


def take_all_descriptors():
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    return taken


def form_with_few_descriptors(group, who):
    """Forms a group again and again; rank `who` has one more descriptor each time, from none."""
    job_id = os.environ["PACELINE_JOB_ID"]
    answers = []
    if group.rank == who:
        limit_this_process(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 20)
    for free in range(7):
        taken = take_all_descriptors() if group.rank == who else []
        for _ in taken[:free]:
            os.close(taken.pop())
        answers.append(form(group.rank, f"{job_id}-{free}", TIMEOUT_S))
        for fd in taken:
            os.close(fd)
        group.barrier()  # the next attempt begins on both
    return answers


@pytest.mark.parametrize("who", [0, 1])
def test_no_descriptors_left(who):
    answers = run_ranks(form_with_few_descriptors, 2, {"who": who}, deadline_s=240)
    limited, other = answers[who], answers[1 - who]
    assert limited[0][0], "with no descriptor at all there can be no group"
    assert not limited[-1][0], "with a handful there is one"
    for (text, waited_s), (theirs, they_waited_s) in zip(limited, other, strict=True):
        assert bool(text) == bool(theirs)
        assert max(waited_s, they_waited_s) < TIMEOUT_S + 20
        if text:
            assert "the limit of open files and sockets of this process" in text
            assert f"rank {who}" in text.lower()
            assert f"rank {who}" in theirs.lower() or "Rank 1 of 2 did not" in theirs, theirs


def wrap_without_memfd(rank):
    import torch
    import torch.distributed as dist

    from paceline.torch import DistributedDataParallel

    seccomp.refuse("memfd_create")
    store = f"file://{os.environ['TMPDIR']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with pytest.raises(RegionError, match='reduce_through="group"'):
        DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), reduce_through="group")
    model(torch.full((1, 2), float(rank))).sum().backward()
    dist.destroy_process_group()
    return model.module.weight.grad.tolist()


@needs_seccomp
def test_a_model_is_wrapped_over_the_group_where_there_is_no_memfd():
    """The cure that the error names works."""
    assert run_ranks(wrap_without_memfd, 2, group=None) == [[[0.5, 0.5]]] * 2


SPAWN = """
import paceline

def run(rank):
    print("rank", rank, flush=True)

if __name__ == "__main__":
    paceline.spawn(run, nprocs=2)
"""


def launch(tmp_path, how, prepare):
    """Run two ranks that print their numbers, from a launcher that `prepare` has limited."""
    script = tmp_path / "script.py"
    if how == "spawn":
        script.write_text(SPAWN)
        command = [sys.executable, str(script)]
    else:
        script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
        command = [sys.executable, "-m", "paceline", "run", "-n", "2", str(script)]
    return subprocess.run(command, preexec_fn=prepare, capture_output=True, text=True, timeout=120)


@needs_seccomp
@pytest.mark.parametrize("how", ["run", "spawn"])
def test_launchers_need_no_memfd(tmp_path, how):
    done = launch(tmp_path, how, lambda: seccomp.refuse("memfd_create"))
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout
    assert "rank 1" in done.stdout


def lower(limit, number):
    return lambda: resource.setrlimit(limit, (number, number))


@pytest.mark.parametrize("how", ["run", "spawn"])
def test_launchers_say_how_many_descriptors_they_need(tmp_path, how):
    done = launch(tmp_path, how, lower(resource.RLIMIT_NOFILE, 16))
    assert done.returncode != 0
    assert "may not open as many files as it needs for 2 ranks" in done.stderr
    assert "got      16" in done.stderr
    needed = int(done.stderr.partition("`ulimit -n ")[2].partition("`")[0])
    assert launch(tmp_path, how, lower(resource.RLIMIT_NOFILE, needed)).returncode == 0


def test_spawn_names_the_limit_of_file_sizes(tmp_path):
    done = launch(tmp_path, "spawn", lower(resource.RLIMIT_FSIZE, 100))
    assert done.returncode != 0
    assert "no file of this process may be longer than 100 bytes" in done.stderr
    assert "`ulimit -f unlimited`" in done.stderr
