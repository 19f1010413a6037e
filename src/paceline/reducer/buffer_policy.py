"""Which buffers are averaged, broadcast or left alone. Pure.

The one idea: the first pattern that matches a buffer's name decides; buffers that none matches are broadcast,
or left alone with `broadcast_buffers=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from paceline.errors import ConfigError

POLICIES = ("average", "broadcast", "local")


def check_policies(patterns: Mapping[str, str] | None) -> dict[str, str]:
    """The patterns as a plain dictionary.

    Raises:
        ConfigError: A policy is not one of POLICIES.
    """
    checked = dict(patterns or {})
    for pattern, policy in checked.items():
        if policy not in POLICIES:
            raise ConfigError(
                "DistributedDataParallel: buffers has a value that makes no sense.",
                expected='"average", "broadcast" or "local" for each name pattern',
                got=f"buffers={{{pattern!r}: {policy!r}}}",
            )
    return checked


def policy_of(name: str, patterns: Mapping[str, str]) -> str | None:
    """What the first pattern that matches says; None: none does."""
    return next((policy for pattern, policy in patterns.items() if fnmatchcase(name, pattern)), None)
