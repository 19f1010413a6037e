"""A group of paddle.distributed as a rendezvous `Exchange`."""

from __future__ import annotations

from paceline.errors import CollectiveError, RendezvousError
from paceline.paddle.calls import GroupCalls


class PaddleExchange:
    """See `rendezvous.exchange.Exchange`.

    Args:
        calls: On the group whose ranks take part.
    """

    def __init__(self, calls: GroupCalls) -> None:
        self._calls = calls
        self.rank = calls.rank
        self.world_size = calls.world_size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`.

        Raises:
            RendezvousError: The group failed, or some rank was late; Paddle does not tell which.
        """
        try:
            sizes = [
                int.from_bytes(row, "little")
                for row in self._calls.gather_bytes(len(payload).to_bytes(8, "little"), "sizes", timeout_s)
            ]
            rows = self._calls.gather_bytes(payload.ljust(max(1, *sizes), b"\0"), "the payloads", timeout_s)
        except CollectiveError as error:
            raise RendezvousError(
                f"Rank {self.rank} of {self.world_size} could not form a group.",
                where=error.where,
                seen=f"{error.summary} {error.seen}",
                likely=error.likely or "another rank died, or took another branch and forms no group",
                hint="every rank of the group must make this call; look at the other ranks' output",
            ) from error
        return [row[:size] for row, size in zip(rows, sizes)]
