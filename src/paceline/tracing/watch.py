"""Watches a job that runs, from another process: its folder, its ranks' files, and /proc.

Imports its neighbours, errors and the standard library.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.tracing import jobs
from paceline.tracing.far_ranks import far_ranks
from paceline.tracing.jobs import JobFacts
from paceline.tracing.live import JobSnapshot, RankWindow, snapshot
from paceline.tracing.ring_file import RankRecording, paths_in, read_start
from paceline.tracing.slow import CauseWatch
from paceline.tracing.tail import RingTail
from paceline.tracing.usage import resident_bytes

_PSS_EVERY_S = 10.0  # the kernel walks through all pages of the rank


class JobWatch:
    """Follows one job; each `look` tells what it does now.

    Args:
        folder: Where its ranks record.

    Attributes:
        facts: What its launcher has told; None: it was started by another launcher.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: JobFacts | None = jobs.facts_of(folder)
        self._tails: dict[Path, RingTail] = {}
        self._causes = CauseWatch()
        self._memory: dict[int, tuple[float, int]] = {}  # of each process: when to look again, its PSS

    @property
    def id(self) -> str:
        """What `paceline trace` calls the job."""
        return self.folder.name

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed although the job runs, so that nothing more can be seen of it."""
        facts = self.facts
        return not self.folder.exists() and (facts is None or facts.is_running)

    @property
    def has_ended(self) -> bool:
        """Whether the job is over, as far as anybody can tell."""
        if self.facts is None:
            return bool(self._tails) and not any(
                _is_alive(tail.header.pid) for tail in self._tails.values() if tail.header is not None
            )
        facts = jobs.facts_of(self.folder)
        return facts is None or not facts.is_running

    def look(self) -> JobSnapshot:
        """What its ranks do now."""
        for path in paths_in(self.folder):
            if path not in self._tails:
                self._tails[path] = RingTail(path)
        windows = []
        for tail in self._tails.values():
            tail.look()
            if tail.header is not None:
                windows.append(self._window(tail))
        here = {each.header.rank for each in windows}
        far = [each for each in far_ranks(self.folder) if each.recording.header.rank not in here]
        self._causes.look([*self._totals(), *(each.recording for each in far)])
        windows.sort(key=lambda each: each.header.rank)
        now = snapshot(windows, time.monotonic_ns(), far, self._causes.spans)
        cause = None if now.slow_rank is None else self._causes.of(now.slow_rank)
        return now if cause is None else replace(now, cause=cause.text)

    def _totals(self) -> list[RankRecording]:
        found = []
        for path, tail in self._tails.items():
            with suppress(OSError):
                start = read_start(path)
                if start is not None and tail.header is not None and start.header.pid == tail.header.pid:
                    found.append(start)
        return found

    def _window(self, tail: RingTail) -> RankWindow:
        header = tail.header
        assert header is not None
        memory, is_shared = self._memory_of(header.pid)
        return RankWindow(
            header=header,
            records=tail.records,
            names={note["number"]: note["name"] for note in tail.notes if note.get("what") == "value"},
            failures=[
                (note["time_ns"], note["text"]) for note in tail.notes if note.get("what") == "failure"
            ],
            is_alive=_is_alive(header.pid),
            memory_bytes=memory,
            is_memory_shared=is_shared,
        )

    def _memory_of(self, pid: int) -> tuple[int | None, bool]:
        """Its memory, and whether what it shares with other ranks counts in full."""
        when_s, pss = self._memory.get(pid, (0.0, 0))
        if time.monotonic() >= when_s:
            pss = _read_pss(pid)
            self._memory[pid] = time.monotonic() + _PSS_EVERY_S, pss
        if pss:
            return pss, False
        return resident_bytes(pid), True


def as_plain(watch: JobWatch, now: JobSnapshot) -> dict[str, Any]:
    """A snapshot as JSON can hold it: numbers that are not finite become words."""
    facts = watch.facts
    told = {
        "job": watch.id,
        "name": "" if facts is None else facts.name,
        "started_s": None if facts is None else facts.started_s,
        "is_running": not watch.has_ended,
    }
    found: dict[str, Any] = plain({**told, **asdict(now)})
    return found


def find_running(name: str | None) -> Path:
    """The folder of a job that runs: by its id, its launcher's process id, or a folder; None: the only one.

    Raises:
        ConfigError: There is no such job, it has ended, or there are several.
    """
    if name is not None:
        folder = jobs.find(name)
        try:
            os.listdir(folder)
        except OSError as error:
            raise ConfigError(
                f"What the job records can't be read: {folder}.",
                seen=error.strerror or str(error),
                likely="it is another user's" if isinstance(error, PermissionError) else "",
            ) from error
        facts = jobs.facts_of(folder)
        if facts is not None and not facts.is_running:
            raise ConfigError(
                f"Job {folder.name} ({facts.name}) has ended: {facts.state}.",
                hint=f"`paceline trace {folder.name}` shows its last passes",
            )
        return folder
    running = [(folder, facts) for folder, facts in jobs.jobs() if facts.is_running]
    if not running:
        raise ConfigError(
            "No job of yours is running.",
            where=str(jobs.users_folder()),
            seen=jobs.squatter() or jobs.folders_of_others(),
            likely="it was started by another launcher than `paceline run` or spawn, or with another TMPDIR",
            hint="of another launcher: set PACELINE_TRACE_DIR to a folder for it, and name the folder here",
        )
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} jobs of yours are running; name one of them.",
            seen=", ".join(
                f"{folder.name} ({facts.name}, {facts.nprocs} ranks)" for folder, facts in running
            ),
        )
    return running[0][0]


def _is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def _read_pss(pid: int) -> int:
    """0: this kernel, or this process, does not tell."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
