"""Records what this process does into a ring, while recording is on.

Code that records an event reads `recording.note` first. It is None while recording is off, and that check is
the whole cost then. A recording begins if the launcher has set its variable, or when `trace()` of a model is
called. The memory of a ring stays mapped until the process ends, because another thread may still be writing
a record.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, final

from paceline import _core
from paceline.errors import warn
from paceline.trace import jobs, ring_file
from paceline.trace.batch_size import shape_of_batch
from paceline.trace.records import Event, backward_of
from paceline.trace.remote_ranks import Words, pack_figures
from paceline.trace.ring_file import (
    BATCHES_VARIABLE,
    CAPACITY_VARIABLE,
    FLIGHT_RECORDS,
    FOLDER_VARIABLE,
    RankHeader,
    RankRecording,
)
from paceline.trace.totals import ModelTotals, Total, Totals, sum_of
from paceline.trace.usage import UsageReader, resident_bytes

_Function = TypeVar("_Function", bound=Callable[..., Any])
_BATCH = int(Event.BATCH)
_SAMPLE_EVERY_NS = 1_000_000_000
MOST_NAMES = 64
"""How many names a program can log values under. The notes with the names must leave room for other notes."""


@final
class Recording:
    """The recording of this process.

    Attributes:
        note: Records an event and its two numbers; None: recording is off.
        has_batches: Whether wrappers are to call `note_batch` for each batch.
        keeps_all: Whether everything is recorded, including what needs hooks in the framework.
        next_sample_ns: When the totals are to be written next, by CLOCK_MONOTONIC.
        report_to_host: Sends a report to the host of rank 0, without waiting; None: this is that host, or
            the only one.
        logged: The last values that the program has logged, by name.
    """

    __slots__ = (
        "__weakref__",
        "_facts",
        "_first",
        "_gone",
        "_header",
        "_last",
        "_last_failure",
        "_memory",
        "_models",
        "_names",
        "_num_models",
        "_num_samples",
        "_path",
        "_place",
        "_steps",
        "_timed",
        "_usage",
        "has_batches",
        "keeps_all",
        "logged",
        "next_sample_ns",
        "note",
        "report_to_host",
    )

    def __init__(self) -> None:
        self.note: Callable[[int, int, int], None] | None = None
        self.has_batches = False
        self._memory: mmap.mmap | None = None
        self._path: Path | None = None
        self._place = (0, 1)
        self._usage: UsageReader | None = None
        self.next_sample_ns = 0
        self.keeps_all = False
        self._timed: dict[Total, _core.TimedRecords] = {}  # optimizer steps and data loading
        self._header: RankHeader | None = None
        self._first: Totals = {}
        self._last: Totals = {}
        self._steps: dict[int, int] = {}  # of each model, its last backward when the totals were written
        self.report_to_host: Callable[[bytes], object] | None = None
        self.logged: dict[str, float] = {}
        self._num_samples = 0
        self._models: dict[int, ModelTotals] = {}
        self._gone: Totals = {}  # of models that were passed to `forget`
        self._num_models = 0
        self._last_failure = ""
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}  # notes that a new ring must repeat
        self._names: dict[str, int] = {}  # of logged values, with their numbers; likewise
        os.register_at_fork(after_in_child=self._stop)

    def begin_if_asked(self, rank: int, world_size: int) -> None:
        """Start recording, if the launcher has asked for it and this process does not record yet.

        If the folder can't be written to, or the disk is full, this only warns, and training goes on.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder or self.note is not None:
            return
        rank, world_size = _place_in_job(rank, world_size)
        path = ring_file.path_of(Path(folder), rank)
        if _is_of_other_process(path):
            return  # this process was started by the rank that records there
        capacity = os.environ.get(CAPACITY_VARIABLE, "")
        try:
            self.start(path, rank, world_size, int(capacity) if capacity.isdigit() else FLIGHT_RECORDS)
        except OSError as error:
            why = jobs.squatter() or error.strerror
            warn(f"Rank {rank} of {world_size} records nothing: {path} can't be made ({why}).")

    @property
    def folder(self) -> Path | None:
        return None if self._path is None else self._path.parent

    def begin_if_batches_count(self, rank: int, world_size: int) -> None:
        """As `begin_if_asked`, but only under `paceline tune`: for a single rank, which averages nothing."""
        if os.environ.get(BATCHES_VARIABLE):
            self.begin_if_asked(rank, world_size)

    def note_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the size of a batch. Wrappers check `has_batches` first."""
        if (note := self.note) is not None:
            shape = shape_of_batch(args, kwargs)
            note(_BATCH, shape[0], math.prod(shape))

    def start(self, path: Path | None, rank: int, world_size: int, capacity: int) -> None:
        """Start recording into a new file; `path` None: into a file without a name."""
        capacity = 1 << max(6, (capacity - 1).bit_length())
        memory = ring_file.create(path, capacity)
        header = RankHeader(
            rank,
            world_size,
            os.getpid(),
            socket.gethostname(),
            _boot_id(),
            time.monotonic_ns(),
            time.time_ns(),
            capacity,
        )
        ring_file.write_header(memory, header)
        self._memory, self._path, self._place = memory, path, (rank, world_size)
        self._header = header
        for fact in self._facts.values():
            ring_file.add_note(memory, fact)
        for name, number in self._names.items():
            ring_file.add_note(memory, _named(name, number))
        self._record_into(memory)
        if self._usage is None:
            self._usage = UsageReader()
            atexit.register(self._sample_last)
        self.next_sample_ns = 0
        if self._first:
            ring_file.write_totals(memory, self._first, 1, is_first=True)
        self.has_batches = bool(os.environ.get(BATCHES_VARIABLE))
        self.keeps_all = capacity > FLIGHT_RECORDS or bool(os.environ.get(CAPACITY_VARIABLE))

    def enlarge(self, rank: int, world_size: int, capacity: int) -> Callable[[], None]:
        """Record into a larger ring instead of the current one, if any; returns a function that ends that."""
        before = (self._memory, self._path, self._place)
        capacity_before = None if before[0] is None else ring_file.capacity_of(before[0])
        path = self._path
        self.start(path, *(before[2] if capacity_before else (rank, world_size)), capacity)

        def end() -> None:
            if capacity_before is None:
                self._stop()
            else:
                self.start(path, *before[2], capacity_before)

        return end

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        memory = self._memory
        _core.stop_recording()
        self.note = None
        try:
            yield
        finally:
            if memory is not None and memory is self._memory:
                self._record_into(memory)

    def _record_into(self, memory: mmap.mmap) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        capacity = ring_file.capacity_of(memory)
        _core.start_recording(address + ring_file.COUNT_AT, address + ring_file.RECORDS_AT, capacity)
        self.note = _core.record

    def snapshot(self) -> bytes:
        return b"" if self._memory is None else self._memory[:]

    def read(self) -> RankRecording | None:
        return ring_file.read(self.snapshot())

    def number_model(self, totals: ModelTotals) -> int:
        self._num_models += 1
        self._models[self._num_models - 1] = totals
        return self._num_models - 1

    def note_facts(self, what: str, model: int, **facts: Any) -> None:
        """Add a note with what a reader needs to understand the records of a model."""
        fact = {"what": what, "model": model, **facts}
        self._facts[what, model] = fact
        if self._memory is not None:
            ring_file.add_note(self._memory, fact)

    def forget(self, model: int) -> None:
        self._facts = {key: fact for key, fact in self._facts.items() if key[1] != model}
        totals = self._models.pop(model, None)
        if totals is not None:
            self._gone = sum_of((self._gone, totals.read()))

    def note_failure(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"[:2000]
        if self._memory is not None and text != self._last_failure:
            self._last_failure = text
            fact = {"what": "failure", "time_ns": time.monotonic_ns(), "text": text}
            ring_file.add_note(self._memory, fact, is_failure=True)
            self._report_to_host()

    def timed(self, total: Total, began: Event, ended: Event) -> Timed:
        """A timer that records these two events while recording is on, and adds up the time between them."""
        if total not in self._timed:
            self._timed[total] = _core.TimedRecords(began, ended)
        return Timed(self._timed[total])

    def number_name(self, name: str) -> int | None:
        number = self._names.get(name)
        if number is None and len(self._names) < MOST_NAMES:
            number = self._names[name] = len(self._names)
            if self._memory is not None:
                ring_file.add_note(self._memory, _named(name, number))
        return number

    def sample(self, now_ns: int, number: int = 0) -> bool:
        """Write the totals of this process, at most once a second. Called at the end of backward passes."""
        if now_ns < self.next_sample_ns or self._memory is None:
            return False
        self.next_sample_ns = now_ns + _SAMPLE_EVERY_NS
        model, step = backward_of(number)
        self._steps[model] = step
        self._write_totals(now_ns)
        self._report_to_host()
        return True

    def _report_to_host(self) -> None:
        if self.report_to_host is None or self._header is None or not self._last:
            return
        step = self._steps.get(min(self._steps, default=0))
        words = Words(step, self.logged, self._last_failure, resident_bytes())
        self.report_to_host(pack_figures(self._header, self._first, self._last, words))

    def _write_totals(self, now_ns: int) -> None:
        memory, usage = self._memory, self._usage
        if memory is None or usage is None:
            return
        totals = sum_of((self._gone, *(model.read() for model in self._models.values())))
        totals |= usage.read()
        totals[Total.TIME_NS] = now_ns
        totals |= {total: records.total_ns for total, records in self._timed.items()}
        self._num_samples += 1
        self._last = totals
        if not self._first:
            self._first = totals
            ring_file.write_totals(memory, totals, 1, is_first=True)
        ring_file.write_totals(memory, totals, self._num_samples)

    def _sample_last(self) -> None:
        if self._first:
            self._write_totals(time.monotonic_ns())
            self._report_to_host()

    def _stop(self) -> None:
        """Stop recording. Also runs in a forked child, because the ring belongs to its parent."""
        _core.stop_recording()
        self.note = self._memory = self._path = None
        self.has_batches = False
        self.keeps_all = False


recording = Recording()


class Timed:
    """Records the begin and end of an activity that recurs, and adds up its time. Calls must not nest.

    Attributes:
        begin: To be called when it begins; takes any arguments, so that it can be a hook.
        end: To be called when it ends; takes any arguments as well.
    """

    def __init__(self, records: _core.TimedRecords) -> None:
        self.begin, self.end = records.begin, records.end

    def around(self, call: _Function) -> _Function:
        """Wrap a function, so that its calls are recorded while recording is on."""

        @functools.wraps(call)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return call(*args, **kwargs)
            finally:
                self.end()

        return cast(_Function, noting)


def optimizer_steps() -> Timed:
    return recording.timed(Total.OPTIMIZER_NS, Event.OPTIMIZER_BEGAN, Event.OPTIMIZER_ENDED)


def batches() -> Timed:
    return recording.timed(Total.DATA_NS, Event.DATA_BEGAN, Event.DATA_ENDED)


def _named(name: str, number: int) -> dict[str, Any]:
    return {"what": "value", "number": number, "name": name}


def _place_in_job(rank: int, world_size: int) -> tuple[int, int]:
    given = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if all(text.isdigit() for text in given):
        return int(given[0]), int(given[1])
    return rank, world_size


def _is_of_other_process(path: Path) -> bool:
    try:
        before = ring_file.read_header(ring_file.read_bytes(path, ring_file.COUNT_AT))
    except (OSError, ValueError):
        return False
    return before is not None and before.pid != os.getpid() and Path(f"/proc/{before.pid}").exists()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
