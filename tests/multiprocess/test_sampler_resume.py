"""Jobs killed by SIGKILL at random steps resume on other numbers of ranks: each sample is committed once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.sampler_lives import LENGTH


@pytest.mark.parametrize(("kind", "kills"), [("samples", 25), ("batches", 10)])
def test_kills_lose_and_repeat_no_samples(tmp_path: Path, kind: str, kills: int) -> None:
    program = [sys.executable, "-m", "tests.multiprocess.sampler_lives", str(tmp_path), kind, str(kills), "7"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"once": LENGTH, "never": 0, "deaths": kills}
