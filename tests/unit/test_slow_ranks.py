"""The slow rank and the cause, from totals of ranks: given ones, so that nothing depends on a clock."""

from __future__ import annotations

import gc
import io
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from paceline import _core
from paceline.launch.trace_file import JobRecording
from paceline.monitor import snapshot, top, watch
from paceline.trace import cli, ring_file
from paceline.trace.batch_size import samples_in
from paceline.trace.recording import Recording, batches
from paceline.trace.records import Event
from paceline.trace.ring_file import RankHeader, RankRecording
from paceline.trace.slow_ranks import (
    AT_THE_END,
    WHILE_IT_RUNS,
    CauseWatch,
    SlowWatch,
    slow_ranks,
    whole_spans,
)
from paceline.trace.totals import ModelTotals, Total, Totals, pack_totals, sum_of, unpack_totals

MS = 1_000_000
STEP_MS = 20.0
BALANCED = {
    Total.WORKED_NS: 10 * MS,
    Total.TIMES_LAST: 0,
    Total.HELD_UP_NS: 0,
    Total.BETWEEN_NS: 2 * MS,
    Total.CPU_NS: 9 * MS,
    Total.RUN_QUEUE_NS: 0,
    Total.MINOR_FAULTS: 3,
    Total.MAJOR_FAULTS: 0,
    Total.STOLEN_NS: 0,
    Total.THROTTLED_NS: 0,
    Total.SAMPLES: 64,
}
SLOW = BALANCED | {Total.WORKED_NS: 18 * MS, Total.TIMES_LAST: 1, Total.HELD_UP_NS: 8 * MS}


def rank_that(rank: int, each_step: Totals, steps: int = 1000, world_size: int = 3) -> RankRecording:
    """A rank whose totals have grown by so much in each step, from earlier values."""
    first = {total: 1e6 + total for total in each_step}
    last = {total: first[total] + steps * value for total, value in each_step.items()}
    for look, passes in ((first, 0), (last, steps)):
        look |= {Total.BACKWARDS: 7 + passes, Total.TIME_NS: 5e9 + passes * STEP_MS * MS}
    return RankRecording(RankHeader(rank, world_size, 1, "b", "boot", 0, 0, 64), [], [], 0, first, last)


def job(*each_step: Totals, steps: int = 1000) -> list[RankRecording]:
    return [rank_that(rank, totals, steps, len(each_step)) for rank, totals in enumerate(each_step)]


def sentences(ranks: Sequence[RankRecording]) -> list[str]:
    return [slow.sentence() for slow in slow_ranks(whole_spans(ranks), AT_THE_END)]


WAITED = "the others waited for rank 1 of 3 (host b) in 100 % of 1000 steps, 8.0 of 20.0 ms per step."


