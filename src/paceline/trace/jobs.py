"""The folders in which jobs record, and the jobs that have left a recording.

Each job of a launcher has its own folder, below one folder per user that no other user may open. A job that
succeeds removes its folder. A job that fails leaves it, and the oldest of these are removed when there are
more than ten. While a job runs, its launcher holds a lock on the folder. The lock also works between
containers: if a folder can be locked, its job has ended.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError
from paceline.trace.ring_file import RankRecording, is_number, paths_in, printable, read_bytes, read_folder

_FACTS = "job.json"
_MOST_KEPT = 10
_MOST_FACTS = 1 << 16
_locks: dict[Path, int] = {}  # of jobs that this process began: folder -> descriptor that holds the lock


@dataclass(frozen=True)
class JobFacts:
    name: str
    pid: int
    nprocs: int
    started_s: float
    exit_status: int | None = None

    @property
    def is_running(self) -> bool:
        return self.exit_status is None and Path(f"/proc/{self.pid}").exists()

    @property
    def state(self) -> str:
        if self.exit_status is not None:
            return f"exit status {self.exit_status}"
        return "running" if self.is_running else "killed with its launcher"


def users_folder() -> Path:
    """The folder in which the jobs of this user record; it may not exist."""
    return _temporary() / f"paceline-{os.getuid()}"


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder can be written to: recording fails with a warning, the job goes on
        return Path("/tmp")


def new_folder() -> Path:
    return users_folder() / os.urandom(3).hex()


def squatter() -> str:
    """What occupies the path of this user's folder, if that is not the user's own folder; else ""."""
    folder = users_folder()
    with suppress(OSError):
        found = folder.lstat()
        if found.st_uid != os.getuid():
            return f"{folder} belongs to {_user(found.st_uid)}"
        if not stat.S_ISDIR(found.st_mode):
            return f"{folder} is no folder"
    return ""


def _user(uid: int) -> str:
    try:
        return f"user {printable(pwd.getpwuid(uid).pw_name)} (uid {uid})"
    except (KeyError, OSError):
        return f"a user without a name (uid {uid})"


def begin(folder: Path, facts: JobFacts) -> None:
    """Make the folder of a job, and remove those of the oldest jobs that have ended."""
    above = folder.parent
    while True:
        above.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # the only other job has just ended, and has removed `above`
            if (taken := squatter()) and above == users_folder():
                raise FileExistsError(taken)
            folder.mkdir(mode=0o700)
            break
    with suppress(OSError):  # a file system without locks: readers then rely on job.json alone
        _locks[folder] = _lock(folder)
    _drop_oldest()
    _write(folder, facts)


def _drop_oldest() -> None:
    """Keep one job less than `_MOST_KEPT`, to leave room for the one that begins."""
    ended = [folder for folder, facts in jobs() if not facts.is_running]
    for folder in ended[_MOST_KEPT - 1 :]:
        with _held(folder) as is_over:
            if is_over:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder; yields whether its job is over."""
    try:
        fd = _lock(folder)
    except BlockingIOError:
        yield False  # its launcher runs, in another container
        return
    except OSError:
        yield True
        return
    try:
        yield True
    finally:
        os.close(fd)


def _lock(folder: Path) -> int:
    """Raises BlockingIOError if another process holds the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def end(folder: Path, facts: JobFacts, exit_status: int) -> None:
    with suppress(OSError):
        if exit_status == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.rmdir()  # fails if it holds another job
        else:
            _write(folder, JobFacts(**{**asdict(facts), "exit_status": exit_status}))
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)


def jobs() -> list[tuple[Path, JobFacts]]:
    """The jobs of this user that run or have failed, the newest first."""
    found = []
    with suppress(OSError):
        for folder in () if squatter() else users_folder().iterdir():
            facts = facts_of(folder)
            if facts is not None:
                found.append((folder, facts))
    return sorted(found, key=lambda job: -job[1].started_s)


def facts_of(folder: Path) -> JobFacts | None:
    try:
        facts = JobFacts(**json.loads(read_bytes(folder / _FACTS, _MOST_FACTS)))
        name = printable(facts.name)
        numbers = (facts.pid, facts.nprocs, 0 if facts.exit_status is None else facts.exit_status)
        time.localtime(facts.started_s)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return replace(facts, name=name) if all(map(is_number, numbers)) else None


def find(name: str) -> Path:
    """The folder of a job: the folder itself, the job's id, or the process id of its launcher."""
    if "/" in name or paths_in(Path(name)):
        try:
            is_folder = Path(name).is_dir()
        except OSError as error:  # the error must name the folder
            raise _cannot_read(Path(name), error) from error
        if not is_folder:
            raise ConfigError(f"There is no folder {name}.", hint="`paceline trace` lists the jobs")
        return Path(name)
    for folder, facts in jobs():
        if name in (folder.name, str(facts.pid)):
            return folder
    raise ConfigError(
        f"There is no job {name!r} of yours that has recorded anything.",
        where=str(users_folder()),
        seen=squatter() or folders_of_others(),
        likely="the job ended without an error (its recording is then removed), or more than ten jobs have "
        "failed since",
        hint="`paceline trace` lists the jobs; `paceline run --trace out.json` keeps a recording in any case",
    )


def folders_of_others() -> str:
    """A line for errors that lists the folders in which other users' jobs record; "" if there are none."""
    names = [path.name for path in _temporary().glob("paceline-*")]
    others = sorted(name for name in names if name[9:].isdigit() and name != users_folder().name)
    return f"folders of other users, which you may not read: {', '.join(others)}" if others else ""


def read(folders: Sequence[Path]) -> list[RankRecording]:
    found: list[RankRecording] = []
    for folder in folders:
        try:
            found += read_folder(folder)
        except OSError as error:  # noqa: PERF203  # the error must name the folder
            raise _cannot_read(folder, error) from error
    if not found:
        raise ConfigError(
            "No rank of this job has recorded a backward.",
            where=", ".join(map(str, folders)),
            likely="the script has not wrapped a model (yet), or runs on one rank, which averages nothing",
        )
    return sorted(found, key=lambda each: each.header.rank)


def _cannot_read(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"What the job has recorded can't be read: {folder}.",
        seen=error.strerror or str(error),
        likely="it is another user's"
        if isinstance(error, PermissionError)
        else "it was removed while the job ran"
        if isinstance(error, FileNotFoundError)
        else "",
    )


def age(facts: JobFacts) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.started_s))


def _write(folder: Path, facts: JobFacts) -> None:
    temporary = folder / f"{_FACTS}.new"
    temporary.write_text(json.dumps(asdict(facts)))
    temporary.replace(folder / _FACTS)
