"""python -m tests.model: searches the settings that are too large for every run of the tests; minutes."""

from __future__ import annotations

import time

from .search import search
from .state import Setting

LARGE = (
    Setting(2, (1, 1), passes=2, deaths=1),
    Setting(2, (1, 1), passes=2, deadlines=1),
    Setting(2, (1, 2), passes=2, deaths=1, unused=(1, 1)),
    Setting(2, (2, 1), passes=2, deadlines=1, unused=(1, 0)),
    Setting(2, (2, 2), passes=2, deadlines=1, assigned=True),
    Setting(2, (1, 1), passes=2, deaths=1, leaver=(2, 1)),
    Setting(3, (2,)),
    Setting(3, (1,), unused=(1, 1)),
    Setting(3, (1,), deadlines=1),
    Setting(3, (1,), leaver=(1, 1)),
    Setting(3, (1,), deaths=1),
)


def main() -> None:
    for setting in LARGE:
        start = time.monotonic()
        states = search(setting)
        print(
            f"{states:>10,} states in {time.monotonic() - start:4.0f} s, nothing found: {setting}", flush=True
        )


if __name__ == "__main__":
    main()