@pytest.mark.parametrize(
    ("own", "theirs", "kind", "text"),
    [
        (
            {Total.DATA_NS: 9.4 * MS, Total.BETWEEN_NS: 10 * MS},
            {Total.DATA_NS: 0.2 * MS},
            "data",
            "its data loading took 9.4 ms per step, that of the others 0.2 ms",
        ),
        (
            {Total.STOLEN_NS: 6 * MS},
            {},
            "steal",
            "other virtual machines had its cores for 6.0 ms per step, and those of the others for 0.0 ms",
        ),
        (
            {Total.RUN_QUEUE_NS: 7.5 * MS},
            {Total.RUN_QUEUE_NS: 0.1 * MS},
            "busy core",
            "another process had its core for 7.5 ms per step, and those of the others for 0.1 ms",
        ),
        (
            {Total.THROTTLED_NS: 5 * MS},
            {},
            "throttling",
            "its control group was throttled for 5.0 ms per step (a quota of processor time), the others "
            "0.0 ms",
        ),
        ({Total.MINOR_FAULTS: 9000}, {}, "page faults", "it had 9000 page faults per step, the others 3"),
        (
            {Total.MAJOR_FAULTS: 40},
            {},
            "disk",
            "it read 40 pages of its memory from a disk per step, the others 0",
        ),
        (
            {Total.SAMPLES: 128},
            {},
            "batch",
            "the samples of its batches were 128 in the mean, 2 times those of the others",
        ),
        (
            {Total.WEIGHT: 96},
            {Total.WEIGHT: 48},
            "weight",
            "the weights of its batches were 96 in the mean, 2 times those of the others",
        ),
        (
            {Total.BETWEEN_NS: 9 * MS},
            {},
            "between",
            "between a backward and the next forward it spent 9.0 ms per step (data, optimizer and all else: "
            "--trace tells them apart), the others 2.0 ms",
        ),
        (
            {Total.BETWEEN_NS: 9 * MS, Total.DATA_NS: 0.2 * MS, Total.OPTIMIZER_NS: MS},
            {Total.DATA_NS: 0.2 * MS, Total.OPTIMIZER_NS: MS},
            "between",
            "between a backward and the next forward it spent 9.0 ms per step (of it data loading 0.2 ms, "
            "optimizer 1.0 ms), the others 2.0 ms",
        ),
        (
            {Total.CPU_NS: 17 * MS},
            {},
            "computing",
            "it computed for 17.0 ms per step, the others 9.0 ms",
        ),
        (
            {},
            {},
            "waiting",
            "it waited for something else than a core: a lock, a disk, a network or a GPU",
        ),
    ],
)
def test_the_cause_is_what_explains_the_longer_work(own: Totals, theirs: Totals, kind: str, text: str):
    ranks = job(BALANCED | theirs, SLOW | own, BALANCED | theirs)
    (slow,) = slow_ranks(whole_spans(ranks), AT_THE_END)
    assert slow.cause is not None and slow.cause.kind == kind
    assert sentences(ranks) == [f"{WAITED} Why: {text}."]


def test_small_differences_and_unreported_ones_are_no_cause():
    small = {Total.DATA_NS: 3 * MS, Total.RUN_QUEUE_NS: 2 * MS, Total.CPU_NS: 18 * MS}
    (slow,) = slow_ranks(whole_spans(job(BALANCED, SLOW | small, BALANCED)), AT_THE_END)
    assert slow.cause is not None and slow.cause.kind == "computing"
    bare = {total: SLOW[total] for total in (Total.WORKED_NS, Total.TIMES_LAST, Total.HELD_UP_NS)}
    others = {total: BALANCED[total] for total in bare}
    assert sentences(job(others, bare, others)) == [f"{WAITED} The cause is not known."]


@pytest.mark.parametrize(
    "ranks",
    [
        job(BALANCED, BALANCED, BALANCED),
        job(BALANCED),
        [],
        [rank_that(0, BALANCED), rank_that(1, {}, steps=0)],  # one that has ended no second backward
        # Each is late in turn, and all work equally long: no rank is to blame.
        job(*[SLOW | {Total.TIMES_LAST: 0.5, Total.HELD_UP_NS: 4 * MS}] * 2),
        # It works longer by less than a tenth of the step.
        job(BALANCED, SLOW | {Total.WORKED_NS: 11.9 * MS, Total.HELD_UP_NS: 1.9 * MS}),
        job(BALANCED, SLOW, steps=19),
        job(BALANCED, SLOW, steps=100),  # the others have waited for 0.8 s
        # A checkpoint now and then, for 8 s in all.
        job(SLOW | {Total.TIMES_LAST: 0.01}, BALANCED),
    ],
)
def test_nothing_is_said_when_it_did_not_matter(ranks: Sequence[RankRecording]):
    assert sentences(ranks) == []


def test_long_waits_count_however_rare_they_are():
    (sentence,) = sentences(job(SLOW | {Total.TIMES_LAST: 0.01}, BALANCED, steps=2000))
    assert sentence.startswith(
        "the others waited for rank 0 of 2 (host b) in 1 % of 2000 steps, 8.0 of 20.0 ms"
    )


