"""The protocol holds in every state that 2 ranks reach; mistakes in it are found; its steps match the code.

`make model` searches the larger settings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.search import Found, search
from tests.model.state import PLAIN, Backward, Setting
from tests.model.steps import CODE, STEPS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cpp/core", "cpp/collectives", "cpp/reducer")


TWICE = (PLAIN, PLAIN)
VOID = Backward(left_out=(1,))
GLOBALLY_UNUSED = Backward(left_out=(0, 1), globally_unused=True)
USED_BY_ONE = Backward(left_out=(1,), globally_unused=True)
GLOBALLY_UNUSED_FINISHED = Backward(left_out=(1,), globally_unused=True, finished=0)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(2, (1, 2), TWICE), id="claimed"),
        pytest.param(Setting(2, (2, 2), TWICE, assigned=True), id="assigned"),
        pytest.param(Setting(2, (2, 1), (VOID, PLAIN)), id="void-backward"),
        pytest.param(Setting(2, (1, 1), deaths=1), id="death"),
        pytest.param(Setting(2, (2,), TWICE, deadlines=1), id="stopped-beyond-the-deadline"),
        pytest.param(
            Setting(2, (1, 1), (Backward(left_out=(0,)), PLAIN), deadlines=1), id="void-backward-deadline"
        ),
        pytest.param(Setting(2, (1, 1), TWICE, leaver=(2, 1)), id="leaving-in-mid-backward"),
        pytest.param(Setting(2, (1, 1), (Backward(left_out=(1,), allowed_by=(1,)), PLAIN)), id="allowed"),
        pytest.param(
            Setting(2, (1, 1), (Backward((0, 1), (0, 1)), Backward((0, 1), (0,)))), id="frozen-on-one-rank"
        ),
        pytest.param(Setting(2, (1, 1), (GLOBALLY_UNUSED, USED_BY_ONE, PLAIN)), id="globally_unused"),
        pytest.param(
            Setting(2, (1, 1), (GLOBALLY_UNUSED_FINISHED, GLOBALLY_UNUSED)), id="globally-unused-without-data"
        ),
        pytest.param(
            Setting(2, (1,), (GLOBALLY_UNUSED, USED_BY_ONE), deadlines=1), id="globally-unused-deadline"
        ),
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
        (Setting(2, (2, 1), (VOID, PLAIN), mistake="no reset"), "deadlock"),
        (Setting(2, (2,), deadlines=1, mistake="each decides alone"), "survivors disagree"),
        (Setting(2, (2, 2), deadlines=1, mistake="goes on after the end"), "goes on reducing"),
        (Setting(2, (1, 1), (GLOBALLY_UNUSED,), mistake="no zeros for globally unused"), "deadlock"),
        (Setting(2, (1, 1), (USED_BY_ONE,), mistake="decides by its own flags"), "backward 1 good"),
        (
            Setting(2, (1, 1), (GLOBALLY_UNUSED_FINISHED,), mistake="ranks without data count"),
            "backward 1 void",
        ),
        (Setting(2, (1, 1), (GLOBALLY_UNUSED,), mistake="compares too early"), "what rank . left out in 0"),
        (
            Setting(2, (1,), (GLOBALLY_UNUSED, PLAIN), mistake="one place for what is left out"),
            "left out in 2",
        ),
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


def test_every_point_of_a_backward_is_a_step():
    """A new labelled point of the reducer needs a step here."""
    reducer = "\n".join(path.read_text() for path in sorted((ROOT / "cpp/reducer").glob("*.cc")))
    points = {part.split(")")[0].strip() for part in reducer.split("fault_point(Point::")[1:]}
    assert points <= {words for code in CODE.values() for words in code}
