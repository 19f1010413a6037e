"""Checks that a library has a version that its integration was tested with.

Other versions are not refused, but give one warning.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from importlib import metadata

from paceline.errors import ConfigError
from paceline.versions import UntestedVersionWarning, is_first_rank

_warned: set[str] = set()


@contextlib.contextmanager
def tested_with(library: str, oldest: str, newest: str) -> Iterator[None]:
    """Import a library in this context, which raises a clear error if it is missing, or lacks a name."""
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"Paceline's integration with {library} needs {library}, which is not installed here.",
            hint=f"pip install '{library}=={newest}.*'",
        ) from None
    warn_if_untested(library, oldest, newest)
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"Paceline's integration with {library} does not work with version {metadata.version(library)}.",
            expected=f"{library} {_spell(oldest, newest)}, with which it was tested",
            got=f"{library} {metadata.version(library)}",
            seen=f"{type(error).__name__}: {error}",
            likely="a name that Paceline uses is gone from this version, or the installation is incomplete",
            hint=f"pip install '{library}=={newest}.*', or `paceline run --replace-ddp` without the "
            "integration",
        ) from error


def warn_if_untested(library: str, oldest: str, newest: str) -> None:
    """Warn, once and on rank 0, unless the installed version of a library was tested."""
    text = metadata.version(library)
    if _minor(oldest) <= _minor(text) <= _minor(newest) or library in _warned:
        return
    _warned.add(library)
    if not is_first_rank():
        return
    warnings.warn(
        f"Paceline's integration with {library} was not tested with version {text}.\n"
        f"  expected {library} {_spell(oldest, newest)}\n"
        f"  got      {library} {text}\n"
        f"  likely   it works; if it fails inside {library}, this is the first thing to suspect\n"
        f"  hint     pip install '{library}=={newest}.*', or `paceline run --replace-ddp` without the "
        "integration",
        UntestedVersionWarning,
        stacklevel=5,  # warn_if_untested, tested_with, contextlib, the integration; the code that imports it
    )


def _spell(oldest: str, newest: str) -> str:
    return oldest if oldest == newest else f"{oldest} to {newest}"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
