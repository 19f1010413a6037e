"""Each tutorial's script runs as the page describes, and prints the page's output except for numbers."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tutorials
from tests.harness.warm import warm_python
from tests.tutorials import FOLDER, Step, steps, words_of

PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
# Left out: it takes a minute, and needs an idle machine. test_tune.py has shorter runs.
TUNES = ["paceline", "tune", "gru.py"]
# Run by a Python that starts anew: the first page, and those about what happens while one starts or dies. The
# others have the framework imported.
AS_A_READER = ("first", "faults", "machines", "torch-script")


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_runs_as_it_says(page: str, tmp_path: Path) -> None:
    if page == "paddle-script" and importlib.util.find_spec("paddle") is None:
        pytest.skip("PaddlePaddle is not installed")
    framework = "paddle" if page == "paddle-script" else "torch"
    python = sys.executable if page in AS_A_READER else warm_python(framework)
    for step in steps(FOLDER / f"{page}.md"):
        outputs = tutorials.run(shortened(step), tmp_path, python)
        if step.command == TUNES:
            assert outputs == [""]
            continue
        assert len(outputs) == len(step.shown), f"{' '.join(step.command)}: the page does not show its output"
        # Either of two hosts may be the first.
        assert sum(map(words_of, outputs), words_of("")) == sum(map(words_of, step.shown), words_of(""))


def shortened(step: Step) -> Step:
    """Replace the command that tunes by a run of the same script for three steps."""
    if step.command != TUNES:
        return step
    script = step.files["gru.py"]
    assert "range(100_000)" in script
    short = {"gru.py": script.replace("range(100_000)", "range(3)")}
    return replace(step, command=["paceline", "run", "-n", "2", "gru.py"], files=short)


def test_the_tutorials_are_in_an_order() -> None:
    """Each tutorial is in the list of the start page, and links to the next one."""
    listed = FOLDER.joinpath("index.md").read_text().partition(":hidden:")[2].split("```")[0].split()
    assert sorted(listed) == PAGES
    for page, following in itertools.pairwise(listed):
        ending = (FOLDER / f"{page}.md").read_text().rpartition("\nNext: [")[2]
        assert f"({following}.md)" in ending or page == "torch-script"  # an alternative to the next page
