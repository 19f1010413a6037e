"""Recordings that no rank has written: folders of other users, pipes instead of files, damaged files.

Every reader (`paceline trace`, `paceline top`, the page's reader, the launcher's) either shows the contents
or raises one Paceline error. None waits, and none writes a control character to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import stacks
from paceline.cli import main as paceline_command
from paceline.errors import ConfigError
from paceline.launch.trace_file import JobRecording
from paceline.monitor import top, watch
from paceline.monitor.watch import JobWatch
from paceline.trace import cli, jobs
from paceline.trace.recording import Recording
from paceline.trace.records import RECORD_BYTES, Event, backward_id, float_bits
from paceline.trace.remote_ranks import RemoteRanks, Words, pack_figures
from paceline.trace.ring_file import COUNT_AT, NOTES_AT, NOTES_USED_AT, RECORDS_AT, RankHeader, path_of
from paceline.trace.totals import TABLE_BYTES, Total

ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202e"
NOBODY = 65534


@pytest.fixture
def own_jobs(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(jobs.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def readers(folder: Path) -> list[Callable[[], object]]:
    """All readers of a folder, each as its command does it."""
    trace = folder.parent / "trace.json"
    return [
        lambda: cli.main([str(folder), "--output", str(trace)]),
        lambda: top.main([str(folder), "--once"]),
        lambda: top.main([str(folder), "--json"]),
        lambda: [JobWatch(folder).look() for _ in range(2)],
    ]


def job(folder: Path, name: str = "train.py") -> Path:
    """A job of one rank here and one on another host, whose launcher is this process, which still runs."""
    jobs.begin(folder, jobs.JobFacts(name, os.getpid(), 1, time.time()))
    ring = Recording()
    ring.start(path_of(folder, 0), 0, 2, 64)
    try:
        ring.note_facts("model", 0, rank=0, world_size=2, path="region")
        ring.note_facts("buckets", 0, buckets=[[400, "a ... b"], [40, "c"]])
        number = ring.number_name("loss")
        for step in range(1, 8):
            key = backward_id(0, step)
            ring.note(Event.FORWARD_BEGAN, key, 8 << 1 | 1)
            ring.note(Event.FORWARD_ENDED, key, 0)
            ring.note(Event.BACKWARD_BEGAN, key, 0)
            ring.note(Event.POSTED, 0, 0)
            ring.note(Event.BACKWARD_ENDED, key, 0)
            now_ns = time.monotonic_ns()
            ring.note(Event.REDUCED, now_ns, 1 << 32 | 3)
            ring.note(Event.WAITED, now_ns, 1)
            ring.note(Event.AVERAGING_ENDED, key, 0)
            ring.note(Event.LOGGED, number, float_bits(0.5))
        ring.sample(time.monotonic_ns())
        ring.note_failure(ValueError("boom"))
    finally:
        ring._stop()
    totals = dict.fromkeys(Total, 1.0)
    far = RankHeader(1, 2, 4711, "node1", "boot", 0, time.time_ns(), 64)
    last = dict.fromkeys(Total, 1000000000.0)
    RemoteRanks(lambda: folder).take(
        1, pack_figures(far, totals, last, Words(7, {"loss": 0.5}, "Boom", 1 << 20))
    )
    return folder


# --- folders of others ---


@pytest.fixture
def squatted(own_jobs: Path, monkeypatch) -> Path:
    """The folder of this user, which another one has created first, and filled."""
    folder = jobs.users_folder()
    ours = job(folder / "abcdef", f"train{ESCAPE}.py")
    path_of(ours, 0).unlink()
    (ours / "job.json").unlink()
    os.mkfifo(ours / "job.json")
    os.mkfifo(path_of(ours, 0))
    os.mkfifo(ours / "rank1.remote.new")
    if os.geteuid():
        monkeypatch.setattr(jobs.os, "getuid", lambda: NOBODY)
        folder.rename(jobs.users_folder())
        return jobs.users_folder()
    os.chown(folder, NOBODY, NOBODY)
    return folder


def test_who_has_taken_the_folder_is_reported(squatted: Path):
    for call in (lambda: cli.main([]), lambda: cli.main(["abcdef"]), lambda: top.main([])):
        with pytest.raises(ConfigError) as caught:
            call()
        assert f"{squatted} belongs to " in str(caught.value) and "(uid " in str(caught.value)
    said: list[str] = []
    recording = JobRecording(
        jobs.new_folder(),
        is_own=True,
        output=None,
        name="train.py",
        nprocs=1,
        launcher=os.getpid(),
        say=said.append,
    )
    recording.begin()
    recording.end(0)
    assert len(said) == 1 and f"{squatted} belongs to " in said[0]


def test_a_rank_says_who_has_taken_the_folder(squatted: Path, monkeypatch):
    monkeypatch.setenv("PACELINE_TRACE_DIR", str(jobs.new_folder()))
    with pytest.warns(RuntimeWarning, match=f"{squatted} belongs to .*uid"):
        Recording().begin_if_asked(0, 1)


def test_pipes_and_links_in_the_place_of_files_hang_no_reader(tmp_path: Path):
    folder = tmp_path / "strange"
    folder.mkdir()
    os.mkfifo(folder / "job.json")
    for rank, make in enumerate((os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"))):
        make(folder / f"rank{rank}.ring")
        make(folder / f"rank{rank}.remote")
    for read in readers(folder):
        with contextlib.suppress(ConfigError):
            read()


def test_no_text_of_a_recording_controls_the_terminal(own_jobs: Path, capsys):
    folder = job(jobs.new_folder(), f"train{ESCAPE}.py")
    bad = Recording()
    bad.start(path_of(folder, 0), 0, 2, 64)
    try:
        bad.note(Event.AVERAGING_ENDED, backward_id(0, 1), 0)
        bad.note(Event.LOGGED, bad.number_name(f"loss{ESCAPE}"), float_bits(1.0))
        bad.note(Event.AVERAGING_ENDED, backward_id(0, 2), 0)
        bad.note_failure(ValueError(ESCAPE + " \ud800"))
    finally:
        bad._stop()
    far = RankHeader(1, 2, 4711, f"node{ESCAPE}", "boot", 0, time.time_ns(), 64)
    words = Words(7, {f"x{ESCAPE}": 0.5}, ESCAPE, None)
    RemoteRanks(lambda: folder).take(1, pack_figures(far, {}, {Total.TIME_NS: 1.0}, words))
    assert cli.main([]) == 0
    assert cli.main([folder.name]) == 0
    assert top.main([folder.name, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "train" in shown and "ValueError" in shown and "node" in shown
    assert not set(shown) & set(ESCAPE) - set("]0;owned[31m")
    top.main([folder.name, "--json"])
    plain = json.dumps(json.loads(capsys.readouterr().out), ensure_ascii=False)
    assert not set(plain) & set(ESCAPE) - set("]0;owned[31m")
    shown.encode()


def test_no_name_of_a_folder_controls_the_terminal(own_jobs: Path, tmp_path: Path, capsys, monkeypatch):
    """For example in another user's folder, matched by a shell's `*`. Nor do texts of a process."""
    folder = tmp_path / f"job{ESCAPE}"
    folder.mkdir()
    assert paceline_command(["trace", str(folder)]) == 2
    assert paceline_command(["trace", f"{folder}/none"]) == 2
    assert paceline_command(["top", str(folder), "--once"]) == 0
    monkeypatch.setattr(stacks, "ask", lambda _: ESCAPE + "\n")
    assert paceline_command(["stacks", "1"]) == 0
    shown = "".join(capsys.readouterr())
    assert shown.count("job") >= 3
    assert not set(shown) & set(ESCAPE) - set("]0;owned[31m")


# --- damaged files ---

INTEGERS = (0, 1, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (float("inf"), -float("inf"), 1e308, -1e308, 0.0, -1.0, float("nan"))
VALUES = (
    None,
    True,
    -1,
    10**400,
    1.5,
    "x",
    "\ud800",
    "",
    [],
    {},
    [[]],
    {"a": []},
    [[1]],
    [["x", 1]],
    float("inf"),
)


def as_json(value: object) -> bytes:
    with contextlib.suppress(ValueError):
        return json.dumps(value).encode()
    return b"1" * 400


def changed(value: object, random_: random.Random) -> object:
    """The same JSON with one change."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        name = random_.choice(list(value))
        if random_.random() < 0.2:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: changed(value[name], random_)}
    if isinstance(value, list) and value and random_.random() < 0.7:
        at = random_.randrange(len(value))
        return [*value[:at], changed(value[at], random_), *value[at + 1 :]]
    return random_.choice(VALUES)


