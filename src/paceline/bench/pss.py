"""What processes have in memory, with each page that they share counted once.

The one idea: PSS (proportional set size) charges each page to its users in equal parts, so its sum over the
ranks counts every page once; RSS would count shared pages N times. Imports only the standard library.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

SAMPLE_EVERY_S = 0.002


def pss_bytes(pids: Sequence[int]) -> int:
    """Proportional set sizes of some processes, summed: each of their pages once."""
    return sum(parse_pss(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids)


def parse_pss(rollup: str) -> int:
    """Bytes of a smaps_rollup file that are no file's.

    Pages of libraries are left out: they are shared with whatever else runs on the machine, so this share of
    them changes when another program starts. Linux before 5.4 does not tell them apart.
    """
    sizes = {name: value for name, _, value in (line.partition(":") for line in rollup.splitlines())}
    names = ("Pss_Anon", "Pss_Shmem") if "Pss_Shmem" in sizes else ("Pss",)
    return sum(int(sizes[name].split()[0]) for name in names) * 1024


class Peak:
    """Samples the sum of PSS in a thread while the `with` block runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.bytes = 0
        self.samples = 0
        self._pids = pids
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_EVERY_S):
            try:
                self.bytes = max(self.bytes, pss_bytes(self._pids))
            except (OSError, KeyError):  # a rank has died; the job's own call tells why
                return
            self.samples += 1
