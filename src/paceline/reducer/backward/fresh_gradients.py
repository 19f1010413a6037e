"""Whether gradients are still what the last backward made them: then its norm is known to be theirs.

The one idea: look at little, and say no rather than yes. Identities and version counters show what the
framework has done, and samples of the memory show most of what was written past it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline import _core
from paceline.reducer.backward.front_end import Fingerprint, Memory


class FreshGradients:
    """Whether gradients are still what the last backward made them, so that its norm is theirs.

    A gradient that was replaced is another object, and one that was changed by its framework has another
    version; writes past the framework (through `.data`, numpy or a kernel) are seen in a few lines of memory
    of each gradient. Such a write that changes a few elements only may go unseen. The same lines on every
    rank, so that ranks with the same gradients find the same.

    Args:
        fingerprint: A fingerprint of all gradients.
        memory: Where all gradients are; None: not all where the processor can read them, and then nobody
            knows.

    Attributes:
        is_used: Whether anybody has asked. Until then nothing is noted, and the answer is no.
    """

    def __init__(self, fingerprint: Callable[[], Fingerprint], memory: Callable[[], Memory | None]) -> None:
        self.is_used = False
        self._fingerprint = fingerprint
        self._memory = memory
        self._seen: Fingerprint | None = None
        self._sample: int | None = None

    def note(self) -> None:
        """A backward has just made them the means."""
        self._sample = self._take_sample()
        self._seen = None if self._sample is None else self._fingerprint()

    def forget(self) -> None:
        """A backward was void, or raised: what the gradients are now, nobody knows."""
        self._seen = None

    def are_unchanged(self) -> bool:
        """Whether nobody has changed a gradient since note(), as far as that is seen."""
        self.is_used = True
        return (
            self._seen is not None
            and self._seen == self._fingerprint()
            and self._sample == self._take_sample()
        )

    def _take_sample(self) -> int | None:
        memory = self._memory()
        return None if memory is None else _core.sample_all(*memory)
