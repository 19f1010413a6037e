"""The versions of Paddle that these files support; checked before anything private of Paddle is used."""

from __future__ import annotations

from paceline import versions

OLDEST = (3, 0)
TESTED = (3, 0), (3, 1), (3, 2), (3, 3)  # a new minor version may rename the private calls: see internals.py


def check() -> None:
    distributions = ("paddlepaddle", "paddlepaddle-gpu")
    versions.check_version(
        "paceline.paddle", "PaddlePaddle", distributions, OLDEST, TESTED, extra="paddle", refuses_newer=True
    )