def damage_job(data: bytes, random_: random.Random) -> bytes:
    choice = random_.randrange(4)
    if choice == 0:
        return b"[" * random_.choice((1, 5000, 100_000))
    if choice == 1:
        return data[: random_.randrange(len(data))]
    return as_json(changed(json.loads(data), random_))


def damage_ring(data: bytes, random_: random.Random) -> bytes:
    """One of the kinds of damage that a file of a rank may have."""
    raw = bytearray(data)
    kind = random_.randrange(8)
    if kind == 0:  # cut off, or longer
        return bytes(raw[: random_.choice((0, 7, 100, 520, 4095, 4096, 65536, len(raw) - 1))])
    if kind == 1:  # any bytes
        for _ in range(random_.randrange(1, 40)):
            raw[random_.randrange(len(raw))] = random_.randrange(256)
    elif kind == 2:  # a field of the header
        at = random_.choice((8, 12, 16, 20, 24, 28, 32, 40, 48, 112))
        size, value = random_.choice((4, 8)), random_.choice(INTEGERS)
        raw[at : at + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    elif kind == 3:  # counts
        struct.pack_into(
            "<Q", raw, random_.choice((COUNT_AT, NOTES_USED_AT)), random_.choice(INTEGERS) % 2**64
        )
    elif kind == 4:  # totals
        at = random_.choice((1024, 2048)) + 8 * random_.randrange(TABLE_BYTES // 8)
        struct.pack_into("<d", raw, at, random_.choice(FLOATS))
    elif kind == 5 and len(raw) > RECORDS_AT:  # fields of records
        for _ in range(random_.randrange(1, 20)):
            at = RECORDS_AT + RECORD_BYTES * random_.randrange((len(raw) - RECORDS_AT) // RECORD_BYTES)
            place, form = random_.choice(
                ((0, "<q"), (8, "<I"), (12, "<H"), (14, "<H"), (16, "<q"), (24, "<q"))
            )
            size = struct.calcsize(form)
            value = random_.choice((*INTEGERS, random_.randrange(30)))
            raw[at + place : at + place + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    elif kind == 6:  # a note, or the words of a rank of another host
        _change_text(raw, random_)
    elif kind == 7 and len(raw) > RECORDS_AT:
        raw[NOTES_AT : NOTES_AT + 50_000] = b"[" * 50_000
        struct.pack_into("<Q", raw, NOTES_USED_AT, 50_000)
    return bytes(raw)


def _change_text(raw: bytearray, random_: random.Random) -> None:
    if len(raw) == NOTES_AT:
        at, size = 3096, struct.unpack_from("<I", raw, 3092)[0]
        data = as_json(changed(json.loads(bytes(raw[at : at + size])), random_))[:900]
        raw[at : at + len(data)] = data
        struct.pack_into("<I", raw, 3092, len(data))
        return
    used = struct.unpack_from("<Q", raw, NOTES_USED_AT)[0]
    lines = bytes(raw[NOTES_AT : NOTES_AT + used]).splitlines()
    at = random_.randrange(len(lines))
    lines[at] = as_json(changed(json.loads(lines[at]), random_))
    data = b"".join(line + b"\n" for line in lines)
    raw[NOTES_AT : NOTES_AT + len(data)] = data
    struct.pack_into("<Q", raw, NOTES_USED_AT, len(data))


def _read(read: Callable[[], object], what: str) -> str:
    """The beginning of the Paceline error that a reader raises; "": none."""
    try:
        read()
    except ConfigError as error:
        return str(error).split(":")[0]
    except BaseException as error:
        raise AssertionError(what) from error
    return ""


SEEDS = int(os.environ.get("PACELINE_TEST_RECORDINGS", "100"))


def test_damaged_recordings_are_one_error(own_jobs: Path, capsys, monkeypatch):
    """More with PACELINE_TEST_RECORDINGS=10000."""
    # The rank is this process, whose thousands of mappings the kernel takes long to sum up.
    read_pss = watch._read_pss
    monkeypatch.setattr(watch, "_read_pss", lambda pid: 1 << 20 if pid == os.getpid() else read_pss(pid))
    folder = job(jobs.new_folder())
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    found = set()
    for seed in range(SEEDS):
        random_ = random.Random(seed)
        for path, data in whole.items():
            path.write_bytes(data)
        path = random_.choice(list(whole))
        path.write_bytes((damage_job if path.suffix == ".json" else damage_ring)(whole[path], random_))
        found |= {_read(read, f"seed {seed}, {path.name}") for read in readers(folder)}
        launcher = JobRecording(
            folder, is_own=False, output=None, name="", nprocs=1, launcher=1, say=lambda _: None
        )
        launcher._look_at = 0.0
        launcher.look()
        launcher.end(0)
        capsys.readouterr()
    assert "This recording is damaged" in found
