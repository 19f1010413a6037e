"""Groups in interpreters that run from start to finalization: how an exit ends a group.

The harness ends its ranks without finalizing the interpreter; these tests run the finalization.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

_ROOT = str(Path(__file__).resolve().parents[2])


def run_scripts(script, world_size=2, timeout_s=240):
    """Runs `script` in `world_size` interpreters. Returns each one's (exit status, output)."""
    start = "import sys, numpy as np, paceline\ngroup = paceline.init(timeout_s=120)\nrank = group.rank\n"
    environ = os.environ | {"PACELINE_JOB_ID": uuid.uuid4().hex, "WORLD_SIZE": str(world_size)}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # the job id is the rendezvous address
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))
    processes = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", start + textwrap.dedent(script)],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        return [(process.wait(timeout_s), process.stdout.read()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.stdout.close()


def test_an_exit_without_close_is_silent():
    script = """
        array = group.allocate(1000)
        group.all_reduce(array)
        inner = group.subgroup([1, 0])
        inner.barrier()
        reducer = paceline._core.Reducer(group._core, 64, [0], [16], [0], [(0, 64)])
        transfer = group.send(array, 1 - rank, async_op=True)
        group.barrier()
    """
    assert run_scripts(script) == [(0, ""), (0, "")]


@pytest.mark.parametrize("repeat", range(3))
def test_an_exit_in_the_middle_of_an_asynchronous_call(repeat):
    """The call's thread must not use a finalized interpreter."""
    script = """
        array = np.ones(10)
        if rank == 0:
            work = group.all_reduce(array, async_op=True)
            group.recv(np.zeros(1), 1)
        else:
            group.send(np.zeros(1), 0)
            try:
                group.recv(np.zeros(1), 0)
            except paceline.errors.PeerLostError as error:
                print(error.summary)
    """
    first, second = run_scripts(script)
    assert first == (0, "")
    assert second == (0, "Rank 0 of 2 left the group while rank 1 waited for it.\n")


def test_an_uncaught_exception_is_reported_to_the_others():
    script = """
        if rank == 1:
            raise FileNotFoundError("no such shard: 17")
        try:
            group.all_reduce(np.ones(3))
        except paceline.errors.PeerLostError as error:
            print(error)
            assert error.lost == (1,)
    """
    first, second = run_scripts(script)
    assert first[0] == 0 and "FileNotFoundError: no such shard: 17" in first[1]
    assert second[0] == 1 and second[1].endswith("FileNotFoundError: no such shard: 17\n")


def test_an_uncaught_loss_ends_all_ranks():
    script = """
        group.barrier()
        if rank == 1:
            import os
            os.kill(os.getpid(), 9)
        group.all_reduce(np.ones(3))
    """
    results = run_scripts(script, 3)
    assert [status for status, _ in results] == [1, -9, 1]
    for _, printed in (results[0], results[2]):
        assert "Rank 1 of 3 died." in printed


def test_a_forked_child_exits_silently():
    """The child finalizes its interpreter, too, with the group's objects in it."""
    script = """
        import os, warnings
        warnings.simplefilter("ignore")
        array = group.allocate(10)
        work = group.all_reduce(array, async_op=True) if rank == 0 else None
        child = os.fork()
        if child == 0:
            del array, work
            if rank == 1:
                group = None
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        if work:
            work.wait()
        else:
            group.all_reduce(array)
        group.barrier()
    """
    assert run_scripts(script) == [(0, ""), (0, "")]


def test_torch_style_multiprocessing_children():
    """A forked multiprocessing child, like a DataLoader's worker, can neither use nor disturb the group."""
    script = """
        import multiprocessing, warnings
        warnings.simplefilter("ignore")

        def work(queue):
            try:
                group.barrier()
            except paceline.errors.ForkedError as error:
                queue.put(type(error).__name__)

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        worker = context.Process(target=work, args=(queue,))
        worker.start()
        assert queue.get(timeout=120) == "ForkedError"
        worker.join()
        assert worker.exitcode == 0
        group.barrier()
    """
    assert run_scripts(script) == [(0, ""), (0, "")]
