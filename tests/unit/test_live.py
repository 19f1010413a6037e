"""The present state of a job, from its newest records: windows, the ranks' files, and top's display."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

import paceline
from paceline.errors import ConfigError
from paceline.monitor import top
from paceline.monitor.snapshot import RankWindow, snapshot
from paceline.monitor.watch import MOST_RECORDS, WINDOW_NS, JobWatch, RingTail, as_plain, find_running
from paceline.trace import jobs, ring_file
from paceline.trace.batch_size import samples_in
from paceline.trace.recording import MOST_NAMES, Recording, recording
from paceline.trace.records import Event, Record, backward_id, bits_float, float_bits
from paceline.trace.ring_file import FOLDER_VARIABLE, RankHeader

MS = 1_000_000


def header(rank: int, pid: int = 1) -> RankHeader:
    return RankHeader(rank, 2, pid, "host", "boot", 0, 0, 1024)


def record(ms: float, event: Event, first: int = 0, second: int = 0) -> Record:
    return Record(round(ms * MS), event, 0, first, second)


def one_backward(number: int, begin: float, arrives: float, ends: float, samples: int = 0) -> list[Record]:
    """A forward of 1 ms, the rank's own backward, and the wait from its end to the end of averaging."""
    key = backward_id(0, number)
    return [
        record(begin, Event.FORWARD_BEGAN, key, samples << 1 | 1),
        record(begin + 1, Event.FORWARD_ENDED, key),
        record(begin + 1, Event.BACKWARD_BEGAN, key),
        record(arrives, Event.BACKWARD_ENDED, key),
        record(ends, Event.WAITED, round(arrives * MS), -1),
        record(ends, Event.AVERAGING_ENDED, key),
    ]


def backwards(count: int, works: float, step: float, samples: int = 0) -> list[Record]:
    """Backwards that begin every `step` ms; the rank works for the given time in each."""
    found = []
    for number in range(1, count + 1):
        begin = (number - 1) * step
        found += one_backward(number, begin, begin + works, begin + step, samples)
    return found


def two_ranks(count: int = 10) -> list[RankWindow]:
    """A step takes 100 ms: rank 0 works 60 of them, rank 1 all."""
    return [
        RankWindow(header(0), backwards(count, 60, 100, 8)),
        RankWindow(header(1), backwards(count, 100, 100, 4)),
    ]


# --- the pure function ---


def test_rates_and_waiting_of_two_ranks():
    now = snapshot(two_ranks(), 1000 * MS)
    assert (now.world_size, now.step, now.slow_rank) == (2, 10, 1)
    assert now.steps_per_s == pytest.approx(10)
    assert now.samples_per_s == pytest.approx(120)
    assert now.waited_for == {1: pytest.approx(0.2)}
    fast, slow = now.ranks
    assert (fast.waiting, fast.waits_for, fast.worked_s) == (pytest.approx(0.4), 1, pytest.approx(0.06))
    assert (slow.waiting, slow.waits_for, slow.worked_s) == (0.0, None, pytest.approx(0.1))
    assert (fast.doing, fast.silent_s, fast.failed, fast.failure) == ("", 0.0, 0, "")


def test_who_is_waited_for_now_is_who_has_not_come():
    """This wait has no record yet; it counts while it lasts."""
    fast, slow = two_ranks()
    key = backward_id(0, 11)
    begun = [record(1000, Event.BACKWARD_BEGAN, key), record(1060, Event.BACKWARD_ENDED, key)]
    waits = RankWindow(header(0), [*fast.records, *begun])
    now = snapshot([waits, slow], 3000 * MS)
    assert (now.ranks[0].doing, now.ranks[0].silent_s) == ("average", pytest.approx(1.94))
    assert now.ranks[0].waiting == pytest.approx((10 * 40 + 1940) / 3000)
    assert (now.ranks[0].waits_for, now.slow_rank) == (1, 1)
    # The rate falls, because no step has ended for long: nine steps from the first end, 2.9 s ago.
    assert now.steps_per_s == pytest.approx(9 / 2.9)


def test_a_wait_within_another_counts_once():
    key = backward_id(0, 1)
    records = [
        record(0, Event.FORWARD_BEGAN, key, 1),
        record(20, Event.BACKWARD_ENDED, key),
        record(60, Event.WAITED, 30 * MS, 1),
        record(80, Event.WAITED, 20 * MS, -1),
        record(100, Event.AVERAGING_ENDED, key),
    ]
    now = snapshot([RankWindow(header(0), records)], 100 * MS)
    assert now.ranks[0].waiting == pytest.approx(0.6)


def test_logged_samples_count_instead_of_batch_sizes():
    records = []
    for number in range(1, 6):
        begin = (number - 1) * 10
        records += one_backward(number, begin, begin + 5, begin + 10, samples=3)
        records.insert(-1, record(begin + 7, Event.LOGGED, 1, float_bits(32)))
    window = RankWindow(header(0), records, names={1: "samples"})
    assert snapshot([window], 50 * MS).samples_per_s == pytest.approx(3200)
    # If a rank reports none, the number of the job is unknown.
    assert snapshot([window, RankWindow(header(1), backwards(5, 5, 10))], 50 * MS).samples_per_s is None


