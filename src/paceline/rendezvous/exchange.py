"""All that a rendezvous needs: an all-gather of bytes.

Any implementation (our Unix-socket hub, an existing group, torch's store, torch's process group) can form a
group.
"""

from __future__ import annotations

from typing import Protocol


class Exchange(Protocol):
    """All-gather of small byte strings between the ranks of a group that is being formed."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`.

        Raises:
            RendezvousError: A rank did not send its payload in time; the error names it.
        """
        ...
