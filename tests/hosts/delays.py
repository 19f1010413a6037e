"""Measures how soon all ranks of two hosts raise after a failure, beside torch's DDP.

python -m tests.hosts.delays
"""

from __future__ import annotations

import statistics
import sys
import time

from tests.hosts.namespaces import Hosts
from tests.hosts.test_failures import GUILTY, guilty_at, noticed, start

PATHS = ("auto", "group", "torch")
ROUNDS = 3
CUTS = {"cut": None, "cut from host 0 to host 1": 0, "cut from host 1 to host 0": 1}


def struck(what: str, path: str) -> float:
    """Seconds from the fault of one rank until the last of the other ranks raises."""
    with Hosts(2, "1gbit") as hosts:
        ranks = start(hosts, what, path, python=sys.executable)
        at = guilty_at(ranks[GUILTY])
        return max(noticed(rank)[0] for rank in ranks[:GUILTY]) - at


def cut(path: str, source: int | None = None) -> float:
    """Seconds from the cut of the link until the last rank raises.

    Args:
        path: A value of `reduce_through`.
        source: The host whose packets do not arrive. None: packets of neither host arrive.
    """
    with Hosts(2, "1gbit") as hosts:
        ranks = start(hosts, "cut", path, python=sys.executable)
        at = time.monotonic()
        if source is None:
            hosts.cut(1)
        else:
            hosts.cut_one_way(source, 1 - source)
        return max(noticed(rank)[0] for rank in ranks) - at


def main() -> None:
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):  # each path in each round
        for what in ("kill", "raise"):
            for path in PATHS:
                found.setdefault((what, path), []).append(struck(what, path))
    for path in PATHS[:2] * 2:  # torch's DDP waits for its timeout, 90 s here
        for name, source in CUTS.items():
            found.setdefault((name, path), []).append(cut(path, source))
    print("| fault | way | runs | median | smallest | largest |\n|---|---|--:|--:|--:|--:|")
    for (what, path), seconds in found.items():
        times = [f"{1000 * each:.0f} ms" for each in (statistics.median(seconds), min(seconds), max(seconds))]
        print(f"| {what} | {path} | {len(seconds)} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
