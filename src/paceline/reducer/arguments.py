"""Arguments that both front ends' wrappers have, checked alike.

The one idea: an argument is honoured, or refused with a sentence; none is silently ignored. Imports `errors`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from paceline.errors import ConfigError

MIB = 1 << 20
NONFINITE_POLICIES = ("warn", "raise", "ignore")
REDUCE_THROUGH = ("auto", "memory", "group")


class Arguments:
    """Refuses values that make no sense.

    Args:
        owner: The class whose constructor got them.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def require(self, holds: bool, name: str, got: object, expected: str) -> None:
        """Raise ConfigError unless it holds.

        Example:
            >>> Arguments("DataParallel").require(False, "timeout_s", -1, "a positive number")
            ConfigError: DataParallel: timeout_s has a value that makes no sense. ...
        """
        if not holds:
            raise ConfigError(
                f"{self._owner}: {name} has a value that makes no sense.",
                expected=f"{name}: {expected}",
                got=f"{name}={got!r}",
            )

    def check_choices(self, nonfinite: str, reduce_through: str) -> None:
        """What to do about infinities, and where gradients are averaged."""
        self.require(nonfinite in NONFINITE_POLICIES, "nonfinite", nonfinite, _one_of(NONFINITE_POLICIES))
        self.require(
            reduce_through in REDUCE_THROUGH, "reduce_through", reduce_through, _one_of(REDUCE_THROUGH)
        )

    def one_buffer_switch(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
    ) -> bool | None:
        """`broadcast_buffers` as it counts; a warning, as torch's, where both are given."""
        if forward_sync_buffers is None or broadcast_buffers is None:
            return broadcast_buffers
        warnings.warn(
            f"{self._owner}: broadcast_buffers is ignored where forward_sync_buffers is given.",
            FutureWarning,  # torch's
            stacklevel=4,
        )
        return None

    def check_caps(self, bucket_cap_mb_list: Sequence[float] | None) -> list[float]:
        """The caps of single buckets, in MiB."""
        caps_mb = [float(cap) for cap in bucket_cap_mb_list or ()]
        expected = "positive numbers of MiB: of the first bucket, of the second, ..., of all others"
        self.require(all(cap > 0 for cap in caps_mb), "bucket_cap_mb_list", bucket_cap_mb_list, expected)
        return caps_mb

    def check_passes(self, name: str, value: int | None) -> int | None:
        """A number of passes; 0 is none at all."""
        is_count = value is None or (isinstance(value, int) and value >= 0)
        self.require(is_count, name, value, "a number of passes, 0 for never, or None")
        return value

    def check_seconds(self, **times: float | None) -> None:
        """Time-outs."""
        for name, seconds in times.items():
            self.require(
                seconds is None or seconds > 0, name, seconds, "a positive number of seconds, or None"
            )


def _one_of(choices: Sequence[str]) -> str:
    return " or ".join(f'"{choice}"' for choice in choices)