def test_values_norm_faults_and_recovery():
    records = backwards(3, 60, 100)
    records += [
        record(301, Event.LOGGED, 0, float_bits(0.5)),
        record(302, Event.LOGGED, 0, float_bits(math.nan)),
        record(303, Event.NORM, backward_id(0, 3), float_bits(1.25)),
        record(304, Event.NONFINITE, backward_id(0, 3), 7 << 32 | 1),
        record(400, Event.AVERAGING_ENDED, backward_id(0, 4), 1),
    ]
    failed = snapshot([RankWindow(header(0), records, {0: "loss"}, [(399 * MS, "Boom")])], 401 * MS).ranks[0]
    assert math.isnan(failed.values["loss"])
    assert (failed.norm, failed.nonfinite, failed.nonfinite_rank) == (1.25, 7, 1)
    assert (failed.failed, failed.failure, failed.is_recovered) == (1, "Boom", False)
    records += one_backward(5, 410, 450, 460)
    after = snapshot([RankWindow(header(0), records, {0: "loss"}, [(399 * MS, "Boom")])], 461 * MS).ranks[0]
    assert (after.step, after.failed, after.is_recovered) == (5, 1, True)


def test_a_rank_that_has_ended_stands_still():
    ended = RankWindow(header(0), backwards(10, 60, 100), is_alive=False)
    now = snapshot([ended], 10**6 * MS).ranks[0]
    assert (now.is_alive, now.steps_per_s, now.silent_s) == (False, pytest.approx(10), 0.0)


def test_before_the_first_backward_nothing_is_known():
    now = snapshot([RankWindow(header(0), [])], MS)
    assert (now.step, now.steps_per_s, now.samples_per_s, now.slow_rank) == (None, 0.0, None, None)
    assert snapshot([], MS).ranks == ()


def test_floats_keep_their_bits():
    for value in (0.1, -0.0, math.inf, 5e-324):
        assert math.copysign(1, bits_float(float_bits(value))) == math.copysign(1, value)
        assert bits_float(float_bits(value)) == value


# --- the files, while they are written ---


@pytest.fixture
def records_in(tmp_path: Path):
    made = Recording()
    made.start(ring_file.path_of(tmp_path, 0), 0, 2, 128)
    yield made
    made._stop()


def test_a_tail_sees_each_record_once(records_in: Recording, tmp_path: Path):
    tail = RingTail(ring_file.path_of(tmp_path, 0))
    seen: list[int] = []
    for number in range(300):
        records_in.note(Event.LOGGED + 100, number, 0)
        if number % 7 == 0:
            tail.look()
            seen = [each.first for each in tail.records]
            assert seen == list(range(number + 1))
    for number in range(300, 1000):  # more than the ring holds: the newest half is sure to be whole
        records_in.note(Event.LOGGED + 100, number, 0)
    tail.look()
    found = [each.first for each in tail.records]
    assert found == [*seen, *range(936, 1000)]


def test_a_tail_goes_on_with_a_new_file(records_in: Recording, tmp_path: Path):
    tail = RingTail(ring_file.path_of(tmp_path, 0))
    tail.look()
    records_in.note(Event.DATA_BEGAN, 1, 0)
    records_in.note_facts("model", 0, rank=0)
    tail.look()
    end = records_in.enlarge(0, 2, 1000)  # as ddp.trace() does
    records_in.note(Event.DATA_BEGAN, 2, 0)
    tail.look()
    end()
    tail.look()
    records_in.note(Event.DATA_BEGAN, 3, 0)
    tail.look()
    assert [each.first for each in tail.records] == [1, 2, 3]
    assert [note["what"] for note in tail.notes] == ["model"]


def test_a_window_is_short_and_keeps_the_last_value(tmp_path: Path):
    tail = RingTail(tmp_path / "none")
    tail.look()
    assert tail.header is None
    tail._take([record(0, Event.LOGGED, 0, float_bits(2.0)), record(1, Event.LOGGED, 0, float_bits(3.0))])
    slow = backwards(20, 500, 1000)
    for each in slow:
        tail._take([each])
    assert [bits_float(each.second) for each in tail.records if each.event == Event.LOGGED] == [3.0]
    assert slow[-1].time_ns - tail.records[1].time_ns <= WINDOW_NS
    tail._take(backwards(5000, 0.1, 0.2))
    assert len(tail.records) <= 2 * MOST_RECORDS + 1


def test_values_are_logged_where_something_is_recorded(tmp_path: Path, monkeypatch):
    class Unasked:
        def __float__(self) -> float:
            raise AssertionError("no rank records")

    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    paceline.log("loss", Unasked())
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    try:
        for number in range(MOST_NAMES + 3):
            paceline.log(f"value {number}", number)
        paceline.log("value 0", 0.5)
        (found,) = ring_file.read_folder(tmp_path)
    finally:
        recording._stop()
        recording._names.clear()
    assert (found.header.rank, len(found.records)) == (1, MOST_NAMES + 1)
    assert found.records[-1][2:] == (0, 0, float_bits(0.5))


