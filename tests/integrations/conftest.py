"""Which of these tests may run beside each other."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each file is one worker's, and all of Ray's are: two clusters at once get in each other's way."""
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("ray" if "_ray" in name else name))
