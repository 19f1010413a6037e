"""Which versions of Paddle these files fit; checked before anything of Paddle's inside is touched."""

from __future__ import annotations

import re
from importlib import metadata

from paceline.errors import ConfigError

OLDEST = (3, 3)
FIRST_TOO_NEW = (3, 4)  # a new minor version may rename the private calls: see internals.py
_DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu")


class UnsupportedPaddleError(ConfigError, ImportError):
    """Paddle is missing, or of a version that Paceline was not tested with."""


def check() -> None:
    """Raise unless a supported Paddle is installed.

    Raises:
        UnsupportedPaddleError: Also an ImportError.
    """
    text = installed()
    found = re.match(r"(\d+)\.(\d+)", text)
    if not found:
        raise UnsupportedPaddleError(
            "paceline.paddle needs PaddlePaddle, which is not installed.",
            expected=_expected(),
            hint="pip install 'paceline[paddle]'",
        )
    if not OLDEST <= (int(found[1]), int(found[2])) < FIRST_TOO_NEW:
        raise UnsupportedPaddleError(
            f"paceline.paddle does not support PaddlePaddle {text}.",
            expected=_expected(),
            got=text,
            hint="pip install 'paceline[paddle]' chooses one that fits",
        )


def installed() -> str:
    """The version of the installed Paddle; "" if there is none."""
    found = [each for name in _DISTRIBUTIONS for each in metadata.distributions(name=name)]
    return found[0].version if found else ""


def _expected() -> str:
    return f"PaddlePaddle {OLDEST[0]}.{OLDEST[1]} up to, not including, {FIRST_TOO_NEW[0]}.{FIRST_TOO_NEW[1]}"