def test_one_long_wait_is_not_shown_as_every_step():
    ranks = job(BALANCED, SLOW | {Total.CPU_NS: 17 * MS}, BALANCED)
    ranks[1].first[Total.LONGEST_HELD_UP_NS], ranks[1].last[Total.LONGEST_HELD_UP_NS] = 0.0, 7.5e9
    assert sentences(ranks) == [
        "the others waited for rank 1 of 3 (host b) in 100 % of 1000 steps, for 8.0 s in all, 7.5 s of it in "
        "one step. Why, as means of all steps: it computed for 17.0 ms per step, the others 9.0 ms."
    ]
    # The longest wait is less than half of all, or was before the steps that are looked at.
    for first, last in ((0.0, 3.9e9), (7.5e9, 7.5e9)):
        ranks[1].first[Total.LONGEST_HELD_UP_NS], ranks[1].last[Total.LONGEST_HELD_UP_NS] = first, last
        assert sentences(ranks) == [f"{WAITED} Why: it computed for 17.0 ms per step, the others 9.0 ms."]


def test_the_longest_wait_for_a_rank_is_kept():
    model = Model()
    assert model.totals.read()[Total.LONGEST_HELD_UP_NS] == 0
    model.recent_ns = [[5, 9, 5], [5, 5, 45]]
    assert model.totals.read()[Total.LONGEST_HELD_UP_NS] == 40
    model.recent_ns = [[5, 9, 5], [5, 5, 15]]
    longest = model.totals.read()
    assert longest[Total.LONGEST_HELD_UP_NS] == 40
    assert sum_of((longest, {Total.LONGEST_HELD_UP_NS: 30.0}))[Total.LONGEST_HELD_UP_NS] == 40


def test_of_many_slow_ranks_the_slowest_three_are_named():
    slower = [SLOW | {Total.WORKED_NS: (18 + rank) * MS, Total.TIMES_LAST: 0.3} for rank in range(4)]
    found = sentences(job(*[BALANCED] * 60, *slower))
    named = [sentence.removeprefix("the others waited for ").split(" of ")[0] for sentence in found]
    assert named == ["rank 63", "rank 62", "rank 61"]


def test_a_warning_comes_once_for_each_rank_and_cause_and_only_when_it_lasts():
    def ranks(steps: int, *each_step: Totals) -> list[RankRecording]:
        return job(*each_step, steps=steps)

    data = SLOW | {Total.DATA_NS: 9 * MS}
    quick = BALANCED | {Total.DATA_NS: 0}
    watch = SlowWatch()
    assert watch.look([]) == watch.look(ranks(0, quick, data)) == []
    assert watch.look(ranks(499, quick, data)) == []  # not yet 10 s
    (sentence,) = watch.look(ranks(500, quick, data))
    assert sentence.startswith(
        "the others waited for rank 1 of 2 (host b) in 100 % of the last 500 steps, 8.0 of"
    )
    assert watch.look(ranks(5000, quick, data)) == []  # it has been reported
    # Long steps: not before a hundred of them.
    watch = SlowWatch(WHILE_IT_RUNS)
    assert watch.look(ranks(0, quick, data)) == []
    slowly = ranks(99, quick, data)
    for each in slowly:
        each.last[Total.TIME_NS] += 1e12
    assert watch.look(slowly) == []


def test_what_is_over_is_not_warned_of():
    watch = SlowWatch()
    watch.look(job(BALANCED, SLOW, steps=0))
    assert watch.look(job(BALANCED, BALANCED, steps=1000)) == []
    late = job(BALANCED, BALANCED, steps=2000)
    for total in (Total.WORKED_NS, Total.TIMES_LAST, Total.HELD_UP_NS):
        late[1].last[total] += 1000 * (SLOW[total] - BALANCED[total])
    (sentence,) = watch.look(late)
    assert "100 % of the last 1000 steps, 8.0 of" in sentence


DATA = SLOW | {Total.DATA_NS: 9 * MS}
QUICK = BALANCED | {Total.DATA_NS: 1 * MS}


