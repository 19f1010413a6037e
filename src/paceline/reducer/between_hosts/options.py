"""The user's options for sums between hosts, and the errors if gradients do not go between hosts."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.arguments import show
from paceline.errors import ConfigError

A_HOOK = "a communication hook, which averages over the process group alone"
"""A reason why sums do not go from host to host, for `BetweenHosts.refuse`."""


@dataclass(frozen=True, kw_only=True)
class BetweenHosts:
    """The user's options for sums between hosts.

    `compression` and `deterministic` are never both set, because the wrapper's arguments refuse that.
    """

    owner: str
    compression: str | None
    deterministic: str | None

    def refuse(self, seen: str) -> None:
        """Refuse the options that were given, if any, because sums do not go from host to host here."""
        if self.compression is not None:
            raise ConfigError(
                f"{self.owner}: compress_between_hosts={show(self.compression)} is not possible here.",
                expected="parameters on the CPU, and hosts that a Gloo group connects; or, with torch, "
                'reduce_through="hosts"',
                seen=seen,
                hint="leave it out; a hook of paceline's `compression` module compresses between all ranks",
                argument="compress_between_hosts",
            )
        refuse_other_bits(self.owner, self.deterministic, seen)


def refuse_other_bits(owner: str, deterministic: str | None, seen: str) -> None:
    """Refuse `deterministic` if it was given, because the process group decides the order of sums."""
    if deterministic is not None:
        raise ConfigError(
            f"{owner}: deterministic={show(deterministic)} is not possible here.",
            expected="parameters on the CPU of one host, or of hosts that a Gloo group connects, "
            "and no communication hook",
            seen=seen,
            hint="leave it out; all ranks have the same bits in any case, and `bits` says in which runs",
            argument="deterministic",
        )
