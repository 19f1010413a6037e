"""Prepares the folder in which the ranks of a job record, and writes the trace file at its end.

A recording never keeps a job from training. Problems with the file of `--trace` are reported before anything
starts; later problems are only printed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from paceline.errors import ConfigError, PacelineError
from paceline.trace import chrome, jobs
from paceline.trace.remote_ranks import remote_ranks
from paceline.trace.ring_file import (
    CAPACITY_VARIABLE,
    FOLDER_VARIABLE,
    TRACE_RECORDS,
    RankRecording,
    file_bytes,
    has_records,
    paths_in,
    read_start,
)
from paceline.trace.slow_ranks import AT_THE_END, SlowWatch, slow_ranks, whole_spans

_LOOKS_EVERY_S = 5.0


def trace_variables(inherited: Mapping[str, str], folder: Path, *, is_whole: bool) -> dict[str, str]:
    """Environment variables that make the ranks record."""
    variables = {} if inherited.get(FOLDER_VARIABLE) else {FOLDER_VARIABLE: str(folder)}
    return variables | (
        {CAPACITY_VARIABLE: str(TRACE_RECORDS)} if is_whole and not inherited.get(CAPACITY_VARIABLE) else {}
    )


def check_output(path: str, nprocs: int) -> None:
    """Raise unless the trace can be written to `path`, and the ranks have room to record."""
    chrome.check(Path(path))
    _check_room(jobs.users_folder().parent, nprocs, "make room there, or set TMPDIR to another folder")


def _check_room(place: Path, nprocs: int, hint: str) -> None:
    needs, has = nprocs * file_bytes(TRACE_RECORDS), shutil.disk_usage(place).free
    if has < needs:
        raise ConfigError(
            "There is no room for what the ranks record.",
            where=str(place),
            expected=f"{needs >> 20} MiB",
            got=f"{has >> 20} MiB",
            hint=hint,
        )


class JobRecording:
    def __init__(
        self,
        folder: Path,
        *,
        is_own: bool,
        output: str | None,
        name: str,
        nprocs: int,
        launcher: int,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._is_own, self._output, self._say = folder, is_own, output, say
        self._watch, self._look_at = SlowWatch(), time.monotonic() + _LOOKS_EVERY_S
        self._facts, self._began_ns = jobs.JobFacts(name, launcher, nprocs, time.time()), time.monotonic_ns()

    def begin(self) -> None:
        if not self._is_own:
            return
        try:
            jobs.begin(self._folder, self._facts)
        except OSError as error:
            taken = jobs.squatter()
            if self._output is not None or taken:
                reason = taken or f"{self._folder}: {error.strerror or error}"
                self._say(f"paceline: nothing is recorded: {reason}")

    def seconds_to_look(self) -> float:
        return max(0.0, self._look_at - time.monotonic())

    def look(self) -> None:
        """Report ranks that have become slow, if it is time to check."""
        if self.seconds_to_look():
            return
        self._look_at = time.monotonic() + _LOOKS_EVERY_S
        for sentence in self._watch.look(self._totals()):
            self._say(f"paceline: {sentence}")

    def _totals(self) -> list[RankRecording]:
        """The totals of the ranks, without those that an earlier job has left in the user's folder.

        On the host of rank 0, those of all hosts. On other hosts none, because they know no other ranks.
        """
        found: dict[int, RankRecording] = {}
        for path in paths_in(self._folder):
            with suppress(OSError, ConfigError):
                start = read_start(path)
                if start is not None and start.header.real_ns >= self._facts.started_s * 1e9:
                    found[start.header.rank] = start
        is_everywhere = all(each.header.world_size <= self._facts.nprocs for each in found.values())
        if not is_everywhere and 0 not in found:
            return []
        with suppress(ConfigError):
            remote = remote_ranks(self._folder, self._began_ns)
            return list({**{each.recording.header.rank: each.recording for each in remote}, **found}.values())
        return list(found.values())

    def end(self, exit_status: int) -> None:
        """Report which ranks were slow; write the trace, or print how to look at a failed job.

        Removes all files of a job that ended well.
        """
        try:
            if exit_status == 0:
                for slow in slow_ranks(whole_spans(self._totals()), AT_THE_END):
                    self._say(f"paceline: {slow.sentence()}")
            if self._output is not None:
                self._write(Path(self._output))
            elif exit_status and any(map(has_records, paths_in(self._folder))):
                name = self._folder.name if self._is_own else self._folder
                self._say(f"paceline: `paceline trace {name}` shows the last iterations of each rank")
        except PacelineError as error:
            self._say(f"paceline: {error}")
        finally:
            if self._is_own:
                jobs.end(self._folder, self._facts, exit_status if paths_in(self._folder) else 0)

    def _write(self, output: Path) -> None:
        recordings = jobs.read([self._folder])
        chrome.write(output, recordings)
        lost = sum(each.num_lost for each in recordings)
        older = "; its beginning was overwritten" if lost else ""
        self._say(f"paceline: the trace is in {output}{older} (open it at https://ui.perfetto.dev)")


class HostTrace:
    """The recording of the ranks of one host, when torch's agent starts them on several.

    The file names contain the host's name, because all hosts may use the same network folder. The ranks'
    recordings stay beside the timeline, so that `paceline trace` can join those of all hosts.

    Example:
        On host node0, for --trace out.json: out.node0.json, and the folder out.node0.rings.
    """

    def __init__(self, output: str, host: str, nprocs: int) -> None:
        path = Path(output).absolute()
        self.output = path.with_name(f"{path.stem}.{host}{path.suffix}")
        self.folder = path.with_name(f"{path.stem}.{host}.rings")
        self._nprocs = nprocs

    def begin(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Create the folder, and remove an earlier job's recordings; returns variables for the ranks."""
        chrome.check(self.output)
        _check_room(self.output.parent, self._nprocs, "make room there, or name a file on another disk")
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            for old in paths_in(self.folder):
                old.unlink()
        except OSError as error:
            raise ConfigError(
                "There is no folder in which the ranks can record.",
                where=str(self.folder),
                seen=error.strerror or str(error),
                hint="a file in a folder that you may write to: --trace out.json",
            ) from error
        others = {name: value for name, value in inherited.items() if name != FOLDER_VARIABLE}
        return trace_variables(others, self.folder, is_whole=True)

    def end(self, say: Callable[[str], None]) -> None:
        try:
            recordings = jobs.read([self.folder])
            chrome.write(self.output, recordings)
            say(
                f"paceline: the trace of this host's ranks is in {self.output}; for one of all hosts, "
                f"`paceline trace` with {self.folder} and those of the others, and --output"
            )
        except PacelineError as error:
            say(f"paceline: {error}")