def test_a_batch_is_the_first_dimension_of_the_first_tensor():
    class Tensor:
        def __init__(self, *shape: int) -> None:
            self.shape = shape

    assert samples_in((Tensor(7, 3),), {}) == 7
    assert samples_in((), {"mask": None, "ids": Tensor(5, 128)}) == 5
    assert samples_in(({"x": [Tensor(), Tensor(2)]},), {}) == 2
    assert samples_in(("text", 3), {}) == 0


# --- the display ---


@pytest.fixture
def own_jobs(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def a_job(pid: int | None = None, name: str = "train.py") -> Path:
    folder = jobs.new_folder()
    jobs.begin(folder, jobs.JobFacts(name, os.getpid() if pid is None else pid, 2, 1000.0))
    return folder


def drawn(width: int, windows: list[RankWindow], **options: object) -> list[str]:
    console = Console(width=width, height=24, file=io.StringIO(), **options)  # type: ignore[arg-type]
    watch = JobWatch(Path("/none/07ad56"))
    console.print(top.frame(watch, snapshot(windows, 1000 * MS), console))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_forty_columns_without_colours_are_enough():
    windows = two_ranks()
    lines = drawn(40, windows)
    assert max(map(len, lines)) <= 40 and "\x1b" not in "".join(lines)
    assert lines[0] == "07ad56"
    assert "step 10, 10 steps/s, 120 samples/s" in lines
    rows = [line.split() for line in lines[-3:]]
    assert rows[0] == ["rank", "step", "waits", "for", "memory"]
    assert rows[1:] == [["0", "10", "40%", "1", "-"], ["1", "10", "0%", "-"]]


def test_a_wide_terminal_shows_more_and_colours():
    lines = drawn(100, two_ranks(), force_terminal=True, color_system="standard")
    assert "own ms" in "".join(lines) and "samples/s" in "".join(lines)
    assert any("\x1b[33m" in line and "100.0" in line for line in lines)  # the slow rank
    ended = [two_ranks()[0], RankWindow(header(1), backwards(5, 60, 100), failures=[(1, "Boom\nmore")])]
    assert drawn(100, ended)[-1] == "rank 1 went on after Boom"


def test_more_ranks_than_rows_show_those_that_others_wait_for():
    windows = [RankWindow(header(rank), backwards(10, 50 + rank % 40, 100)) for rank in range(80)]
    lines = drawn(80, windows, force_terminal=True, color_system=None)
    shown = [line.split()[0] for line in lines if "%" in line and "all" not in line]
    assert "64 more ranks, which wait for longer" in "".join(lines)
    assert {"39", "79", "38", "78"} <= set(shown)


def test_json_holds_words_for_what_is_no_number(own_jobs: Path):
    watch = JobWatch(a_job())
    window = RankWindow(header(0), [record(1, Event.LOGGED, 0, float_bits(math.inf))], {0: "loss"})
    plain = as_plain(watch, snapshot([window], MS))
    assert json.loads(json.dumps(plain, allow_nan=False))["ranks"][0]["values"] == {"loss": "inf"}
    assert (plain["name"], plain["is_running"]) == ("train.py", True)


# --- which job ---


def test_jobs_that_cannot_be_shown_are_listed_with_the_reason(own_jobs: Path):
    with pytest.raises(ConfigError, match="No job of yours is running"):
        find_running(None)
    first = a_job()
    assert find_running(None) == find_running(first.name) == find_running(str(first)) == first
    ended = a_job(2**22 + 1, "other.py")
    assert find_running(None) == first
    with pytest.raises(ConfigError, match=f"Job {ended.name} .other.py. has ended: killed with its launcher"):
        find_running(ended.name)
    with pytest.raises(ConfigError, match="There is no job 'abc' of yours"):
        find_running("abc")
    second = a_job(name="third.py")
    with pytest.raises(ConfigError, match="2 jobs of yours are running") as caught:
        find_running(None)
    assert second.name in str(caught.value) and first.name in str(caught.value)


def test_a_job_of_another_user_is_reported_so(own_jobs: Path, monkeypatch):
    folder = a_job()

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(ConfigError, match="can't be read") as caught:
        find_running(str(folder))
    assert "it is another user's" in str(caught.value)


def test_a_job_under_another_launcher_ends_with_its_ranks(tmp_path: Path, records_in: Recording):
    watch = JobWatch(tmp_path)
    assert not watch.has_ended
    (rank,) = watch.look().ranks
    assert rank.pid == os.getpid() and rank.memory_bytes > 1 << 20
    assert not watch.has_ended
    gone = RankHeader(0, 2, 2**22 + 1, "host", "boot", 0, 0, 128)
    ring_file.write_header(records_in._memory, gone)
    late = JobWatch(tmp_path)
    assert not late.look().ranks[0].is_alive and late.has_ended
