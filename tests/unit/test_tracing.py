"""The records of ranks, and their readers: files, timelines, clocks, Chrome's format, tables."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.cli import main as paceline_main
from paceline.errors import ConfigError
from paceline.trace import chrome, cli, jobs, ring_file
from paceline.trace.batch_size import samples_in
from paceline.trace.clocks import ahead_ns, on_one_clock
from paceline.trace.recording import Recording
from paceline.trace.records import Event, Record, backward_id, pack, unpack
from paceline.trace.ring_file import RankHeader, RankRecording
from paceline.trace.table import render
from paceline.trace.timeline import Slice, last_to_arrive, make_timeline, nested

MS = 1_000_000


def header(rank: int, boot: str = "one") -> RankHeader:
    return RankHeader(rank, 2, 100 + rank, f"host-{boot}", boot, 0, 0, 1024)


def rank_that(rank: int, records: list[Record], boot: str = "one") -> RankRecording:
    return RankRecording(header(rank, boot), records, [], 0)


def one_backward(
    number: int, begin_ms: int, arrives_ms: int, ends_ms: int, shift_ms: int = 0
) -> list[Record]:
    """A forward of 1 ms, the rank's own backward, and the wait from its end to the end of averaging."""
    key = backward_id(0, number)
    rows = [
        (begin_ms, Event.FORWARD_BEGAN, key, 1),
        (begin_ms + 1, Event.FORWARD_ENDED, key, 0),
        (begin_ms + 1, Event.BACKWARD_BEGAN, key, 0),
        (arrives_ms, Event.POSTED, 3, 0),
        (arrives_ms, Event.BACKWARD_ENDED, key, 0),
    ]
    if ends_ms > arrives_ms + 1:
        rows.append((ends_ms - 1, Event.WAITED, (arrives_ms + shift_ms) * MS, -1))
    rows.append((ends_ms, Event.AVERAGING_ENDED, key, 0))
    return [Record((ms + shift_ms) * MS, event, 0, first, second) for ms, event, first, second in rows]


def two_ranks() -> list[RankRecording]:
    """In iteration 1 rank 1 comes last, in iteration 2 rank 0."""
    first = rank_that(0, [*one_backward(1, 0, 10, 30), *one_backward(2, 40, 80, 81)])
    second = rank_that(1, [*one_backward(1, 0, 28, 29), *one_backward(2, 40, 50, 82)])
    return [first, second]


# --- records ---


def test_a_ring_gives_back_the_last_records_and_no_partial_one():
    written = [Record(index, 5, 0, index, -index) for index in range(10)]
    ring = bytearray(pack(written, 4))
    assert unpack(bytes(ring), 10) == written[6:]
    # The eleventh is begun, and not written yet: its place still holds a part of the seventh.
    assert unpack(bytes(ring), 11) == written[7:]
    assert unpack(bytes(len(ring)), 0) == []


def test_what_a_process_records_is_in_the_file_at_once(tmp_path: Path):
    path = ring_file.path_of(tmp_path, 1)
    recording = Recording()
    recording.note_facts("model", 0, rank=1)
    recording.start(path, 1, 2, 100)
    try:
        for number in range(300):
            recording.note(Event.OPTIMIZER_BEGAN, number, -1)
        recording.note_failure(ValueError("boom"))
        (found,) = ring_file.read_folder(tmp_path)
    finally:
        recording._stop()
    assert (found.header.rank, found.header.world_size, found.header.pid) == (1, 2, os.getpid())
    assert [record.first for record in found.records] == list(range(172, 300))  # 128: a power of two
    assert found.num_lost == 172
    assert [note["what"] for note in found.notes] == ["model", "failure"]
    assert found.notes[1]["text"] == "ValueError: boom"
    times = [record.time_ns for record in found.records]
    assert times == sorted(times)


