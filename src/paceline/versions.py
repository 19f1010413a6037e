"""Paceline's own version, and the check of a framework's before any of its internals are used."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Sequence
from importlib import metadata

from paceline.env import read_rank_environment
from paceline.errors import ConfigError

Version = tuple[int, int]

SOURCE = "."
"""What pip is to install: a clone, until an index has paceline. `scripts/published` changes it."""


@functools.cache
def own_version() -> str:
    """Paceline's version, according to the installed distribution."""
    return metadata.version("paceline")


def install(extra: str) -> str:
    """The command that installs Paceline with an extra, in words.

    Example:
        "`pip install '.[torch]'`, in a clone,"
    """
    return f"`pip install '{SOURCE}[{extra}]'`" + (", in a clone," if SOURCE == "." else "")


class UnsupportedVersionError(ConfigError, ImportError):
    """A framework is missing, or has a version that Paceline does not support."""


class UntestedVersionWarning(UserWarning):
    """A framework or a library has a version that Paceline was not tested with."""


def check_version(
    package: str,
    framework: str,
    distributions: Sequence[str],
    oldest: Version,
    tested: Sequence[Version],
    *,
    extra: str,
    refuses_newer: bool = False,
) -> None:
    """Raise unless a framework of a supported version is installed.

    If that version was not tested, warn on rank 0.

    Raises:
        UnsupportedVersionError: Also an ImportError.
    """
    text = installed(distributions)
    found = re.match(r"(\d+)\.(\d+)", text)
    hint = f"{install(extra)} chooses one that fits"
    spelled = f"{framework} {' and '.join(map(_spell, tested))}"
    expected = spelled if refuses_newer else f"{framework} {_spell(oldest)} or newer"
    if not found:
        raise UnsupportedVersionError(
            f"{package} needs {framework}, which is not installed.", expected=expected, hint=hint
        )
    version = int(found[1]), int(found[2])
    if version < oldest or (refuses_newer and version > tested[-1]):
        raise UnsupportedVersionError(
            f"{package} does not support {framework} {text}.", expected=expected, got=text, hint=hint
        )
    if version not in tested and is_first_rank():
        warnings.warn(
            f"{package} was tested with {spelled}, and not with {text}.\n"
            "  likely   it works; if training fails or differs, this is the first thing to suspect\n"
            f"  hint     {hint}",
            UntestedVersionWarning,
            stacklevel=3,
        )


def installed(distributions: Sequence[str]) -> str:
    found = [each for name in distributions for each in metadata.distributions(name=name)]
    return found[0].version if found else ""


def is_first_rank() -> bool:
    """Whether this process prints warnings for all: it is rank 0, or no launcher has given ranks."""
    with contextlib.suppress(ConfigError):
        return read_rank_environment(needs_address=False).rank == 0
    return True


def _spell(version: Version) -> str:
    return "{}.{}".format(*version)
