"""A rank that trains until something goes wrong, and tells when it noticed."""

from __future__ import annotations

import time
from typing import Any

from paceline.torch.bench.step import Step


class UntilError(Step):
    """Trains a perceptron of 4M parameters; the victim holds more memory, as real training would.

    Freeing memory is what a kernel does first with a killed process, before it closes its sockets.
    """

    def __init__(self, rank: int, world_size: int, way: str, victim: int, resident_mib: int) -> None:
        super().__init__(rank, world_size, way)
        self._victim = victim
        # Written to, so that every page is there.
        self._ballast = b"\x01" * (resident_mib << 20) if rank == victim else b""
        self.prepare("mlp")

    def train(self) -> dict[str, Any]:
        """Step after step until an exception; its moment, its text, and whether it names the victim."""
        try:
            while True:
                self._step()
        except Exception as error:
            moment = time.monotonic()
            text = f"{type(error).__name__}: {error}"
            lost = getattr(error, "lost", None)
            named = lost == (self._victim,) or (lost is None and f"rank {self._victim}" in text)
            return {"moment_s": moment, "error": text[:2000], "is_named": named}
