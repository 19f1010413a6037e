"""A training with virtual ranks over real links has the bits of the framework alone in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import needs_paddle
from tests.hosts.namespaces import Hosts, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 240
STEPS = 7  # two epochs and one step


@pytest.mark.parametrize("layout", [(0, 0, 1, 1), (0, 0, 0, 1)], ids=["2x2", "3+1"])
@pytest.mark.parametrize("kind", ["averaged", "gpt"])
@pytest.mark.parametrize("framework", ["torch", pytest.param("paddle", marks=needs_paddle)])
def test_two_hosts_have_the_bits_of_one_process(framework: str, kind: str, layout: tuple[int, ...]) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.hosts.same_bits_rank",
        framework,
        kind,
        str(STEPS),
    ]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Hosts(2, "1gbit") as hosts:
        alone = hosts.start(0, [*command, "by-hand"], {"OMP_NUM_THREADS": "1"}, **options)
        ranks = hosts.start_ranks(command, layout, {}, **options)
        (expected, error), *found = [each.communicate(timeout=WITHIN_S) for each in (alone, *ranks)]
    assert alone.returncode == 0, error
    assert [output for output, _ in found] == [f"hosts {expected}"] * len(ranks), found
