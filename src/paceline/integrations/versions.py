"""Which versions of a library a file of this folder was tested with; said once, and never in the way.

A newer version often works: so it is not refused, but whoever sees a failure shall know where to look.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from importlib import metadata

from paceline.env import read_rank_environment
from paceline.errors import ConfigError

_warned: set[str] = set()


class UntestedVersionWarning(UserWarning):
    """A library has a version that Paceline's part for it was not tested with."""


def warn_if_untested(library: str, oldest: str, newest: str) -> None:
    """Warn, once and on rank 0, unless the library that is installed is of a tested version.

    Args:
        library: Name of the distribution, as `pip install` takes it.
        oldest: First minor version that was tested: "2.6".
        newest: Last minor version that was tested; its later patches count as tested.
    """
    text = metadata.version(library)
    if _minor(oldest) <= _minor(text) <= _minor(newest) or library in _warned:
        return
    _warned.add(library)
    if not _is_first_rank():
        return
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    warnings.warn(
        f"Paceline's integration with {library} was not tested with version {text}.\n"
        f"  expected {library} {tested}\n"
        f"  got      {library} {text}\n"
        f"  likely   it works; if it fails inside {library}, this is the first thing to suspect\n"
        f"  hint     pip install '{library}=={newest}.*', or `paceline run --replace-ddp` without the "
        "integration",
        UntestedVersionWarning,
        stacklevel=3,
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _is_first_rank() -> bool:
    """Whether nobody else says it: on rank 0, and where no launcher has given ranks."""
    with contextlib.suppress(ConfigError):
        return read_rank_environment(needs_address=False).rank == 0
    return True
