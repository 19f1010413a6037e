"""The jobs and the runner of benchmarks, with workers that answer, raise, die and hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.job import CaseFailed, Job
from benchmarks.runner import Case, Runner, Settings

OBEDIENT = "tests.multiprocess.benchmark_worker:Obedient"


def job_of(**options: object) -> Job:
    return Job("worker", OBEDIENT, 2, options=options)


def assert_all_gone(job: Job) -> None:
    for pid in job.pids:
        assert not Path(f"/proc/{pid}").exists()


def test_results_come_by_rank_and_nothing_is_left():
    with job_of() as job:
        job.start()
        assert job.call("double", number=5) == [10, 11]
        assert job.call("double", number=6) == [12, 13]
    assert_all_gone(job)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "rank 1 raised ValueError: no good"),
        ("exit", "rank 1 ended with exit code 3"),
        ("kill", "rank 1 was ended by SIGKILL"),
        ("hang", "rank 1 took longer than 2 s"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_reported(how, why):
    with job_of(bad=1) as job:
        job.start()
        start = time.monotonic()
        with pytest.raises(CaseFailed, match=why):
            job.call("misbehave", how=how, limit_s=2.0 if how == "hang" else 60.0)
        assert time.monotonic() - start < 30
        with pytest.raises(CaseFailed, match=why):
            job.call("double", number=1)
    assert_all_gone(job)


def test_a_job_that_can_not_start_tells_why():
    job = Job("worker", "tests.multiprocess.benchmark_worker:Missing", 2)
    with job, pytest.raises(CaseFailed, match="has no attribute 'Missing'"):
        job.start()
    assert_all_gone(job)


def test_survivors_answer_after_a_kill():
    with job_of() as job:
        job.start()
        job.kill(1)
        job.send("double", number=1)
        answers = job.collect(60.0)
    assert answers[0] == {"result": 2}
    assert "SIGKILL" in answers[1]["error"]


def test_a_case_that_fails_leaves_and_the_others_go_on():
    cases = [
        Case("paceline_x", "Good", OBEDIENT),
        Case("gloo", "Bad", OBEDIENT, {"bad": 0}),
        Case("mpi", "Absent", OBEDIENT, missing=lambda: "it is not here"),
    ]
    with Runner(Settings(tuple(cases), 2, 3)) as runner:
        runner.on_all("prepare", "4 B", nbytes=4)
        timings = runner.measure("4 B", sample_s=0.02)
    assert list(timings) == ["paceline_x"]
    assert timings["paceline_x"].iterations == 20
    assert timings["paceline_x"].samples == [[pytest.approx(0.001)] * 3] * 2
    assert runner.absent == {"Absent": "it is not here"}
    assert "raised ArithmeticError: wrong answer" in runner.failures["Bad"]
    assert runner.is_complete


def test_a_case_may_have_its_own_number_of_processes():
    cases = [Case("one", "One", OBEDIENT, processes=1), Case("paceline_x", "Good", OBEDIENT)]
    with Runner(Settings(tuple(cases), 2, 2)) as runner:
        runner.prepare("4 B", nbytes=4)
        timings = runner.measure("4 B", sample_s=0.02)
    assert [len(timings[key].samples) for key in ("one", "paceline_x")] == [1, 2]


def test_all_processes_are_started_anew_and_prepared_for_a_part_of_the_rounds():
    pids = []
    settings = Settings((Case("paceline_x", "Good", OBEDIENT),), 2, 6, starts=3)
    with Runner(settings) as runner:
        (only,) = runner.running
        restart = only.restart
        only.restart = lambda: (pids.append(only.job.pids), restart())
        runner.prepare("4 B", nbytes=4)
        timing = runner.measure("4 B", sample_s=0.02)["paceline_x"]
        pids.append(only.job.pids)
    assert timing.starts == 3
    assert timing.samples == [[pytest.approx(0.001)] * 6] * 2
    assert len({pid for each in pids for pid in each}) == 6
    assert runner.is_complete
