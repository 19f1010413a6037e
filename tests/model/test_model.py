"""The protocol holds in every state that 2 ranks reach; mistakes in it are found; its steps are the code's.

`make model` searches the larger settings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.search import Found, search
from tests.model.state import Setting
from tests.model.steps import CODE, STEPS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cpp/core", "cpp/collectives", "cpp/reducer")


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(2, (1, 2), passes=2), id="claimed"),
        pytest.param(Setting(2, (2, 2), passes=2, assigned=True), id="assigned"),
        pytest.param(Setting(2, (2, 1), passes=2, unused=(1, 1)), id="void-pass"),
        pytest.param(Setting(2, (1, 1), passes=1, deaths=1), id="death"),
        pytest.param(Setting(2, (2,), passes=2, deadlines=1), id="stopped-beyond-the-deadline"),
        pytest.param(Setting(2, (1, 1), passes=2, unused=(1, 0), deadlines=1), id="void-pass-deadline"),
        pytest.param(Setting(2, (1, 1), passes=2, leaver=(2, 1)), id="leaving-in-mid-pass"),
    ],
)
def test_the_protocol_holds(setting):
    assert search(setting) > 1000


@pytest.mark.parametrize(
    ("setting", "finding"),
    [
        (Setting(2, (1, 2), mistake="no ring at the end"), "deadlock"),
        (Setting(2, (1, 1), mistake="sleeps without comparing"), "deadlock"),
        (Setting(3, (1,), mistake="one is woken"), "deadlock"),
        (Setting(2, (2, 1), passes=2, unused=(1, 1), mistake="no reset"), "deadlock"),
        (Setting(2, (2,), deadlines=1, mistake="each decides alone"), "survivors disagree"),
        (Setting(2, (2, 2), deadlines=1, mistake="goes on after the end"), "goes on reducing"),
    ],
    ids=lambda value: value.mistake if isinstance(value, Setting) else "",
)
def test_a_mistake_is_found(setting, finding):
    with pytest.raises(Found, match=finding):
        search(setting)


def source_text() -> str:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.[ch]*"))]
    return "\n".join(path.read_text() for path in files)


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_each_step_stands_for_code_that_exists():
    text = without_spaces(source_text())
    missing = [
        f"{at}: {words}" for at, code in CODE.items() for words in code if without_spaces(words) not in text
    ]
    assert not missing, "the model names code that is no longer there:\n" + "\n".join(missing)
    assert CODE.keys() == STEPS.keys()
    assert all(CODE.values())


def test_every_point_of_a_pass_is_a_step():
    """A new labelled point of the reducer must be thought of here too."""
    reducer = "\n".join(path.read_text() for path in sorted((ROOT / "cpp/reducer").glob("*.cc")))
    points = {part.split(")")[0].strip() for part in reducer.split("fault_point(Point::")[1:]}
    assert points <= {words for code in CODE.values() for words in code}