def test_a_backward_notes_its_moments_and_sums_up_what_lies_between_backwards():
    records = _core.BackwardRecords(samples_in)
    recording = Recording()
    recording.start(None, 0, 1, 64)
    try:
        for number in (7, 8):
            records.begin_forward(number, True, True, (np.zeros((5, 3)),), {})
            records.end_forward(number)
            records.begin_backward(number)
            over_ns = records.end_backward(number, number == 8)
        found = recording.read()
    finally:
        recording._stop()
    assert found is not None
    begins, ends, backwards, overs = (found.records[index::4] for index in range(4))
    assert [each[1:2] + each[3:] for each in begins] == [
        (Event.FORWARD_BEGAN, 7, 5 << 1 | 1),
        (Event.FORWARD_BEGAN, 8, 5 << 1 | 1),
    ]
    assert [(each.event, each.first) for each in ends] == [(Event.FORWARD_ENDED, 7), (Event.FORWARD_ENDED, 8)]
    assert [each.event for each in backwards] == [Event.BACKWARD_BEGAN] * 2
    assert [each[3:] for each in overs] == [(7, False), (8, True)]
    assert records.between_ns == begins[1].time_ns - overs[0].time_ns
    assert over_ns == overs[1].time_ns
    # Two forwards of one backward: the time between them is not time between backwards.
    before = records.between_ns
    records.begin_forward(9, True, True, (), {})
    once = records.between_ns
    records.begin_forward(9, True, True, (), {})
    assert before < once == records.between_ns
    assert len(found.records) == 8  # of those after the end of the recording there is none


class Shaped:
    def __init__(self, shape: object) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("inputs", "kwargs", "samples"),
    [
        ((np.zeros((5, 3)),), {}, 5),
        ((Shaped([6, 2]), np.zeros(9)), {}, 6),  # Paddle's form of shapes
        ((Shaped(()), np.zeros(9)), {}, 9),  # a single number is no batch
        ((Shaped("text"),), {"images": np.zeros((4, 2))}, 4),
        (({"ids": np.zeros((3, 8))}, 1), {}, 3),
        ((), {"ids": np.zeros((2, 8))}, 2),
        (("text",), {}, 0),
        ((), {}, 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor(inputs, kwargs, samples):
    records = _core.BackwardRecords(samples_in)
    for is_training in (True, False, True):
        records.begin_forward(1, True, is_training, inputs, kwargs)
    assert records.samples == 2 * samples


def test_what_takes_the_time_of_a_program_is_added_up_while_something_is_recorded():
    timed = _core.TimedRecords(Event.OPTIMIZER_BEGAN, Event.OPTIMIZER_ENDED)
    timed.begin("as a hook", "gets them")
    recording = Recording()
    recording.start(None, 0, 1, 64)
    try:
        timed.end()  # began before it: its time is unknown
        assert timed.total_ns == 0
        timed.begin()
        timed.end("any", 1)
        timed.begin()
        timed.end()
        found = recording.read()
    finally:
        recording._stop()
    assert found is not None
    times = [record.time_ns for record in found.records]
    assert timed.total_ns == times[2] - times[1] + times[4] - times[3] > 0
    timed.begin()
    timed.end()
    assert timed.total_ns == times[2] - times[1] + times[4] - times[3]


def test_notes_leave_room_for_failures(tmp_path: Path):
    memory = ring_file.create(tmp_path / "rank0.ring", 64)
    ring_file.write_header(memory, RankHeader(0, 1, 1, "host", "boot", 0, 0, 64))
    rows = [ring_file.add_note(memory, {"what": "step", "text": "x" * 4000}) for _ in range(20)]
    assert rows.count(True) in range(10, 16) and not rows[-1]
    failure = {"what": "failure", "time_ns": 7, "text": "boom"}
    assert ring_file.add_note(memory, failure, is_failure=True)
    assert ring_file.read(memory[:]).notes[-1] == failure


def test_a_large_ring_takes_the_place_of_a_small_one_for_a_while(tmp_path: Path):
    recording = Recording()
    recording.start(ring_file.path_of(tmp_path, 0), 0, 2, 64)
    end = recording.enlarge(7, 9, 1000)
    try:
        recording.note(Event.DATA_BEGAN, 1, 2)
        (large,) = ring_file.read_folder(tmp_path)
        end()
        (small,) = ring_file.read_folder(tmp_path)
    finally:
        recording._stop()
    assert (large.header.rank, large.header.capacity, len(large.records)) == (0, 1024, 1)
    assert (small.header.capacity, small.records) == (64, [])


def test_a_forked_child_records_nothing(tmp_path: Path):
    program = """
import os, sys
from pathlib import Path
from paceline.trace.recording import recording
recording.start(Path(sys.argv[1]), 0, 1, 64)
pid = os.fork()
if pid == 0:
    os._exit(0 if recording.note is None else 1)
sys.exit(os.waitpid(pid, 0)[1] != 0 or recording.note is None)
"""
    assert (
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "ring")], timeout=240).returncode == 0
    )


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Simulate a full disk: no file may grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_training_goes_on_and_nothing_is_left(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(ring_file.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    recording = Recording()
    with largest_file(4096), pytest.warns(RuntimeWarning, match="Rank 1 of 2 records nothing: .*rank1.ring"):
        recording.begin_if_asked(1, 2)
    assert recording.note is None
    assert not list(tmp_path.iterdir())


def test_the_ring_of_a_process_that_runs_is_left_alone(tmp_path: Path, monkeypatch):
    memory = ring_file.create(ring_file.path_of(tmp_path, 0), 64)
    ring_file.write_header(memory, RankHeader(0, 1, os.getppid(), "host", "boot", 0, 0, 64))
    monkeypatch.setenv(ring_file.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    recording = Recording()
    recording.begin_if_asked(0, 1)
    assert recording.note is None


# --- timelines ---


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0, 1)), max_size=12))
def test_slices_of_a_lane_never_overlap_in_part(spans: list[tuple[int, int, int]]):
    found = nested(Slice("x", begin, begin + took, lane) for begin, took, lane in spans)
    assert sorted((s.lane, s.begin_ns) for s in found) == sorted((lane, begin) for begin, _, lane in spans)
    for a, b in itertools.combinations(found, 2):
        is_apart = a.lane != b.lane or a.end_ns <= b.begin_ns or b.end_ns <= a.begin_ns
        is_within = (a.begin_ns <= b.begin_ns and b.end_ns <= a.end_ns) or (
            b.begin_ns <= a.begin_ns and a.end_ns <= b.end_ns
        )
        assert is_apart or is_within


