"""Reports of ranks on other hosts, the files that rank 0 writes of them, and their display."""

from __future__ import annotations

import io
import math
import struct
import time
from pathlib import Path

import pytest
from rich.console import Console

from paceline.launch.trace_file import JobRecording
from paceline.monitor import top
from paceline.monitor.metrics import metrics_text
from paceline.monitor.snapshot import JobSnapshot, RankWindow, snapshot
from paceline.monitor.watch import JobWatch
from paceline.trace import remote_ranks as remote_ranks_module
from paceline.trace import ring_file
from paceline.trace.recording import Recording
from paceline.trace.records import Event, backward_id
from paceline.trace.remote_ranks import MOST_BYTES, RemoteRanks, State, Words, pack_figures, remote_ranks
from paceline.trace.ring_file import RankHeader, RankRecording
from paceline.trace.slow_ranks import CauseWatch
from paceline.trace.totals import Total
from tests.unit.test_live import MS, backwards, record

S = 1000 * MS
KEY = backward_id(0, 11)
# Since the first backward, in 10 s: 100 steps of 100 ms, of which the far rank works 90 and the others 60.
BEFORE = dict.fromkeys(
    (Total.TIME_NS, Total.BACKWARDS, Total.WORKED_NS, Total.SAMPLES, Total.TIMES_LAST, Total.HELD_UP_NS), 0.0
)
FAST = BEFORE | {Total.TIME_NS: 10 * S, Total.BACKWARDS: 100, Total.WORKED_NS: 6 * S, Total.SAMPLES: 800}
SLOW = FAST | {
    Total.WORKED_NS: 9 * S,
    Total.TIMES_LAST: 100,
    Total.HELD_UP_NS: 3 * S,
    Total.BETWEEN_NS: 4 * S,
}


def header(rank: int, host: str = "node1", world_size: int = 4) -> RankHeader:
    return RankHeader(rank, world_size, 100 + rank, host, "boot", 0, time.time_ns(), 1024)


def figures(rank: int, last: dict[Total, float], words: Words = Words(100)) -> bytes:  # noqa: B008
    return pack_figures(header(rank), BEFORE, last, words)


def test_reports_are_read_unchanged(tmp_path: Path):
    words = Words(7, {"loss": 0.5, "nothing": math.nan}, "Boom: it", 1 << 30)
    begun_ns = time.monotonic_ns()
    RemoteRanks(lambda: tmp_path).take(2, figures(2, SLOW, words))
    (found,) = remote_ranks(tmp_path, begun_ns)
    assert (found.recording.first, found.recording.last) == (BEFORE, SLOW)
    assert (found.recording.header.rank, found.recording.header.host) == (2, "node1")
    assert found.words.values["loss"] == 0.5 and math.isnan(found.words.values["nothing"])
    assert (found.words.step, found.words.failure, found.words.memory_bytes) == (7, "Boom: it", 1 << 30)
    assert found.state == State.LIVE and begun_ns <= found.received_ns <= time.monotonic_ns()
    assert remote_ranks(tmp_path, time.monotonic_ns() + S) == []  # an earlier job's


def test_the_longest_words_fit_into_a_frame_and_a_file(tmp_path: Path):
    values = {f"{number}" + "\N{SNOWMAN}" * 100: 1e-300 / 3 for number in range(60)}
    for words in (Words(1 << 62, values, "x" * 5000, 1 << 50), Words(3, {}, "\N{SNOWMAN}" * 5000, None)):
        report = figures(2, SLOW, words)
        assert len(report) <= MOST_BYTES
        RemoteRanks(lambda: tmp_path).take(2, report)
        (found,) = remote_ranks(tmp_path)
        assert found.words.step == words.step


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xff" * 600, figures(2, SLOW)[:400], figures(2, SLOW) + b" " * MOST_BYTES, figures(2, SLOW)[:-3]],
)
def test_what_is_no_figures_is_dropped(tmp_path: Path, raw: bytes):
    RemoteRanks(lambda: tmp_path).take(2, raw)
    assert remote_ranks(tmp_path) == []


def test_the_first_word_about_an_end_counts_and_new_figures_leave_the_old_ones(tmp_path: Path):
    (tmp_path / "rank9.remote").write_bytes(b"of an earlier job")
    writer = RemoteRanks(lambda: tmp_path)
    writer.leave(2)  # of whom nothing is known: no harm
    writer.take(2, figures(2, FAST))
    writer.take(3, figures(3, FAST))
    writer.take(3, figures(3, SLOW, Words(200)))
    writer.leave(2)
    writer.lose(2)
    writer.lose(3)
    assert [(each.state, each.words.step) for each in remote_ranks(tmp_path)] == [
        (State.LEFT, 100),
        (State.LOST, 200),
    ]
    assert not (tmp_path / "rank9.remote").exists()


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path):
    RemoteRanks(lambda: tmp_path).take(2, figures(2, SLOW))
    path = tmp_path / "rank2.remote"
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, len(data) - 8, 99)
    path.write_bytes(data)
    assert remote_ranks(tmp_path) == []


