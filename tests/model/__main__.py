"""python -m tests.model: searches the settings that are too large for every test run; minutes."""

from __future__ import annotations

import time

from .search import search
from .state import PLAIN, Backward, Setting

TWICE = (PLAIN, PLAIN)
# parameters that rank 0 has frozen, and rank 1 has not
ONE_REFUSES = Backward(left_out=(0, 1), allowed_by=(0,))
GLOBALLY_UNUSED = Backward(left_out=(0, 1, 2), globally_unused=True)

LARGE = (
    Setting(2, (1, 1), TWICE, deaths=1),
    Setting(2, (1, 1), TWICE, deadlines=1),
    Setting(2, (1, 2), (Backward(left_out=(1,)), PLAIN), deaths=1),
    Setting(2, (2, 1), (Backward(left_out=(0,)), PLAIN), deadlines=1),
    Setting(2, (2, 2), TWICE, deadlines=1, assigned=True),
    Setting(2, (1, 1), TWICE, deaths=1, leaver=(2, 1)),
    Setting(2, (1, 1), (ONE_REFUSES, PLAIN), deaths=1),
    Setting(2, (1, 1), (GLOBALLY_UNUSED, Backward(left_out=(0,), globally_unused=True)), deaths=1),
    Setting(2, (1, 1), (Backward(left_out=(1,), globally_unused=True), GLOBALLY_UNUSED), deadlines=1),
    Setting(3, (2,)),
    Setting(3, (1,), (Backward(left_out=(1,)),)),
    Setting(3, (1,), (GLOBALLY_UNUSED, Backward(left_out=(0, 1), globally_unused=True))),
    Setting(3, (1,), (Backward(left_out=(0, 2), globally_unused=True, finished=1),)),
    Setting(3, (1,), (Backward(left_out=(0, 2), globally_unused=True),)),
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
