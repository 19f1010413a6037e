"""Whether a buffer is averaged, broadcast or left alone: the first pattern that matches its name decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from paceline.arguments import Arguments

POLICIES = ("average", "broadcast", "local")


def check_policies(patterns: Any, owner: str) -> dict[str, str]:
    if patterns is None:
        return {}
    is_mapping = isinstance(patterns, Mapping)
    if not is_mapping or not all(isinstance(p, str) and _is_policy(patterns[p]) for p in patterns):
        raise Arguments(owner).refuse(
            "buffers",
            patterns,
            '"average", "broadcast" or "local" for each name pattern, in a dictionary',
            f'buffers={{"*": "{patterns if _is_policy(patterns) else "average"}"}}, for all of them',
            is_type=not is_mapping,
        )
    return dict(patterns)


def _is_policy(value: object) -> bool:
    return isinstance(value, str) and value in POLICIES


def policy_of(name: str, patterns: Mapping[str, str]) -> str | None:
    return next((policy for pattern, policy in patterns.items() if fnmatchcase(name, pattern)), None)


class BufferPolicies:
    """Names of buffers by policy.

    Attributes:
        on_demand: Buffers broadcast on request: all except averaged ones and those with the policy "local".
    """

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str], broadcasts: bool) -> None:
        policies = {name: policy_of(name, patterns) for name in names}
        named = {name for name, policy in policies.items() if policy == "broadcast"}
        unnamed = {name for name, policy in policies.items() if policy is None}
        self.averaged = {name for name, policy in policies.items() if policy == "average"}
        self.on_demand = named | unnamed
        self.after_pass = named | unnamed if broadcasts else named
        self.is_needed = bool(self.averaged or self.after_pass)

    @property
    def in_step(self) -> set[str]:
        return self.averaged | self.after_pass

    def broadcast(self, *, on_demand: bool) -> set[str]:
        return self.on_demand if on_demand else self.after_pass
