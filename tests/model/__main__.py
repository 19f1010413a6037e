"""python -m tests.model: searches the settings that are too large for every run of the tests; minutes."""

from __future__ import annotations

import time

from .search import search
from .state import PLAIN, Pass, Setting

TWICE = (PLAIN, PLAIN)
ONE_REFUSES = Pass(left_out=(0, 1), allowed_by=(0,))  # parameters that rank 0 has frozen, and rank 1 has not
NOBODYS = Pass(left_out=(0, 1, 2), nobodys=True)

LARGE = (
    Setting(2, (1, 1), TWICE, deaths=1),
    Setting(2, (1, 1), TWICE, deadlines=1),
    Setting(2, (1, 2), (Pass(left_out=(1,)), PLAIN), deaths=1),
    Setting(2, (2, 1), (Pass(left_out=(0,)), PLAIN), deadlines=1),
    Setting(2, (2, 2), TWICE, deadlines=1, assigned=True),
    Setting(2, (1, 1), TWICE, deaths=1, leaver=(2, 1)),
    Setting(2, (1, 1), (ONE_REFUSES, PLAIN), deaths=1),
    Setting(2, (1, 1), (NOBODYS, Pass(left_out=(0,), nobodys=True)), deaths=1),
    Setting(2, (1, 1), (Pass(left_out=(1,), nobodys=True), NOBODYS), deadlines=1),
    Setting(3, (2,)),
    Setting(3, (1,), (Pass(left_out=(1,)),)),
    Setting(3, (1,), (NOBODYS, Pass(left_out=(0, 1), nobodys=True))),
    Setting(3, (1,), (Pass(left_out=(0, 2), nobodys=True, finished=1),)),
    Setting(3, (1,), (Pass(left_out=(0, 2), nobodys=True),)),
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