def test_who_looks_now_learns_the_cause_of_now():
    causes = CauseWatch()
    assert causes.of(1) is None  # no one has looked
    causes.look(job(QUICK, DATA, steps=100))
    found = causes.of(1)
    assert found is not None and found.kind == "data"
    assert found.text == "its data loading took 9.0 ms per step, that of the others 1.0 ms"
    assert causes.of(0) is causes.of(7) is None  # quicker than the other; not there
    # 60 s later it is the processor, for longer than the window.
    for steps in (1000, 2000, 3000):
        ranks = job(QUICK, DATA, steps=100)
        for each, more in zip(ranks, (QUICK, QUICK | {Total.WORKED_NS: 18 * MS, Total.CPU_NS: 17 * MS})):
            for total, value in more.items():
                each.last[total] += steps * value
            each.last[Total.BACKWARDS] += steps
            each.last[Total.TIME_NS] += steps * STEP_MS * MS
        causes.look(ranks)
    found = causes.of(1)
    assert found is not None and found.kind == "computing"


def test_the_cause_needs_another_rank_that_has_come_as_far():
    causes = CauseWatch()
    causes.look([rank_that(1, DATA), rank_that(0, {}, steps=0)])
    assert causes.of(1) is None


@pytest.mark.parametrize("width", [40, 100])
def test_top_says_why_a_rank_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int):
    written(tmp_path, job(QUICK, DATA))
    monkeypatch.setattr(
        watch, "snapshot", lambda *given: replace(snapshot.snapshot(*given), slow_rank=1, waited_for={1: 0.4})
    )
    job_watch = watch.JobWatch(tmp_path)
    now = job_watch.look()
    assert now.cause == "its data loading took 9.0 ms per step, that of the others 1.0 ms"
    assert watch.as_plain(job_watch, now)["cause"] == now.cause
    console = Console(file=io.StringIO(), width=width)
    console.print(top.frame(job_watch, now, console))
    text = " ".join(console.file.getvalue().split())
    assert f"rank 1 is slow: 40% of all time waits for it {now.cause}" in text


# --- totals ---


def test_totals_come_back_from_their_bytes_and_half_a_change_does_not():
    totals = {Total.BACKWARDS: 3.0, Total.CPU_NS: 2.0**52 + 1}
    table = pack_totals(9, totals)
    assert unpack_totals(table) == totals
    assert unpack_totals(pack_totals(10, totals)[:8] + table[8:]) == {}
    assert unpack_totals(bytes(len(table))) == {}
    assert sum_of((totals, {Total.BACKWARDS: 1.0})) == {Total.BACKWARDS: 4.0, Total.CPU_NS: 2.0**52 + 1}


class Model:
    """A model on rank 1 of two."""

    def __init__(self) -> None:
        self.passes = 0
        self.recent_ns: list[list[int]] = [[], []]
        self.records = _core.BackwardRecords(samples_in)
        self.totals = ModelTotals(1, self.times, self.records)

    def times(self) -> _core.BackwardTimes:
        times = _core.BackwardTimes(2)
        times.backwards = self.passes
        times.worked_ns = [1, 10 * self.passes]
        times.times_last = [2, self.passes]
        times.held_up_ns = [3, 100 * self.passes]
        times.recent_ns = self.recent_ns
        return times


def test_a_process_writes_its_totals_and_keeps_those_of_models_that_are_gone(tmp_path: Path):
    recording = Recording()
    first, second = Model(), Model()
    number = recording.number_model(first.totals)
    recording.number_model(second.totals)
    recording.start(ring_file.path_of(tmp_path, 1), 1, 2, 64)
    try:
        recording.sample(time.monotonic_ns())
        before = time.monotonic_ns()
        first.passes, second.passes = 5, 7
        second.totals.weight = 2.5
        second.records.begin_forward(0, True, True, (np.zeros((64, 3)),), {})
        recording.forget(number)
        del first
        gc.collect()
        recording.sample(time.monotonic_ns())  # within the same second: nothing
        end = recording.enlarge(1, 2, 128)
        recording.sample(time.monotonic_ns())
        found = ring_file.read_start(ring_file.path_of(tmp_path, 1))
        end()
        recording._sample_last()
        whole = ring_file.read(ring_file.path_of(tmp_path, 1).read_bytes())
    finally:
        recording._stop()
    assert found is not None and whole is not None
    for each in (found, whole):
        assert each.first[Total.BACKWARDS] == 0 and each.last[Total.BACKWARDS] == 12
        assert each.last[Total.WORKED_NS] == 120 and each.last[Total.HELD_UP_NS] == 1200
        assert (each.last[Total.WEIGHT], each.last[Total.SAMPLES]) == (2.5, 64)
        assert each.first[Total.TIME_NS] <= before <= each.last[Total.TIME_NS]
        assert each.last[Total.CPU_NS] >= each.first[Total.CPU_NS] > 0
        assert Total.DATA_NS not in each.last  # no one has looked
    assert found.header == ring_file.RankHeader(1, 2, os.getpid(), *_rest(found.header))


