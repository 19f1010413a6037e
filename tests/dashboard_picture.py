"""Draws docs/pictures/dashboard.png: the page of an invented job, in a real browser.

Run it when the page changes: python -m tests.dashboard_picture. It needs chromium, and pillow, which comes
with matplotlib.
"""

from __future__ import annotations

import io
import math
import socket
import tempfile
import threading
from pathlib import Path

from PIL import Image

from paceline.monitor.dashboard import Dashboard, Feed
from paceline.monitor.snapshot import JobSnapshot, RankSnapshot
from paceline.monitor.watch import JobWatch
from paceline.trace.jobs import JobFacts
from tests.browser import Browser

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "dashboard.png"
_TOKEN = "a-token-for-a-picture"
_SECONDS = 120


class MadeUpWatch(JobWatch):
    """Four ranks; one of them is slow, later another one, and one batch holds a NaN."""

    def __init__(self) -> None:
        super().__init__(Path("/none/9fb9a4"))
        self.facts = JobFacts("train.py", 1, 4, 0.0)
        self._second = 0

    @property
    def has_ended(self) -> bool:
        return False

    def look(self) -> JobSnapshot:
        self._second += 1
        second = self._second
        slow = 1 if second < 60 else 3
        lost = 0.27 + 0.02 * math.sin(second)
        return JobSnapshot(
            world_size=4,
            ranks=tuple(self._rank(rank, slow) for rank in range(4)),
            step=22 * second,
            steps_per_s=22.0,
            samples_per_s=705 + 20 * math.sin(second / 7),
            waited_for={slow: lost, 0: 0.02},
            slow_rank=slow,
        )

    def _rank(self, rank: int, slow: int) -> RankSnapshot:
        second, is_slow = self._second, rank == slow
        return RankSnapshot(
            rank=rank,
            pid=25298 + rank,
            host="host",
            is_alive=True,
            doing="backward" if is_slow else "average",
            silent_s=0.01,
            step=22 * second,
            steps_per_s=22.0,
            samples_per_s=176.0,
            worked_s=0.0425 if is_slow else 0.0225 + rank / 4000,
            waiting=0.01 if is_slow else 0.44 - rank / 100,
            waits_for=None if is_slow else slow,
            memory_bytes=(236 + rank) << 20,
            is_memory_shared=False,
            values={"loss": 2 * math.exp(-second / 40) + 0.05 * math.sin(second * 7) ** 2},
            norm=1.2 + 0.3 * math.sin(second / 9),
            nonfinite=2 if 40 < second < 43 else 0,
            nonfinite_rank=1,
            failed=0,
            failure="",
            is_recovered=False,
        )


def main() -> None:
    """Write the picture."""
    feed = Feed(MadeUpWatch())
    for _ in range(_SECONDS):
        feed.look()
    feed._history.points[:] = [
        type(point)(**{**vars(point), "time_s": 1.0e9 + number})
        for number, point in enumerate(feed._history.points)
    ]
    server = Dashboard(socket.create_server(("127.0.0.1", 0)), feed, _TOKEN)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            browser.open(f"http://127.0.0.1:{server.server_address[1]}/?token={_TOKEN}", 1100, 880)
            browser.until("document.querySelectorAll('#ranks tr').length == 4")
            shot = browser.screenshot()
        finally:
            browser.close()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(64).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
