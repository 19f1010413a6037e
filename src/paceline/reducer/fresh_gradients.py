"""Whether gradients are still what the last pass made them, so that its norm is theirs.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable


class FreshGradients:
    """Whether the gradients are those of the last pass.

    Args:
        fingerprint: Identities and version counters of all gradients.

    Attributes:
        is_used: Whether anybody has asked. Until then nothing is noted, and the answer is no.
    """

    def __init__(self, fingerprint: Callable[[], list[tuple[int, int]]]) -> None:
        self.is_used = False
        self._fingerprint = fingerprint
        self._seen: list[tuple[int, int]] | None = None

    def note(self) -> None:
        """A pass has just ended."""
        self._seen = self._fingerprint()

    def are_unchanged(self) -> bool:
        """Whether nobody has changed a gradient since note()."""
        self.is_used = True
        return self._seen is not None and self._seen == self._fingerprint()
