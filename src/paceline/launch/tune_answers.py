"""Stores the results of `paceline tune`, in a file for each script, for `paceline run -n auto`.

An answer is about one script on one kind of machine, which is identified by its processor and its number of
usable cores. So the nodes of a cluster with a common home folder share an answer if they are alike, and have
answers of their own if they are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_OF_RANKS = re.compile(r"\{(?:(\d+)/)?ranks\}")


@dataclass(frozen=True, order=True)
class Layout:
    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{counted(self.ranks, 'rank')} x {counted(self.threads, 'thread')}"


@dataclass(frozen=True)
class Place:
    processor: str
    cores: int

    def __str__(self) -> str:
        return f"{self.processor}, {counted(self.cores, 'core')}"


@dataclass(frozen=True)
class Tuned:
    """The answer for one script on one machine.

    Attributes:
        layout: The layout to use.
        place: The machine where it was measured.
        script: The script's absolute path, or "-m module".
        arguments: The arguments that it was measured with.
        time_s: Seconds since 1970.
        gain: Its samples per second as a multiple of those of one rank; None if one rank was not measured.
        reservation: Why the answer may be wrong, in words; "" if there is no such reason.
    """

    layout: Layout
    place: Place
    script: str
    arguments: tuple[str, ...]
    time_s: float
    gain: float | None
    reservation: str = ""

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time_s))


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def name_of_script(command: Sequence[str], *, is_module: bool) -> str:
    return f"-m {command[0]}" if is_module else str(Path(command[0]).resolve())


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Follows the XDG base directory specification."""
    given = environment.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    folder = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return folder / "paceline"


def keep(answer: Tuned, environment: Mapping[str, str]) -> Path:
    path = _path_of(answer.script, environment)
    path.parent.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    others = [each for each in _read(path) if each.place != answer.place]
    temporary = path.with_suffix(f".{os.getpid()}")
    # Not through a link that another process may have put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        json.dump([asdict(each) for each in (*others, answer)], file, indent=1)
    temporary.replace(path)
    return path


def find(script: str, place: Place, environment: Mapping[str, str], tune_command: str) -> Tuned:
    """The last answer for a script on this machine."""
    path = _path_of(script, environment)
    answers = _read(path)
    for answer in answers:
        if answer.place == place:
            return answer
    hint = f"`{tune_command}` measures it in about a minute; without -n, there is one rank per core"
    if not answers:
        raise ConfigError(
            "-n auto uses the last answer of `paceline tune`, and there is none for this script.",
            where=str(path),
            hint=hint,
            script=script,
        )
    raise ConfigError(
        "-n auto uses the last answer of `paceline tune`, and this script was measured on another machine.",
        where=str(path),
        expected=str(place),
        got="; ".join(f"{each.place} ({each.layout}, {each.date})" for each in answers),
        likely="the processor is another one, or the process may use more cores, or fewer (taskset, a quota)",
        hint=hint,
        script=script,
    )


def tune_command(options: Sequence[str], command: Sequence[str]) -> str:
    return shlex.join(["paceline", "tune", *options, *command])


def fill_in(arguments: Sequence[str], ranks: int) -> list[str] | None:
    """A script's arguments, with "{256/ranks}" and "{ranks}" replaced; None if the result is not whole.

    Example:
        >>> fill_in(["--batch", "{256/ranks}"], 2)
        ['--batch', '128']
    """
    numbers = [int(match[1]) for each in arguments for match in _OF_RANKS.finditer(each) if match[1]]
    if any(number % ranks for number in numbers):
        return None

    def number_of(match: re.Match[str]) -> str:
        return str(int(match[1]) // ranks if match[1] else ranks)

    return [_OF_RANKS.sub(number_of, each) for each in arguments]


def _path_of(script: str, environment: Mapping[str, str]) -> Path:
    name = hashlib.sha256(script.encode(errors="surrogateescape")).hexdigest()[:20]
    return cache_folder(environment) / "tune" / f"{name}.json"


def _read(path: Path) -> list[Tuned]:
    """The answers in a file; none if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return [_answer(entry) for entry in json.loads(path.read_text())]
    return []


def _answer(entry: Mapping[str, Any]) -> Tuned:
    layout, place = Layout(**entry["layout"]), Place(**entry["place"])
    if min(int(layout.ranks), int(layout.threads), int(place.cores)) < 1:
        raise ValueError(f"no layout: {entry}")
    return Tuned(
        layout,
        place,
        str(entry["script"]),
        tuple(map(str, entry["arguments"])),
        float(entry["time_s"]),
        None if entry["gain"] is None else float(entry["gain"]),
        str(entry.get("reservation", "")),
    )