def test_a_disk_that_is_full_or_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    RemoteRanks(lambda: None).take(2, figures(2, SLOW))
    RemoteRanks(lambda: tmp_path / "none").take(2, figures(2, SLOW))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(remote_ranks_module.os, "posix_fallocate", full)
    RemoteRanks(lambda: tmp_path).take(2, figures(2, SLOW))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_reports_to_its_host_once_in_a_second_and_when_it_fails(tmp_path: Path):
    reports: list[bytes] = []
    recording = Recording()
    recording.report_to_host = reports.append
    recording.start(tmp_path / "rank2.ring", 2, 4, 64)
    assert recording.sample(S, backward_id(0, 7)) and not recording.sample(S + 1, backward_id(0, 8))
    recording.logged["loss"] = 0.25
    recording.note_failure(ValueError("x"))
    other = tmp_path / "other"
    other.mkdir()
    found = []
    for each in reports:
        RemoteRanks(lambda: other).take(2, each)
        (far,) = remote_ranks(other)
        found.append((far.words.step, far.words.values, far.words.failure))
        assert far.recording.last[Total.TIME_NS] == S and (far.words.memory_bytes or 0) > 1 << 20
    assert found == [(7, {}, ""), (7, {"loss": 0.25}, "ValueError: x")]


def seen(tmp_path: Path, state: State = State.LIVE) -> JobSnapshot:
    """Ranks 0 and 1 here, 2 and 3 on node1; all wait for rank 3."""
    writer = RemoteRanks(lambda: tmp_path)
    writer.take(2, figures(2, FAST))
    writer.take(3, figures(3, SLOW, Words(100, {"loss": 2.0}, "", 3 << 30)))
    if state == State.LOST:
        writer.lose(3)
    far = remote_ranks(tmp_path)
    local = [RankRecording(header(rank, "node0"), [], [], 0, BEFORE, FAST) for rank in range(2)]
    causes = CauseWatch()
    causes.look([*local, *(each.recording for each in far)])
    windows = [RankWindow(header(rank, "node0"), backwards(10, 60, 100, 8)) for rank in range(2)]
    return snapshot(windows, far[0].received_ns, far, causes.spans)


def test_ranks_of_two_hosts_are_shown_together(tmp_path: Path):
    now = seen(tmp_path)
    assert [(each.rank, each.host, each.is_far) for each in now.ranks] == [
        (0, "node0", False),
        (1, "node0", False),
        (2, "node1", True),
        (3, "node1", True),
    ]
    fast, slow = now.ranks[2:]
    assert (fast.step, fast.steps_per_s, fast.worked_s) == (100, pytest.approx(10), pytest.approx(0.06))
    assert (fast.samples_per_s, fast.waiting, fast.waits_for) == (pytest.approx(80), pytest.approx(0.4), 3)
    assert (slow.waiting, slow.waits_for, slow.values) == (0.0, None, {"loss": 2.0})
    assert slow.memory_bytes == 3 << 30 and slow.is_alive
    assert now.slow_rank == 3


def test_a_wait_whose_last_rank_is_elsewhere_is_globally_unused_here(tmp_path: Path):
    """Two of four ranks are visible, without a report of the last: the later one need not be the last."""
    windows = [RankWindow(header(rank, "node0"), backwards(10, 60 + 20 * rank, 100)) for rank in range(2)]
    assert snapshot(windows, S).waited_for == {}


def test_a_wait_for_unknown_ranks_of_other_hosts_counts():
    """All ranks of this host have come to the end of a backward that has not ended."""
    begun = [record(1000, Event.BACKWARD_BEGAN, KEY), record(1050, Event.BACKWARD_ENDED, KEY)]
    windows = [RankWindow(header(rank, "node0"), [*backwards(10, 60, 100), *begun]) for rank in range(2)]
    now = snapshot(windows, 2050 * MS)
    assert all(each.waiting == pytest.approx((10 * 40 + 1000) / 2050) for each in now.ranks)
    assert now.waited_for == {} and now.ranks[0].waits_for is None


def test_a_lost_rank_is_shown_as_ended_and_hosts_have_a_column(tmp_path: Path):
    now = seen(tmp_path, State.LOST)
    for width, host in ((40, "node0"), (100, "node0")):
        console = Console(width=width, height=24, file=io.StringIO())
        console.print(top.frame(JobWatch(tmp_path), now, console))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= width
        table = [line.split() for line in lines[-5:]]
        assert table[0][:2] == ["rank", "host"] and table[1][:2] == ["0", host]
    assert table[-1][:2] == ["3", "node1"] and "ended" in table[-1]
    text = metrics_text(now, "9fb9a4")
    assert 'paceline_up{job_id="9fb9a4",rank="3",host="node1"} 0.0' in text


def test_the_launcher_of_rank_0_says_who_is_slow_on_other_hosts(tmp_path: Path):
    said: list[str] = []
    recording = JobRecording(
        tmp_path, is_own=False, output=None, name="x", nprocs=2, launcher=1, say=said.append
    )
    for rank in range(2):
        memory = ring_file.create(ring_file.path_of(tmp_path, rank), 64)
        ring_file.write_header(memory, header(rank, "node0"))
        ring_file.write_totals(memory, BEFORE, 1, is_first=True)
        ring_file.write_totals(memory, FAST, 2)
    writer = RemoteRanks(lambda: tmp_path)
    writer.take(2, figures(2, FAST))
    writer.take(3, figures(3, SLOW))
    recording.end(0)
    assert len(said) == 1 and said[0].startswith(
        "paceline: the others waited for rank 3 of 4 (host node1) in 100 %"
    )


def test_another_host_says_nothing_of_its_own_ranks_alone(tmp_path: Path):
    said: list[str] = []
    recording = JobRecording(
        tmp_path, is_own=False, output=None, name="x", nprocs=2, launcher=1, say=said.append
    )
    for rank, totals in ((2, FAST), (3, SLOW)):
        memory = ring_file.create(ring_file.path_of(tmp_path, rank), 64)
        ring_file.write_header(memory, header(rank))
        ring_file.write_totals(memory, BEFORE, 1, is_first=True)
        ring_file.write_totals(memory, totals, 2)
    recording.end(0)
    assert said == []
