"""The steps at the end of a process, whatever fails on the way."""

from __future__ import annotations

import pytest

from paceline.health import exit_reports


class Leaving:
    """Notes its exit warning, and raises if asked to."""

    def __init__(self, name: str, said: list[str], *, is_broken: bool = False) -> None:
        self.name, self.said, self.is_broken = name, said, is_broken

    def leave(self) -> None:
        self.said.append(self.name)
        if self.is_broken:
            raise RuntimeError(f"{self.name} is broken")


def test_an_exit_warning_that_raises_keeps_no_other_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("_exit_warnings", "_last_exit_warnings"):
        monkeypatch.setattr(exit_reports, name, [])
    monkeypatch.setattr(exit_reports, "close_all", lambda: said.append("the groups"))
    leaving = [Leaving("first", said), Leaving("second", said, is_broken=True), Leaving("third", said)]
    exit_reports.before_leaving(leaving[2].leave, is_last=True)
    for each in leaving[:2]:
        exit_reports.before_leaving(each.leave)
    with pytest.raises(RuntimeError, match="second is broken"):
        exit_reports._end()
    assert said == ["first", "second", "third", "the groups"]
