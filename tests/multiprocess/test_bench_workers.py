"""The bench's conductor against workers that obey, raise, die and hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.bench.conductor import ContenderFailed, Job
from paceline.bench.contest import Contest, Entry

OBEDIENT = "tests.multiprocess.bench_subjects:Obedient"


def job_of(**options: object) -> Job:
    return Job("subject", OBEDIENT, 2, options=options)


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
def test_what_goes_wrong_on_one_rank_is_told(how, why):
    with job_of(bad=1) as job:
        job.start()
        start = time.monotonic()
        with pytest.raises(ContenderFailed, match=why):
            job.call("misbehave", how=how, limit_s=2.0 if how == "hang" else 60.0)
        assert time.monotonic() - start < 30
        assert job.is_over
        with pytest.raises(ContenderFailed, match=why):
            job.call("double", number=1)
    assert_all_gone(job)


def test_a_job_that_can_not_start_tells_why():
    job = Job("subject", "tests.multiprocess.bench_subjects:Missing", 2)
    with job, pytest.raises(ContenderFailed, match="has no attribute 'Missing'"):
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


def test_a_contender_that_fails_leaves_and_the_others_go_on():
    said: list[str] = []
    entries = [
        Entry("paceline_x", "Good", OBEDIENT),
        Entry("gloo", "Bad", OBEDIENT, {"bad": 0}),
        Entry("mpi", "Absent", OBEDIENT, missing=lambda: "it is not here"),
    ]
    with Contest(entries, 2, said.append) as contest:
        contest.on_all("prepare", "4 B", nbytes=4)
        timings = contest.measure("4 B", rounds=3, sample_s=0.02)
    assert list(timings) == ["paceline_x"]
    assert timings["paceline_x"].iterations == 20
    assert timings["paceline_x"].samples == [[pytest.approx(0.001)] * 3] * 2
    assert contest.absent == {"Absent": "it is not here"}
    assert "raised ArithmeticError: wrong answer" in contest.failures["Bad"]
    assert not contest.ours_failed


def test_a_contender_may_have_its_own_number_of_processes():
    entries = [Entry("one", "One", OBEDIENT, processes=1), Entry("paceline_x", "Good", OBEDIENT)]
    with Contest(entries, 2, lambda line: None) as contest:
        contest.prepare("4 B", nbytes=4)
        timings = contest.measure("4 B", rounds=2, sample_s=0.02)
    assert [len(timings[key].samples) for key in ("one", "paceline_x")] == [1, 2]


def test_all_processes_are_started_anew_and_prepared_for_a_part_of_the_rounds():
    pids = []
    with Contest([Entry("paceline_x", "Good", OBEDIENT)], 2, lambda line: None, starts=3) as contest:
        (only,) = contest.contenders
        start_anew = only.start_anew
        only.start_anew = lambda: (pids.append(only.job.pids), start_anew())
        contest.prepare("4 B", nbytes=4)
        timing = contest.measure("4 B", rounds=6, sample_s=0.02)["paceline_x"]
        pids.append(only.job.pids)
    assert timing.starts == 3
    assert timing.samples == [[pytest.approx(0.001)] * 6] * 2
    assert len({pid for each in pids for pid in each}) == 6
    assert not contest.ours_failed