def test_a_backward_becomes_slices():
    line = make_timeline(two_ranks()[0])
    found = [(s.name, s.begin_ns // MS, s.end_ns // MS) for s in line.slices[:4]]
    assert found == [("forward", 0, 1), ("backward", 1, 10), ("average", 10, 30), ("wait", 10, 29)]
    assert line.posted[0] == (10 * MS, 0, 3)


def test_what_a_killed_rank_was_doing_is_cut_at_its_last_record():
    records = one_backward(1, 0, 10, 12)[:4]  # the backward has not ended
    line = make_timeline(rank_that(0, records))
    assert [(s.name, s.args.get("unfinished")) for s in line.slices] == [
        ("forward", None),
        ("backward", True),
    ]
    assert line.slices[-1].end_ns == 10 * MS


def test_a_recording_that_begins_within_a_backward_is_read_from_there():
    line = make_timeline(rank_that(0, [*one_backward(1, 0, 10, 30)[3:], *one_backward(2, 40, 50, 51)]))
    assert [s.name for s in line.slices] == ["average", "wait", "forward", "backward", "average"]


def test_a_backward_that_raised_shows_it():
    key = backward_id(0, 1)
    records = [*one_backward(1, 0, 10, 12)[:4], Record(11 * MS, Event.AVERAGING_ENDED, 0, key, 1)]
    line = make_timeline(rank_that(0, records))
    assert line.failed == {(0, 1)}
    assert line.slices[-1].args["raised"]


def test_backwards_in_no_sync_are_slices_of_the_backward_that_they_belong_to():
    key = backward_id(0, 2)
    rows = [(31, Event.FORWARD_BEGAN, 0), (33, Event.FORWARD_ENDED, 0)]
    rows += [(34, Event.LOCAL_BACKWARD_BEGAN, 0), (36, Event.LOCAL_BACKWARD_ENDED, 0)]
    rows += [(37, Event.LOCAL_BACKWARD_BEGAN, 0), (38, Event.LOCAL_BACKWARD_ENDED, 1)]
    local = [Record(ms * MS, event, 0, key, second) for ms, event, second in rows]
    line = make_timeline(rank_that(0, [*one_backward(1, 0, 10, 30), *local, *one_backward(2, 40, 80, 81)]))
    backwards = [s for s in line.slices if s.name == "backward"]
    assert [(s.begin_ns // MS, s.end_ns // MS) for s in backwards] == [(1, 10), (34, 36), (37, 38), (41, 80)]
    is_local = {"iteration": 2, "no_sync": True}
    assert [s.args for s in backwards[1:]] == [is_local, is_local | {"raised": True}, {"iteration": 2}]
    assert line.arrivals == {(0, 1): 10 * MS, (0, 2): 80 * MS}  # no rank waits for it


def test_the_last_to_arrive_is_waited_for():
    assert last_to_arrive([make_timeline(each) for each in two_ranks()]) == {(0, 1): 1, (0, 2): 0}


# --- clocks ---


def test_the_bounds_of_the_docstring():
    here = make_timeline(rank_that(0, one_backward(1, 90, 100, 160)))
    there = make_timeline(rank_that(1, one_backward(1, 1100, 1150, 1170), "two"))
    assert ahead_ns([here], [there]) == 1030 * MS


@given(
    st.integers(-(10**12), 10**12), st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1)
)
def test_clocks_of_hosts_are_brought_together(shift_ms: int, works: list[tuple[int, int]]):
    """Whatever the clock of the other host shows, no rank ends a backward before all have come to its end."""
    records: tuple[list[Record], list[Record]] = ([], [])
    now = 0
    for number, (work, other_work) in enumerate(works, 1):
        end = now + max(work, other_work) + 2
        records[0].extend(one_backward(number, now, now + work, end))
        records[1].extend(one_backward(number, now, now + other_work, end, shift_ms))
        now = end + 1
    recordings = [rank_that(0, records[0]), rank_that(1, records[1], "two")]
    lines = on_one_clock([make_timeline(each) for each in recordings])
    for key in lines[0].arrivals:
        assert max(line.arrivals[key] for line in lines) <= min(line.ends[key] for line in lines)
    if any(work > other for work, other in works) and any(work < other for work, other in works):
        assert last_to_arrive(lines)[0, 1 + works.index(max(works, key=lambda w: w[0] - w[1]))] == 0


# --- Chrome's format ---


def test_the_trace_has_ranks_slices_and_arrows():
    events = chrome.trace_events(two_ranks())["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert list(names.values()) == ["rank 0", "rank 1"]
    arrows = {
        (each["id"], each["ph"]): (names[each["tid"]], each["ts"]) for each in events if each["ph"] in "sf"
    }
    # In iteration 1 rank 0 waits for rank 1, which comes at 28 ms; in iteration 2 the reverse.
    assert arrows == {
        (1, "s"): ("rank 1", 28000.0),
        (1, "f"): ("rank 0", 29000.0),
        (2, "s"): ("rank 0", 80000.0),
        (2, "f"): ("rank 1", 81000.0),
    }


@pytest.mark.parametrize("place", ["none/out.json", "."])
def test_a_trace_that_cannot_be_written_is_reported_before(tmp_path: Path, place: str):
    with pytest.raises(ConfigError, match="The trace can't be written to"):
        chrome.check(tmp_path / place)
    chrome.check(tmp_path / "out.json")
    assert not list(tmp_path.iterdir())


# --- the table, and jobs ---


def test_the_table_shows_who_waited_for_whom():
    rows = [line.split() for line in render(two_ranks(), 5).splitlines()]
    assert " ".join(rows[0]) == "iteration rank data forward backward average optimizer waited for"
    assert rows[1] == ["1", "0", "1.0", "9.0", "20.0", "19.0", "rank", "1"]
    assert rows[4] == ["2", "1", "1.0", "9.0", "32.0", "31.0", "rank", "0"]


def test_the_table_says_what_a_rank_was_doing_last():
    first, second = two_ranks()
    second.records[:] = [*second.records[:6], *one_backward(2, 40, 50, 82)[:4]]
    second.notes.append({"what": "failure", "text": "ValueError: boom\nmore"})
    text = render([first, second], 1)
    assert "rank 0 (pid 100): between two backward passes, 0.000 s before the last record of the job" in text
    assert "rank 1 (pid 101): in backward of iteration 2, 1 buckets posted, 0.031 s before" in text
    assert "\n  ValueError: boom" in text


@pytest.fixture
def own_jobs(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_failed_job_is_found_and_the_oldest_go(own_jobs: Path):
    folders = []
    for number in range(12):
        folder = jobs.new_folder()
        facts = jobs.JobFacts("train.py", 2**22 + number, 2, 1000.0 + number)
        jobs.begin(folder, facts)
        jobs.end(folder, facts, 1)
        folders.append(folder)
    assert [folder for folder, _ in jobs.jobs()] == folders[:1:-1]
    assert jobs.find(folders[-1].name) == jobs.find(str(2**22 + 11)) == folders[-1]
    assert jobs.jobs()[0][1].state == "exit status 1"
    assert folders[-1].parent.stat().st_mode & 0o777 == 0o700


def test_failed_jobs_leave_the_recordings_of_those_that_run(own_jobs: Path):
    """The oldest of eleven that run, after fifteen later ones that have failed."""
    running = []
    for number in range(11):
        running.append(jobs.new_folder())
        jobs.begin(running[-1], jobs.JobFacts("train.py", os.getpid(), 2, 1000.0 + number))
    failed = []
    for number in range(15):
        failed.append(jobs.new_folder())
        facts = jobs.JobFacts("bad.py", 2**22 + number, 2, 2000.0 + number)
        jobs.begin(failed[-1], facts)
        jobs.end(failed[-1], facts, 1)
    assert [folder for folder, facts in jobs.jobs() if facts.is_running] == running[::-1]
    assert [folder for folder, facts in jobs.jobs() if not facts.is_running] == failed[:4:-1]


def test_a_job_whose_process_is_not_seen_from_here_keeps_its_recording(own_jobs: Path):
    """For example in another container that shares the folder: its process has another number there."""
    unseen = jobs.JobFacts("train.py", 2**22 + 1, 2, 1.0)
    folder = jobs.new_folder()
    jobs.begin(folder, unseen)
    for number in range(12):
        facts = jobs.JobFacts("bad.py", 2**22 + 2 + number, 2, 1000.0 + number)
        jobs.begin(bad := jobs.new_folder(), facts)
        jobs.end(bad, facts, 1)
    assert folder in dict(jobs.jobs())
    jobs.end(folder, unseen, 1)
    jobs.begin(jobs.new_folder(), jobs.JobFacts("train.py", os.getpid(), 2, 3000.0))
    assert folder not in dict(jobs.jobs())


def test_a_job_that_ended_well_leaves_nothing(own_jobs: Path):
    folder = jobs.new_folder()
    facts = jobs.JobFacts("train.py", os.getpid(), 2, 1000.0)
    jobs.begin(folder, facts)
    assert jobs.jobs()[0][1].state == "running"
    jobs.end(folder, facts, 0)
    assert jobs.jobs() == []
    assert not list(own_jobs.iterdir())


def test_jobs_that_begin_and_end_side_by_side(own_jobs: Path, monkeypatch):
    """The last job removes the folder of all jobs, just when another one begins."""
    facts, made = jobs.JobFacts("train.py", 1, 2, 0.0), Path.mkdir
    folders = [jobs.new_folder(), jobs.new_folder()]
    jobs.begin(folders[0], facts)

    def late(path: Path, *args, **kwargs) -> None:
        if path == folders[1] and folders[0].exists():
            jobs.end(folders[0], facts, 0)
        made(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", late)
    jobs.begin(folders[1], facts)
    assert [folder for folder, _ in jobs.jobs()] == folders[1:]


def test_a_folder_of_another_user_is_not_used(own_jobs: Path):
    target = own_jobs / "target"
    target.mkdir()
    jobs.users_folder().symlink_to(target)
    with pytest.raises(FileExistsError, match="is no folder"):
        jobs.begin(jobs.new_folder(), jobs.JobFacts("train.py", 1, 2, 0.0))
    assert not list(target.iterdir())


@contextmanager
def as_user_nobody() -> Iterator[None]:
    """Run as a user who may not look into folders of root; for others, root's are closed anyway."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("place", ["", "/", "/1a2b3c", "/1a2b3c/"])
def test_a_job_of_another_user_is_reported_by_a_sentence(tmp_path: Path, capsys, place: str):
    folder = tmp_path / "paceline-4711"
    ring_file.create(ring_file.path_of(_made(folder / "1a2b3c"), 0), 64)
    folder.chmod(0)
    with as_user_nobody():
        status = paceline_main(["trace", f"{folder}{place}"])
    folder.chmod(0o700)
    rows = capsys.readouterr().err
    assert status == 2
    assert rows.startswith("paceline trace: What the job has recorded can't be read: ")
    assert str(folder) in rows and "it is another user's" in rows


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_a_job_that_is_not_there(own_jobs: Path):
    (own_jobs / "paceline-4711").mkdir()
    with pytest.raises(ConfigError, match="There is no job 'abc' of yours") as caught:
        cli.main(["abc"])
    assert "paceline-4711" in str(caught.value)
    with pytest.raises(ConfigError, match="There is no folder"):
        cli.main([str(own_jobs / "none")])
    with pytest.raises(ConfigError, match="No rank of this job has recorded a backward"):
        cli.main([f"{own_jobs}/paceline-4711"])
    assert cli.main([]) == 1
