"""The harness must see failures that torch's own misses. Each test here is a run that must not pass."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections import UserDict
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PeerLostError
from tests.harness import (
    RanksFailed,
    needs_paddle,
    ranks,
    run_ranks,
    run_side_by_side,
    server,
    shared_servers,
)
from tests.harness.rank_main import die_with
from tests.harness.report import Cause
from tests.harness.run import end_kept_ranks, inherited_variables
from tests.unit import harness_programs as programs


def test_all_forks_that_share_a_lifeline_die_with_it():
    theirs, ours = os.pipe()
    ready, started = os.pipe()
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ours)
                die_with(theirs)
                os.write(started, b"!")
                time.sleep(100)
            finally:
                os._exit(0)
        pids.append(pid)
    for _ in pids:
        os.read(ready, 1)
    os.close(ours)
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    for fd in (theirs, ready, started):
        os.close(fd)


def run(program, world_size, kwargs=None, **options):
    return run_ranks(program, world_size, kwargs, group=None, **options)


def fails(program, world_size, kwargs=None, **options) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run(program, world_size, kwargs, **options)
    return caught.value


def test_results_come_back_by_rank():
    assert run(programs.square, 4, {"offset": 10}) == [10, 11, 14, 19]


def test_large_results_come_back():
    assert [len(result) for result in run(programs.large, 2)] == [10_000_000] * 2


def test_environment_is_that_of_a_launcher(monkeypatch):
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    first, second = run(programs.environment, 2)
    assert [env["RANK"] for env in (first, second)] == ["0", "1"]
    assert [env["LOCAL_RANK"] for env in (first, second)] == ["0", "1"]
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        assert first[name] == second[name] == "2"
    for name in ("MASTER_ADDR", "MASTER_PORT", "PACELINE_JOB_ID", "TMPDIR"):
        assert first[name] == second[name] != ""
    assert first["OMP_NUM_THREADS"] == "1"
    assert first["SET_BY_THE_TEST"] == "yes"


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_ranks_start_with_one_framework_imported(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    assert run(programs.frameworks, 1, framework=framework) == [[framework]]


@needs_paddle
def test_ranks_of_a_framework_that_cannot_be_forked_import_it_themselves(monkeypatch):
    monkeypatch.setattr(server, "can_fork", lambda framework: False)
    assert run(programs.frameworks, 1, framework="paddle") == [[]]
    assert run(programs.import_paddle, 2, framework="paddle") == ["cpu", "cpu"]


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_ranks_start_with_the_files_of_their_tests_imported(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    (names,) = run(programs.files_imported_before, 1, framework=framework)
    of_torch, of_paddle = "tests.multiprocess.test_ddp_means", "tests.multiprocess.test_paddle_means"
    assert (of_torch in names, of_paddle in names) == (framework == "torch", framework == "paddle")
    assert "tests.multiprocess.test_conformance" in names


def test_two_runs_are_two_jobs():
    one, two = (run(programs.environment, 1)[0]["PACELINE_JOB_ID"] for _ in range(2))
    assert one != two


def test_runs_side_by_side_overlap(tmp_path):
    runs = {
        own: partial(run, programs.meet_another_run, 1, {"folder": str(tmp_path), "own": own, "other": other})
        for own, other in (("one", "two"), ("two", "one"))
    }
    with run_side_by_side(runs) as results:
        assert {name: result.result() for name, result in results.items()} == {"one": ["one"], "two": ["two"]}


class Vanishing(UserDict):
    """Variables of which another thread deletes one, after their names have been listed."""

    def __iter__(self):
        names = list(self.data)
        self.data.pop("GONE", None)
        return iter(names)


def test_a_run_begins_while_variables_are_deleted(monkeypatch):
    monkeypatch.setattr(os, "environ", Vanishing({"STAYS": "yes", "GONE": "soon", "SLURM_JOB_ID": "1"}))
    assert inherited_variables() == {"STAYS": "yes"}


def test_of_runs_side_by_side_each_is_judged():
    runs = {
        "fails": partial(run, programs.fail_on_last, 3, {"world_size": 3}),
        "warns": partial(run, programs.warn, 1),
        "passes": partial(run, programs.square, 3),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with run_side_by_side(runs, at_once=1) as results:
            warnings.simplefilter("ignore")  # as pytest has between two tests
            assert results["passes"].result() == [0, 1, 4]
            for name, rank, raised in (("fails", 2, "AssertionError"), ("warns", 0, "DeprecationWarning")):
                with pytest.raises(RanksFailed, match=raised) as caught:
                    results[name].result()
                assert [failure.rank for failure in caught.value.failures] == [rank]


def test_a_raising_rank_is_reported_with_traceback_locals_and_output():
    error = fails(programs.fail_on_last, 4, {"world_size": 4})
    (failure,) = error.failures
    assert (failure.rank, failure.cause) == (3, Cause.RAISED)
    report = str(error)
    assert "fail_on_last: 1 of 4 ranks failed\n  rank 3 raised AssertionError" in report
    assert "assert answer == 42" in report
    assert "answer = 44" in report
    assert "about to fail" in report


# torch.testing's multi-process harness passes when rank 3 of 4 is killed.
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_reported_whichever_it_is(victim):
    error = fails(programs.kill_myself, 4, {"victim": victim, "signum": signal.SIGKILL})
    (failure,) = error.failures
    assert (failure.rank, failure.cause) == (victim, Cause.DIED)
    assert failure.summary == "was killed by SIGKILL"


def test_a_crashed_rank_shows_its_stack():
    error = fails(programs.kill_myself, 2, {"victim": 1, "signum": signal.SIGSEGV})
    assert error.failures[0].summary == "was killed by SIGSEGV"
    assert "in kill_myself" in str(error)


def test_a_declared_death_is_fine():
    results = run(programs.kill_myself, 3, {"victim": 2, "signum": signal.SIGKILL}, dies={2: signal.SIGKILL})
    assert results == [None, None, None]
    run(programs.exit_with, 2, {"status": 7}, dies={1: 7})
    run(programs.raise_value_error, 2, dies={0: ValueError, 1: ValueError})


@pytest.mark.parametrize(
    "program, kwargs, death, got",
    [
        ("square", {}, signal.SIGKILL, "returned, but SIGKILL was expected"),
        ("square", {}, ValueError, "returned, but ValueError was expected"),
        ("exit_with", {"status": 7}, 8, "exited with status 7, but exit status 8 was expected"),
        (
            "kill_myself",
            {"victim": 1, "signum": signal.SIGTERM},
            signal.SIGKILL,
            "was killed by SIGTERM, but SIGKILL was expected",
        ),
        ("leave_early", {}, signal.SIGKILL, "exited with status 0, but SIGKILL was expected"),
    ],
)
def test_a_declared_death_must_happen_as_declared(program, kwargs, death, got):
    error = fails(getattr(programs, program), 2, kwargs, dies={1: death})
    assert [(f.rank, f.summary) for f in error.failures] == [(1, got)]


def test_leaving_before_the_end_is_a_failure_even_with_status_zero():
    error = fails(programs.leave_early, 2)
    assert [(f.rank, f.summary) for f in error.failures] == [
        (1, "exited with status 0 before its program returned")
    ]


@pytest.mark.parametrize(
    "program, raised",
    [
        (programs.system_exit, "SystemExit"),
        (programs.skip, "Skipped"),
        (programs.warn, "DeprecationWarning"),
        (programs.unpicklable, "AttributeError"),
    ],
)
def test_nothing_but_returning_counts_as_success(program, raised):
    error = fails(program, 2)
    assert {f.rank for f in error.failures} == {0, 1}
    assert all(f.summary.startswith("raised ") for f in error.failures)
    assert raised in str(error) or "Pickl" in str(error)


def test_a_hanging_rank_is_reported_with_its_stack():
    error = fails(programs.hang_on_one, 2, deadline_s=5)
    (failure,) = error.failures
    assert (failure.rank, failure.cause) == (1, Cause.HUNG)
    assert failure.summary == "was still running after 5 s"
    assert "in the_line_where_it_hangs" in failure.log


def test_a_stopped_rank_is_reported_as_stopped():
    error = fails(programs.stop_on_one, 2, deadline_s=3)
    assert [f.summary for f in error.failures] == ["was still running after 3 s, stopped by a signal"]


def test_the_culprit_comes_before_the_peers_that_wait_for_it(monkeypatch):
    monkeypatch.setattr("tests.harness.run._GRACE_S", 1.0)
    error = fails(programs.wait_for_a_failed_peer, 3)
    assert [(f.rank, f.summary) for f in error.failures] == [
        (0, "raised RuntimeError"),
        (1, "was still running 1 s after rank 0 had failed"),
        (2, "was still running 1 s after rank 0 had failed"),
    ]
    assert "wait_for_a_failed_peer" in error.failures[1].log


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("tests.harness.leftovers._PATIENCE_S", 0.2)


def test_a_name_left_in_dev_shm_is_a_failure(impatient):
    name = f"left-{uuid.uuid4().hex}"
    try:
        error = fails(programs.leave_shared_memory, 2, {"name": name})
    finally:
        Path("/dev/shm", name).unlink()
    assert f"/dev/shm/{name}" in error.leftovers
    assert "every rank was fine, but something was left behind" in str(error)


def test_a_process_left_running_is_a_failure_and_is_ended(impatient):
    error = fails(programs.leave_process, 2)
    (leftover,) = (each for each in error.leftovers if each.startswith("process"))
    assert leftover.endswith("started by rank 1")
    pid = int(leftover.split()[1].rstrip(","))
    assert wait_until(lambda: is_gone(pid))


def test_a_socket_left_in_the_temporary_folder_is_a_failure():
    assert fails(programs.leave_socket, 2).leftovers == ["$TMPDIR/paceline-left"]


@pytest.fixture
def run_kept():
    """Runs programs in ranks that are kept, until the end of the test."""
    yield partial(run_ranks, group=None, kept=True)
    end_kept_ranks()


def test_kept_ranks_run_each_program_as_if_it_were_the_first(run_kept, monkeypatch):
    first = run_kept(programs.change_process, 2, {"monkeypatch": monkeypatch})
    second = run_kept(programs.change_process, 3, {"monkeypatch": monkeypatch})
    pids, jobs, numbers = zip(*first, *second, strict=True)
    assert pids[:2] == pids[2:4] and len(set(pids)) == 3
    assert len(set(jobs)) == 2
    assert len(set(numbers)) == 1


def test_a_failure_in_kept_ranks_names_their_earlier_programs_and_is_their_last(run_kept, monkeypatch):
    (before, _, _), *_ = run_kept(programs.change_process, 2, {"monkeypatch": monkeypatch})
    error = fails(programs.fail_on_last, 3, {"world_size": 3}, kept=True)
    assert [(f.rank, f.summary) for f in error.failures] == [(2, "raised AssertionError")]
    assert "about to fail" in error.failures[0].log
    assert f"had run before, the latest last: {name_of_test()}" in str(error)
    (after, _, _), *_ = run_kept(programs.change_process, 2, {"monkeypatch": monkeypatch})
    assert after != before and is_gone(before)


def name_of_test() -> str:
    return os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split()[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_kept_rank_that_dies_is_reported(run_kept, signum):
    run_kept(programs.square, 2)
    error = fails(programs.kill_myself, 2, {"victim": 1, "signum": signum}, kept=True)
    assert [(f.rank, f.summary) for f in error.failures] == [(1, f"was killed by {signum.name}")]
    assert run_kept(programs.square, 2) == [0, 1]


def test_kept_ranks_that_are_used_up_end_with_their_program(run_kept):
    pids = run_kept(programs.use_up_process, 2)
    assert all(is_gone(pid) for pid in pids)
    assert not set(run_kept(programs.use_up_process, 2)) & set(pids)


def test_what_kept_ranks_have_left_is_found_when_they_end(impatient):
    name = f"left-{uuid.uuid4().hex}"
    try:
        run_ranks(programs.leave_shared_memory, 2, {"name": name}, group=None, kept=True)
        run_ranks(programs.leave_socket, 2, group=None, kept=True)
        with pytest.raises(RanksFailed, match="something was left behind") as caught:
            end_kept_ranks()
    finally:
        Path("/dev/shm", name).unlink()
    assert caught.value.leftovers == [f"/dev/shm/{name}", "$TMPDIR/paceline-left"]


def test_a_rank_that_is_to_die_is_not_kept():
    with pytest.raises(TypeError, match="is not kept"):
        run_ranks(programs.square, 2, dies={0: signal.SIGKILL}, kept=True)


def test_ranks_die_with_the_parent(tmp_path):
    script = (
        "from tests.harness import run_ranks\n"
        "from tests.unit.harness_programs import report_pid_and_sleep\n"
        f"run_ranks(report_pid_and_sleep, 2, {{'folder': {str(tmp_path)!r}}}, group=None)\n"
    )
    root = Path(__file__).resolve().parents[2]
    environ = os.environ | {"TMPDIR": str(tmp_path)}  # killed, it leaves its folder
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=root, env=environ)
    try:
        files = [tmp_path / "0.pid", tmp_path / "1.pid"]
        assert wait_until(lambda: all(file.exists() for file in files))
    finally:
        parent.kill()
        parent.wait()
    pids = [int(file.read_text()) for file in files]
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))


_ASK_FOR_THE_SERVER = """
from tests.harness import run_ranks
from tests.unit.harness_programs import pid_of_the_server
print(*run_ranks(pid_of_the_server, 1, group=None, framework="numpy"))
"""


def pid_of_the_server_of_another_process(environ: dict[str, str]) -> int:
    command = [sys.executable, "-c", _ASK_FOR_THE_SERVER]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environ, stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 0
    return int(done.stdout)


def test_processes_of_one_run_share_a_server():
    (pid,) = run(programs.pid_of_the_server, 1, framework="numpy")
    assert pid_of_the_server_of_another_process(dict(os.environ)) == pid


def test_what_a_server_prints_can_be_read():
    """A framework may print while it is imported; an import fails if no process reads its output."""
    ((stdout, stderr),) = run(programs.outputs_of_the_server, 1, framework="numpy")
    assert stdout == stderr


def test_servers_end_with_the_run():
    environ = {name: value for name, value in os.environ.items() if name != shared_servers.ADDRESS}
    pid = pid_of_the_server_of_another_process(environ)
    (ours,) = run(programs.pid_of_the_server, 1, framework="numpy")
    assert pid != ours
    assert wait_until(lambda: is_gone(pid))


def test_a_local_function_is_refused():
    with pytest.raises(TypeError, match="function of a module"):
        run(lambda rank: rank, 2)


def wait_until(holds, timeout_s=240.0) -> bool:
    until = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# The decorator, used as tests use it.


@ranks(2, group=None)
def test_body_is_one_rank(rank):
    assert int(os.environ["RANK"]) == rank


@ranks(2, group=None)
@pytest.mark.parametrize("a, b", [(1, 2), (3, 4)])
def test_parameters_and_fixtures_reach_every_rank(rank, a, b, tmp_path):
    assert b == a + 1
    assert tmp_path.is_dir()


@ranks("world_size", group=None)
@pytest.mark.parametrize("world_size", [1, 3])
def test_world_size_from_a_parameter(rank, world_size):
    assert int(os.environ["WORLD_SIZE"]) == world_size


@ranks(2, group=None, dies={1: signal.SIGKILL})
def test_declared_death(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@ranks(2, group="gloo")
def test_torch_distributed_is_initialised(rank):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    assert torch.get_num_threads() == 1


def test_a_failure_under_the_decorator_shows_the_ranks_only(pytester_run):
    result = pytester_run(
        """
        from tests.harness import ranks

        @ranks(2, group=None)
        def test_wrong(rank):
            assert rank == 0
        """
    )
    assert "1 failed" in result
    assert "rank 1 raised AssertionError" in result
    assert "rank = 1" in result
    assert "run_ranks" not in result


@pytest.fixture
def pytester_run(tmp_path):
    def run_pytest(source: str) -> str:
        import textwrap

        (tmp_path / "test_generated.py").write_text(textwrap.dedent(source))
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        environ = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
        ended = subprocess.run(
            [*command, str(tmp_path)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300
        )
        return ended.stdout + ended.stderr

    return run_pytest


# With a group, which is what most tests use.


@ranks(4)
@pytest.mark.parametrize("count", [1, 1000])
def test_the_group_spans_all_ranks(group, count):
    assert (group.rank, group.world_size) == (int(os.environ["RANK"]), 4)
    array = np.full(count, group.rank + 1.0)
    group.all_reduce(array)
    np.testing.assert_array_equal(array, np.full(count, 10.0))


@ranks(3, dies={1: signal.SIGKILL})
def test_survivors_of_a_declared_death_learn_of_it(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    assert caught.value.lost == (1,)


@ranks(2, dies={0: ValueError})
def test_a_declared_exception_reaches_the_peers(group):
    if group.rank == 0:
        raise ValueError("declared")
    with pytest.raises(PeerLostError):
        group.barrier()


def test_a_tracker_that_was_killed_fails_no_test():
    run(rank_itself, 1)
    pid = resource_tracker._resource_tracker._pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run(rank_itself, 1) == [0]
    assert resource_tracker._resource_tracker._pid != pid


def rank_itself(rank):
    return rank


def test_a_descriptor_that_another_owner_has_closed_is_reported(monkeypatch, tmp_path):
    run(rank_itself, 1)
    with (tmp_path / "another").open("w") as file:
        monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", file.fileno())
        with pytest.raises(RuntimeError, match=f"has closed descriptor {file.fileno()}"):
            run(rank_itself, 1)
