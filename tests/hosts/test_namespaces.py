"""Training over real links: right gradients, and no more bytes on the link than necessary."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.warm import warm_python
from tests.hosts.__main__ import floor_bytes, measure
from tests.hosts.namespaces import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


def measured(layout: str, *ways: str, framework: str = "torch") -> dict[str, Any]:
    """Measure a single round: the time of steps does not matter here."""
    python = warm_python(framework)
    return measure(layout, "1gbit", 1_000_000, rounds=1, ways=ways, framework=framework, python=python)


@pytest.mark.parametrize("layout", ["2x2 in turn", "3x1", "2+1"])
def test_no_byte_crosses_the_network_twice(layout: str) -> None:
    found = measured(layout, "torch", "hosts")  # checks the gradients
    least = floor_bytes(layout, found["nbytes"])
    sent = {way: each[0] for way, each in found["sent_bytes"].items()}
    assert 1.0 < sent["hosts"] / least < 1.08  # the rest is packet headers and acknowledgements
    if layout == "2x2 in turn":  # with other layouts, torch's ring sends about as little
        assert sent["torch"] > 1.4 * least  # shows that the counters work


@pytest.mark.parametrize("layout", ["2x2 in turn", "3x1"])
def test_no_byte_crosses_the_network_twice_with_paddle(layout: str) -> None:
    found = measured(layout, "hosts", framework="paddle")
    assert 1.0 < found["sent_bytes"]["hosts"][0] / floor_bytes(layout, found["nbytes"]) < 1.08


@pytest.mark.parametrize("layout, blocks", [("2x2 in turn", 2), ("2x3", 2), ("1+2", 1)])
def test_exact_sums_send_each_block_of_ranks(layout: str, blocks: int) -> None:
    """Host 0 sends as many bytes as docs/design/hosts.md states."""
    found = measured(layout, "exact")
    sent = found["sent_bytes"]["exact"][0] / floor_bytes(layout, found["nbytes"])
    assert 1.0 < sent / ((blocks + 1) / 2) < 1.08


def test_sigterm_removes_hosts_and_their_processes() -> None:
    program = (
        "from tests.hosts.namespaces import Hosts\n"
        "with Hosts(1, '1gbit') as hosts:\n"
        "    print(*hosts._names, hosts.start(0, ['sleep', '600'], {}).pid, flush=True)\n"
        "    input()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        name, pid = process.stdout.readline().split()
        assert name in subprocess.check_output(["ip", "netns", "list"], text=True)
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()
    assert name not in subprocess.check_output(["ip", "netns", "list"], text=True)


def test_floor_bytes() -> None:
    assert floor_bytes("2x2", 100) == floor_bytes("2x1", 100) == 100
    assert floor_bytes("3x1", 99) == 132