def _rest(header: RankHeader) -> tuple[str, str, int, int, int]:
    return header.host, header.boot, header.monotonic_ns, header.real_ns, 128


def test_batches_are_timed_while_something_is_recorded(tmp_path: Path, monkeypatch):
    recording = Recording()
    monkeypatch.setattr("paceline.trace.recording.recording", recording)
    timed = batches()
    records = recording._timed[Total.DATA_NS]
    timed.around(lambda: None)()
    assert records.total_ns == 0  # nothing was recorded
    recording.start(None, 0, 1, 64)
    try:
        with pytest.raises(StopIteration):
            timed.around(lambda: next(iter(())))()
        assert 0 < records.total_ns < 1e9
        found = recording.read()
    finally:
        recording._stop()
    assert found is not None
    assert [record.event for record in found.records] == [Event.DATA_BEGAN, Event.DATA_ENDED]


# --- the sentences for people ---


def written(folder: Path, ranks: Sequence[RankRecording]) -> None:
    """The files of ranks that have recorded this."""
    for each in ranks:
        memory = ring_file.create(ring_file.path_of(folder, each.header.rank), 64)
        header = RankHeader(each.header.rank, len(ranks), 1, "b", "boot", 0, time.time_ns(), 64)
        ring_file.write_header(memory, header)
        ring_file.write_totals(memory, each.first, 1, is_first=True)
        ring_file.write_totals(memory, each.last, 2)


@pytest.mark.parametrize(("exit_status", "is_said"), [(0, True), (1, False)])
def test_a_job_that_ended_well_says_who_was_slow(tmp_path: Path, exit_status: int, is_said: bool):
    said: list[str] = []
    recording = JobRecording(
        tmp_path, is_own=False, output=None, name="x", nprocs=3, launcher=1, say=said.append
    )
    written(tmp_path, job(BALANCED, SLOW | {Total.CPU_NS: 17 * MS}, BALANCED))
    recording.end(exit_status)
    found = [line for line in said if WAITED in line]
    assert (
        found == [f"paceline: {WAITED} Why: it computed for 17.0 ms per step, the others 9.0 ms."] * is_said
    )


def test_what_an_earlier_job_left_in_the_folder_is_not_said(tmp_path: Path):
    said: list[str] = []
    written(tmp_path, job(BALANCED, SLOW))
    time.sleep(0.001)
    JobRecording(tmp_path, is_own=False, output=None, name="x", nprocs=2, launcher=1, say=said.append).end(0)
    assert said == []


@pytest.mark.parametrize("num_records", [0, 3])
def test_a_failed_job_offers_its_last_iterations_if_there_are_any(tmp_path: Path, num_records: int):
    said: list[str] = []
    written(tmp_path, job(BALANCED, BALANCED))
    with (tmp_path / "rank1.ring").open("r+b") as file:
        file.seek(ring_file.COUNT_AT)
        file.write(num_records.to_bytes(8, "little"))
    JobRecording(tmp_path, is_own=False, output=None, name="x", nprocs=2, launcher=1, say=said.append).end(1)
    assert said == [f"paceline: `paceline trace {tmp_path}` shows the last iterations of each rank"] * bool(
        num_records
    )


def test_paceline_trace_says_it_too(tmp_path: Path, capsys):
    written(tmp_path, job(BALANCED, SLOW, BALANCED))
    assert cli.main([f"{tmp_path}/"]) == 0
    assert f"\n{WAITED} Why: it waited for something else" in capsys.readouterr().out
