"""The supported versions of torch; `scripts/try-versions` runs the tests with other versions."""

from __future__ import annotations

from paceline import versions

OLDEST = (2, 6)
TESTED = (2, 6), (2, 7), (2, 8), (2, 9), (2, 10), (2, 11), (2, 12), (2, 13), (2, 14), (2, 15)


def check() -> None:
    """Raise unless a supported torch is installed; warn of a version that was not tested.

    Raises:
        UnsupportedVersionError: Also an ImportError.
    """
    versions.check_version("paceline.torch", "PyTorch", ["torch"], OLDEST, TESTED, extra="torch")
